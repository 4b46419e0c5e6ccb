"""`python -m ascend_moe_train.selftest.worker FOLDER`: one process of the checks that FOLDER/asked.json names.

As a rank of several it is started once for each, and does every check together with the others.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")  # both are read while MindSpore is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from ascend_moe_train.cluster import variables
from ascend_moe_train.cluster.as_rank import as_rank
from ascend_moe_train.cluster.rank import progress
from ascend_moe_train.cluster.tether import die_with_parent
from ascend_moe_train.selftest.processes import asked_of, found_path
from ascend_moe_train.selftest.results import Finding, Notes

# By the option `kind`: a function that is given what was asked, and returns what does the check of a name.
KINDS = {
    "machine": "ascend_moe_train.selftest.machine",
    "reference": "ascend_moe_train.selftest.reference",
    "kernels": "ascend_moe_train.selftest.kernels",
    "collectives": "ascend_moe_train.selftest.collectives",
    "training": "ascend_moe_train.selftest.training",
}
NATIVE_RANK = "RANK_ID"  # as msrun has it

Look = Callable[[str], Finding]


def main(folder: Path) -> int:
    """Does the checks. Exit code 1 after one that failed on a rank of several: the others may wait for this one."""
    asked = asked_of(folder)
    is_one_of_many = asked["ranks"] > 1
    # without a launcher msrun leaves a number in the environment of every rank, and nothing does of a single process
    rank = int(os.environ.get(variables.RANK) or os.environ.get(NATIVE_RANK) or 0) if is_one_of_many else 0
    notes = Notes(found_path(folder, rank), asked["part"])
    look = looker(asked)
    for number, name in enumerate(asked["checks"], 1):
        progress().phase("step", number)
        result = notes.check(name, partial(look, name))
        if result.status == "failed" and is_one_of_many:
            print(f"error: {name}: {result.detail}", file=sys.stderr)
            return 1
    return 0


def looker(asked: dict[str, Any]) -> Look:
    """What does the checks of a kind."""
    look: Look = importlib.import_module(KINDS[asked["kind"]]).looker(asked)
    return look


if __name__ == "__main__":
    given = Path(sys.argv[1])
    # msrun leaves its ranks behind when it is killed
    die_with_parent(os.getppid())
    sys.exit(as_rank(lambda: (main(given), None)))
