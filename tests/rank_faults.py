"""The real command as a rank, with something that goes wrong on one rank when it comes to a phase of a step.

`python -m tests.rank_faults '{"rank": 2, "phase": "step", "step": 3, "what": "raise"}' train run.yaml`
"""

import json
import os
import resource
import signal
import sys
import time
from typing import Any
from unittest.mock import patch

from ascend_moe_train.cli import rank_main
from ascend_moe_train.cluster.board import Phase, Slot


def cause(what: str) -> None:
    """Something goes wrong here, or in the next collective."""
    from ascend_moe_train.parallel.mpi import MpiComm

    def fail(*arguments: Any, **options: Any) -> Any:
        raise ValueError("of a test")

    match what:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stall":
            time.sleep(1000)
        case "raise":
            patch.object(MpiComm, "all_to_all_v", fail).start()
        case "full disk":
            # the system refuses to let a file grow beyond this, as a full disk would
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def main(fault: dict[str, Any], arguments: list[str]) -> int:
    """A rank."""
    phase = Slot.phase

    def watched_phase(slot: Slot, name: Phase, step: int | None = None) -> None:
        phase(slot, name, step)
        if (name, step) == (fault["phase"], fault["step"]) and int(os.environ["AMT_RANK"]) == fault["rank"]:
            cause(fault["what"])

    with patch.object(Slot, "phase", watched_phase):
        return rank_main.main(arguments)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
