"""`amt launch`."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascend_moe_train.cli import launch_jobs
from ascend_moe_train.cli.config import OVERRIDES, RUN_FILE
from ascend_moe_train.cli.hosts import host_options
from ascend_moe_train.cli.launch_starts import Asked, HereStarts, HostStarts, Starts

if TYPE_CHECKING:
    from ascend_moe_train.cluster.restarts import Restarts, Started
    from ascend_moe_train.config import RunConfig
    from ascend_moe_train.train.view import View


@click.group("launch")
@click.option("--ranks", type=int, help="How many ranks, on this machine.")
@host_options
@click.option("--spares", default=0, help="How many of the hosts, the last ones, only take the places of bad ones.")
@click.option("--env", multiple=True, metavar="NAME", help="A variable that ranks on other hosts are to have as well.")
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
@click.option("--detach", is_flag=True, help="Go on in the background; see status, logs and stop.")
@click.pass_context
def command(
    context: click.Context,
    ranks: int | None,
    hostfile: Path | None,
    hosts_from: str | None,
    slots: int | None,
    spares: int,
    env: tuple[str, ...],
    starter: str,
    restarts: int | None,
    dry_run: bool,
    detach: bool,
) -> None:
    """Run a command as the ranks of one run, here or on several hosts; see how it fares, stop it."""
    context.obj = Asked(
        ranks=ranks,
        hostfile=hostfile,
        hosts_from=hosts_from,
        slots=slots,
        spares=spares,
        env=env,
        starter=starter,
        restarts=restarts,
        dry_run=dry_run,
        detach=detach,
    )


command.add_command(launch_jobs.status)
command.add_command(launch_jobs.logs)
command.add_command(launch_jobs.stop)


@command.command("train")
@RUN_FILE
@OVERRIDES
@click.option("--json", "as_json", is_flag=True, help="Print records as JSON lines instead of a table.")
@click.pass_obj
def train(asked: Asked, run_yaml: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Train the model of RUN_YAML on all ranks together; the same command continues a run that was interrupted."""
    from ascend_moe_train.checkpoint.store import CHECKPOINTS, steps
    from ascend_moe_train.cluster.job_file import JobFile
    from ascend_moe_train.cluster.launch import LOG_FOLDER
    from ascend_moe_train.cluster.restarts import run_with_restarts
    from ascend_moe_train.train.json_view import JsonView
    from ascend_moe_train.train.live import LiveView
    from ascend_moe_train.train.start import check

    starts: Starts
    starts = HereStarts(asked, run_yaml, overrides) if asked.is_here else HostStarts(asked, run_yaml, overrides)
    starts(None, lambda line: click.echo(line, err=True))
    config = starts.config
    check(config, starts.ranks)
    if asked.dry_run:
        click.echo("\n".join(starts.shown()))
        return 0
    run_dir = Path(config.run.dir)
    arguments = [str(run_yaml), *(word for override in overrides for word in ("--set", override))]
    arguments += ["--json"] if as_json else []
    if asked.detach:
        return launch_jobs.detach([*asked.words(), "train", *arguments], run_dir)
    job_file = JobFile(run_dir / LOG_FOLDER, [*asked.words(), "train", *arguments])
    job_file.begin()
    table = LiveView(total_steps=config.run.steps, log_every=config.run.log_every)
    with JsonView() if as_json else table as view:
        outcome = run_with_restarts(
            starts,
            ViewScreen(view),
            _restarts(asked, config),
            lambda: max(steps(run_dir / CHECKPOINTS), default=None),
            lambda started, message: _doctored(started, message, run_dir),
        )
    job_file.end(outcome.exit_code)
    if outcome.message is not None:
        click.echo(outcome.message, err=True)
    return outcome.exit_code


def _doctored(job: "Started", message: str, run_dir: Path) -> str | None:
    """The doctor's verdict on a failure, kept with the logs, in one line; None where it has nothing to add."""
    from ascend_moe_train.doctor.keep import kept_verdict

    if job.log_folder is None:
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


def _restarts(asked: Asked, config: "RunConfig") -> "Restarts":
    from ascend_moe_train.cluster.restarts import Restarts

    given = config.parallel.restarts
    at_most = given.at_most if asked.restarts is None else asked.restarts
    return Restarts(at_most=at_most, pause_s=given.pause_s, longest_pause_s=given.longest_pause_s)
