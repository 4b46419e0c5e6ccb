"""`amt launch`."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascend_moe_train.cli.config import OVERRIDES, RUN_FILE, whole_run

if TYPE_CHECKING:
    from ascend_moe_train.cluster.restarts import Restarts, Started
    from ascend_moe_train.cluster.variables import Starter
    from ascend_moe_train.cluster.verdict import Deadlines
    from ascend_moe_train.config import RunConfig
    from ascend_moe_train.train.view import View

RANK_MODULE = "ascend_moe_train.cli.rank_main"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options before the command that is launched."""

    ranks: int
    starter: str
    restarts: int | None
    dry_run: bool


@click.group("launch")
@click.option("--ranks", required=True, type=int, help="How many ranks.")
@click.option(
    "--starter",
    type=click.Choice(["auto", "mpiexec", "msrun"]),
    default="auto",
    help="What starts them: msrun where each is to have an NPU, else mpiexec.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0, 1000),
    help="How often in a row to start again after a failure without a new checkpoint; else parallel.restarts.at_most.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be run, and run nothing.")
@click.pass_context
def command(context: click.Context, ranks: int, starter: str, restarts: int | None, dry_run: bool) -> None:
    """Run a command as so many ranks of one run on this machine."""
    context.obj = Asked(ranks=ranks, starter=starter, restarts=restarts, dry_run=dry_run)


@command.command("train")
@RUN_FILE
@OVERRIDES
@click.option("--json", "as_json", is_flag=True, help="Print records as JSON lines instead of a table.")
@click.pass_obj
def train(asked: Asked, run_yaml: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Train the model of RUN_YAML on all ranks together; the same command continues a run that was interrupted."""
    from ascend_moe_train.checkpoint.store import CHECKPOINTS, steps
    from ascend_moe_train.cluster.ascend_environment import ascend_environment
    from ascend_moe_train.cluster.evidence import Failed
    from ascend_moe_train.cluster.launch import make_job, shown_command
    from ascend_moe_train.cluster.mpiexec import rank_command
    from ascend_moe_train.cluster.restarts import run_with_restarts
    from ascend_moe_train.cluster.supervise import Job
    from ascend_moe_train.train.json_view import JsonView
    from ascend_moe_train.train.live import LiveView
    from ascend_moe_train.train.start import check

    started_s, config = time.time(), whole_run(run_yaml, overrides)
    settings = [word for override in overrides for word in ("--set", override)]
    arguments = ["train", "--json", *settings, "--", str(run_yaml)]
    own, deadlines, run_dir = rank_command(RANK_MODULE, arguments), _deadlines(config), Path(config.run.dir)
    starter = _starter(asked, config)
    given = os.environ | (ascend_environment(config.ascend, os.environ) if _is_for_npus(config) else {})

    def start(failed: Failed | None) -> Job:
        return make_job(asked.ranks, own, deadlines, run_dir=run_dir, starter=starter, started_s=started_s, given=given)

    first = start(None)
    check(config, asked.ranks)
    if asked.dry_run:
        click.echo(shown_command(first))
        return 0
    table = LiveView(total_steps=config.run.steps, log_every=config.run.log_every)
    with JsonView() if as_json else table as view:
        outcome = run_with_restarts(
            start,
            ViewScreen(view),
            _restarts(asked, config),
            lambda: max(steps(run_dir / CHECKPOINTS), default=None),
            lambda started, message: _doctored(started, message, run_dir),
        )
    if outcome.message is not None:
        click.echo(outcome.message, err=True)
    return outcome.exit_code


def _doctored(job: "Started", message: str, run_dir: Path) -> str | None:
    """The doctor's verdict on a failure, kept with the logs, in one line; None where it has nothing to add."""
    from ascend_moe_train.doctor.keep import kept_verdict

    if job.log_folder is None or "\n" not in message:
        return None
    # a failure is told already: whatever goes wrong here must not take its place
    with contextlib.suppress(Exception):
        return kept_verdict(run_dir, job.log_folder, job.run_id, message)
    return None


class ViewScreen:
    """Shows rank 0's records as the view of a single process does, and all other lines as remarks."""

    def __init__(self, view: "View") -> None:
        self._view = view

    def line(self, rank: int, text: str, *, is_error: bool) -> None:
        """Takes in a line. Raises OSError: nobody reads the output any more."""
        from ascend_moe_train.cluster.output import labelled
        from ascend_moe_train.train.metrics import record_of_line

        record = record_of_line(text) if rank == 0 and not is_error else None
        try:
            if record is not None:
                self._view.show(record)
            else:
                self._view.note(text if rank == 0 else labelled(rank, text))
        except SystemExit:  # rich makes that of a broken pipe
            raise BrokenPipeError from None


def _starter(asked: Asked, config: "RunConfig") -> "Starter":
    """Raises ConfigError: a run on NPUs that has more ranks than this host has of them, unless nothing is run."""
    from ascend_moe_train.cluster.msrun import check_devices, num_devices

    is_ascend = _is_for_npus(config)
    if is_ascend and not asked.dry_run:
        check_devices(asked.ranks, num_devices())
    if asked.starter == "mpiexec" or (asked.starter == "auto" and not is_ascend):
        return "mpiexec"
    return "msrun"


def _is_for_npus(config: "RunConfig") -> bool:
    from ascend_moe_train.cluster.msrun import num_devices

    return config.run.device == "ascend" or (config.run.device == "auto" and num_devices() > 0)


def _restarts(asked: Asked, config: "RunConfig") -> "Restarts":
    from ascend_moe_train.cluster.restarts import Restarts

    given = config.parallel.restarts
    at_most = given.at_most if asked.restarts is None else asked.restarts
    return Restarts(at_most=at_most, pause_s=given.pause_s, longest_pause_s=given.longest_pause_s)


def _deadlines(config: "RunConfig") -> "Deadlines":
    from ascend_moe_train.cluster.verdict import Deadlines

    given = config.parallel.deadlines
    return Deadlines(compile_s=given.compile_s, step_s=given.step_s, save_s=given.save_s)
