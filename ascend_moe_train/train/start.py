"""The start of a run: what can be found wrong without MindSpore is found before it is imported. Pure."""

from contextlib import nullcontext
from pathlib import Path

from ascend_moe_train.config import RunConfig
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.train.inputs import open_inputs
from ascend_moe_train.train.ranks import Ranks, alone
from ascend_moe_train.train.run_lock import locked
from ascend_moe_train.train.stop import StopRequest
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
        from ascend_moe_train.train.loop import train

        return train(config, inputs, view, stop, ranks)
