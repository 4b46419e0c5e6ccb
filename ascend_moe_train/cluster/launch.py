"""Starts the same program as so many ranks of one run on this machine, and sees to their end. Pure."""

import math
import os
import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ascend_moe_train.cluster import msrun, variables
from ascend_moe_train.cluster.mpiexec import check_ranks, command_line, find_mpiexec, rank_environment
from ascend_moe_train.cluster.output import Screen
from ascend_moe_train.cluster.supervise import Job, Outcome, supervise
from ascend_moe_train.cluster.variables import Starter
from ascend_moe_train.cluster.verdict import Deadlines
from ascend_moe_train.errors import ConfigError

LOG_FOLDER = "logs"
MSRUN_FOLDER = "msrun"


def make_job(
    ranks: int,
    rank_command: Sequence[str],
    deadlines: Deadlines,
    *,
    run_dir: Path | None = None,
    starter: Starter = "mpiexec",
    started_s: float | None = None,
    given: Mapping[str, str] = os.environ,
) -> Job:
    """What it takes to run `rank_command` on every rank; msrun needs a `run_dir`. `started_s` is when the launcher was
    started, since 1970: now, unless given. Raises ConfigError: too many ranks, or no MPI or MindSpore installed."""
    check_ranks(ranks)
    if sys.platform != "linux":
        raise ConfigError(f"ranks are started on Linux only, and this is {sys.platform}")
    run_id = f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(4)}"
    control = f"ascend-moe-train-{run_id}-{secrets.token_hex(8)}"
    own = {variables.RUN_ID: run_id, variables.CONTROL: control, variables.STARTER: starter}
    own[variables.STARTED] = repr(time.time() if started_s is None else started_s)
    log_folder = None if run_dir is None else run_dir / LOG_FOLDER
    if starter == "mpiexec":
        command = command_line(find_mpiexec(), ranks, rank_command)
    else:
        if log_folder is None:
            raise ValueError("msrun writes logs into the folder of a run")
        own["PATH"] = msrun.path_variable(given)
        folder, meet_s = log_folder / MSRUN_FOLDER, math.ceil(deadlines.compile_s)
        command = msrun.command_line(
            ranks, msrun.guarded(rank_command), log_folder=folder, port=msrun.free_port(), meet_s=meet_s
        )
    return Job(
        ranks=ranks,
        starter=starter,
        command=command,
        environment=rank_environment(ranks, given, own),
        deadlines=deadlines,
        control=control,
        run_id=run_id,
        log_folder=log_folder,
    )


def launch(job: Job, screen: Screen) -> Outcome:
    """Runs a job, as `supervise` does."""
    return supervise(job, screen)


def shown_command(job: Job, given: Mapping[str, str] = os.environ) -> str:
    """The command of a job as a shell would take it, with what it adds to the environment."""
    added = {name: value for name, value in job.environment.items() if given.get(name) != value}
    del added[variables.RUN_ID], added[variables.CONTROL], added[variables.STARTED]
    words = [f"{name}={value}" for name, value in sorted(added.items())]
    return shlex.join(["env", *words, *job.command])
