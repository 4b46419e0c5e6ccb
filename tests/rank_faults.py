"""The real command as a rank, with something that goes wrong on one rank when it comes to a phase of a step.

`python -m tests.rank_faults '{"rank": 2, "phase": "step", "step": 3, "what": "raise"}' train run.yaml`
"""

import gc
import json
import os
import resource
import sys
import time
from typing import Any
from unittest.mock import patch

from ascend_moe_train.cli import rank_main
from ascend_moe_train.cluster.board import Phase, Slot
from ascend_moe_train.data.loader import Batch, TrainLoader
from tests.mistakes import MISTAKES, Fault


def cause(fault: Fault) -> None:
    """Something goes wrong here, or in the next collective."""
    from ascend_moe_train.parallel.mpi import MpiComm

    def fail(*arguments: Any, **options: Any) -> Any:
        raise ValueError("of a test")

    match fault["what"]:
        case "stall":
            time.sleep(1000)
        case "raise":
            patch.object(MpiComm, "all_to_all_v", fail).start()
        case "full disk":
            # the system refuses to let a file grow beyond this, as a full disk would
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        case "slow data":
            batch = TrainLoader.batch

            def slow_batch(loader: TrainLoader, step: int) -> Batch:
                time.sleep(fault["seconds"])
                return batch(loader, step)

            patch.object(TrainLoader, "batch", slow_batch).start()
        case "nan":
            spoil_weight(fault["weight"])
        case what:
            MISTAKES[what](fault)


def spoil_weight(name: str) -> None:
    """One number of a weight is not one any more, as after a fault of memory or a bad kernel."""
    import mindspore as ms

    from ascend_moe_train.model.transformer import Transformer

    (model,) = (each for each in gc.get_objects() if type(each) is Transformer)  # others may be weak references
    weight = dict(model.weights())[name]
    value = weight.asnumpy().copy()
    value.flat[0] = float("nan")
    weight.set_data(ms.Tensor(value))


def main(fault: Fault, arguments: list[str]) -> int:
    """A rank."""
    phase = Slot.phase

    def watched_phase(slot: Slot, name: Phase, step: int | None = None) -> None:
        phase(slot, name, step)
        if (name, step) == (fault["phase"], fault["step"]) and int(os.environ["AMT_RANK"]) == fault["rank"]:
            cause(fault)

    with patch.object(Slot, "phase", watched_phase):
        return rank_main.main(arguments)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
