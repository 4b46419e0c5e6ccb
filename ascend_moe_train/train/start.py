"""The start of a run: what can be found wrong without MindSpore is found before it is imported. Pure."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from ascend_moe_train.cluster.ascend_environment import ascend_environment, environment_line
from ascend_moe_train.cluster.msrun import num_devices
from ascend_moe_train.cluster.rank import started_s
from ascend_moe_train.cluster.version_files import read_host
from ascend_moe_train.cluster.versions import check_versions, misfits
from ascend_moe_train.config import RunConfig
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.train.inputs import open_inputs
from ascend_moe_train.train.ranks import Ranks, alone
from ascend_moe_train.train.run_lock import locked
from ascend_moe_train.train.stop import StopRequest, TimeLimit
from ascend_moe_train.train.view import View


def check(config: RunConfig, num_ranks: int) -> None:
    """Finds what would keep a run on so many ranks from starting, as far as that shows without starting it.

    Leaves nothing behind. Raises UserError subclasses.
    """
    mesh = mesh_of(config, num_ranks)
    with locked(Path(config.run.dir)):
        open_inputs(config, 0, mesh.dp)


def start(config: RunConfig, view: View, stop: StopRequest, ranks: Ranks | None = None) -> int:
    """Trains as `loop.train` does, on one rank unless some have met. A start that fails leaves no file behind.

    Returns the exit code: 0, or 128 plus the number of the signal that stopped it. Raises UserError subclasses.
    """
    ranks = alone(config) if ranks is None else ranks
    inputs = open_inputs(config, ranks.data.index, ranks.data.size)
    with locked(Path(config.run.dir)) if ranks.is_first else nullcontext():
        prepare_ascend(config, view.note)
        stop.limit = _time_limit(config, stop.since_s)
        from ascend_moe_train.train.loop import train

        return train(config, inputs, view, stop, ranks)


def _time_limit(config: RunConfig, since_s: float) -> TimeLimit | None:
    """That of the run, counted from the start of the launcher, else from `since_s`."""
    if config.run.time_limit_s is None:
        return None
    begin_s = started_s() or since_s
    return TimeLimit(end_s=begin_s + config.run.time_limit_s, reserve_s=config.run.time_reserve_s)


def prepare_ascend(config: RunConfig, note: Callable[[str], None]) -> None:
    """On a host with NPUs, unless the run is for the CPU: sets what HCCL and MindSpore read from the environment, and
    notes what it is, and, in one line, which versions do not fit. Ranks have it from the launcher: to meet, they
    import MindSpore before this.

    Raises ConfigError as `ascend_environment` does.
    """
    if config.run.device == "cpu" or num_devices() == 0:
        return
    chosen = ascend_environment(config.ascend, os.environ)
    note(environment_line(config.ascend, os.environ))
    os.environ.update(chosen)
    if (warning := misfits(check_versions(read_host()))) is not None:
        note(f"warning: {warning}")
