"""The launcher of a selftest whose ranks misbehave: see tests/faults/test_selftest.py.

As a program with a folder it starts the ranks; with `--rank` before the folder it is one of them.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ascend_moe_train.cluster import variables
from ascend_moe_train.cluster.as_rank import as_rank
from ascend_moe_train.parallel.comm import ObservedComm
from ascend_moe_train.selftest import mpi_ranks, worker
from ascend_moe_train.selftest.processes import asked_of

NAME = "tests.selftest_ranks"


def misbehaving(verb: Any, how: str) -> Any:
    """A verb that hangs before it meets the others, or gives something else, on rank 1."""

    def call(*arguments: Any, **options: Any) -> Any:
        if os.environ[variables.RANK] == "1":
            if how == "hangs":
                time.sleep(1000)
            return verb(*arguments, **options) + 1
        return verb(*arguments, **options)

    return call


def rank_main(folder: Path) -> int:
    """One rank, on which `asked.json` says what is wrong with which verb."""
    from ascend_moe_train.parallel.mpi import MpiComm

    asked = asked_of(folder)
    verb = asked["wrong verb"]
    place = ObservedComm if asked["how"] == "hangs" else MpiComm
    with patch.object(place, verb, misbehaving(getattr(place, verb), asked["how"])):
        return worker.main(folder)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        sys.exit(as_rank(lambda: (rank_main(Path(sys.argv[2])), None)))
    arguments = patch.object(
        mpi_ranks, "rank_command", lambda name, given: [sys.executable, "-m", NAME, "--rank", *given]
    )
    with arguments:
        sys.exit(mpi_ranks.main(Path(sys.argv[1])))
