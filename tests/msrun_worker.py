"""What a user may start by MindSpore's msrun: `msrun ... tests/msrun_worker.py JSON`. A small training in which all
ranks add up their gradients, and something goes wrong on one of them, said by the argument: see `mistakes`.

It knows nothing of the package, as programs of others do not.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.mistakes import AT_START, MISTAKES

FAULT: dict[str, Any] = json.loads(sys.argv[1])
STEP = 6  # at which it goes wrong
IS_FAULTY = os.environ.get("MS_ROLE") != "MS_SCHED" and os.environ.get("RANK_ID") == str(FAULT.get("rank"))


def load_damaged() -> None:
    """A checkpoint of which a part is missing."""
    path = Path(FAULT["folder"]) / "damaged.safetensors"
    save_file({"weight": np.ones(1000, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    load_file(path)


def main() -> None:
    """A rank."""
    if IS_FAULTY and FAULT["what"] in AT_START:
        MISTAKES[FAULT["what"]](FAULT)
    import mindspore
    from mindspore.communication import get_group_size, get_rank, init

    mindspore.set_device("CPU")
    init()
    rank, size = get_rank(), get_group_size()
    print(f"rank {rank} of {size}", flush=True)
    all_reduce = mindspore.ops.AllReduce()
    weight, x = np.zeros(16, np.float32), np.full(16, 1 + rank, np.float32)
    for step in range(1, FAULT.get("steps", 12) + 1):
        if IS_FAULTY and step == STEP and FAULT["what"] not in AT_START:
            match FAULT["what"]:
                case "nan":
                    weight[3] = np.nan
                case "config":  # that of another batch size
                    weight, x = np.zeros(24, np.float32), np.ones(24, np.float32)
                case "load_damaged":
                    load_damaged()
                case what:
                    MISTAKES[what](FAULT)
        if FAULT.get("killed") == rank and step == STEP:
            MISTAKES["kill"](FAULT)
        error = weight * x - 1
        loss = float((error**2).mean())
        gradient = all_reduce(mindspore.Tensor(error * x)).asnumpy() / size
        weight = weight - 0.01 * gradient
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} step {step}, loss: {loss:.5f}", flush=True)
        time.sleep(FAULT.get("pause_s", 0.02))


if __name__ == "__main__":
    main()
