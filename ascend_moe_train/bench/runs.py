"""Ranks that measure something: what they are told and what they leave are files of a folder of theirs. Pure."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe_train.bench.ladder import PutIn
from ascend_moe_train.bench.measured import ASKED, FOUND, Measured, read_measured
from ascend_moe_train.cluster.launch import launch, make_job
from ascend_moe_train.cluster.mpiexec import rank_command
from ascend_moe_train.cluster.of_run import deadlines_of, is_for_npus, npu_variables
from ascend_moe_train.cluster.output import labelled
from ascend_moe_train.cluster.supervise import Job
from ascend_moe_train.cluster.verdict import EXITS_STOPPED
from ascend_moe_train.config import RunConfig, run_to_dict
from ascend_moe_train.errors import MetricsError
from ascend_moe_train.train.metrics import record_of_line, replace_file

RANK_MODULE = "ascend_moe_train.bench.rung_rank"
NO_RESULT = "it left no result"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How ranks ended: `stopped` is the exit code when somebody stopped them, `problem` the first line of what else
    went wrong, with the folder of their logs."""

    stopped: int | None = None
    problem: str | None = None


class _Listener:
    """Tells of what the first rank says on standard error."""

    def __init__(self, say: Say, name: str) -> None:
        self._say, self._name = say, name

    def line(self, rank: int, text: str, *, is_error: bool) -> None:
        """Takes in a line; the others' are in the logs."""
        if is_error and rank == 0 and record_of_line(text) is None:
            self._say(f"  {self._name}: {labelled(rank, text)}")


def in_ranks(order: Mapping[str, Any], folder: Path, say: Say, make: Callable[[], Job]) -> Ended:
    """Runs a job whose ranks read `order` from the folder, and leave what they find there. Raises MetricsError: the
    folder cannot be written to; ConfigError as `make_job` does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FOUND).unlink(missing_ok=True)
    except OSError as error:
        raise MetricsError(f"{folder}: {error.strerror or error}") from None
    replace_file(folder / ASKED, [json.dumps(order).encode()])
    outcome = launch(make(), _Listener(say, folder.name))
    if outcome.exit_code in EXITS_STOPPED:
        return Ended(stopped=outcome.exit_code)
    if outcome.exit_code == 0 and (folder / FOUND).exists():
        return Ended()
    first = next(iter((outcome.message or NO_RESULT).splitlines())).removeprefix("error: ")
    return Ended(problem=f"{first}; what its ranks printed: {folder / 'logs'}")


def trained(
    config: RunConfig, ranks: int, steps: int, put_in: PutIn | None, folder: Path, say: Say
) -> tuple[Measured | None, Ended]:
    """Some steps of a run on so many ranks, its files in `folder` wherever the run file puts them."""
    run = run_to_dict(config)
    run["run"]["dir"] = str(folder / "run")
    order = {"run": run, "steps": steps, "put_in": put_in}
    ended = in_ranks(order, folder, say, lambda: training_job(config, ranks, folder))
    if ended != Ended():
        return None, ended
    measured = read_measured(folder / FOUND)
    return measured, Ended() if measured is not None else Ended(problem=f"{folder / FOUND} cannot be read")


def training_job(config: RunConfig, ranks: int, folder: Path) -> Job:
    """The ranks of a run, started as `amt launch` starts them. Raises ConfigError as `make_job` does."""
    return make_job(
        ranks,
        rank_command(RANK_MODULE, [str(folder)]),
        deadlines_of(config),
        run_dir=folder,
        starter="msrun" if is_for_npus(config) else "mpiexec",
        given=os.environ | npu_variables(config),
    )
