"""Which cores each rank of a host has, where all of them together have all. Pure.

MindSpore's threads wait for each other by `sched_yield`. Where a core has those of two ranks, it goes to threads that
wait while others have work.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ascend_moe_train.cluster import variables

_TOPOLOGY = Path("/sys/devices/system/cpu")
_THREADS = "OMP_NUM_THREADS"
# of MPI's launcher: how many ranks this host has, and which of them this is
_RANKS_HERE, _PLACE = "MPI_LOCALNRANKS", "MPI_LOCALRANKID"


def num_cores() -> int:
    """Cores that this process may use; of a rank, those that all ranks of its host may use together."""
    given = os.environ.get(variables.CORES, "")
    if given.isdecimal():
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(cores: Sequence[int], topology: Path = _TOPOLOGY) -> list[int]:
    """In an order in which those that share a socket, and of them those that share a physical core, are neighbours."""

    def place(core: int) -> tuple[int, int, int]:
        found = []
        for name in ("physical_package_id", "core_id"):
            try:
                found.append(int((topology / f"cpu{core}" / "topology" / name).read_text()))
            except (OSError, ValueError):
                found.append(core if name == "core_id" else 0)
        return found[0], found[1], core

    return sorted(cores, key=place)


def own_cores(environment: Mapping[str, str], cores: Sequence[int]) -> list[int]:
    """Those of `cores`, which stand side by side, that a rank started by MPI keeps to: as many as it has threads. All
    of them where ranks do not share out all cores evenly, or the user has given them other numbers of threads."""
    numbers = [environment.get(name, "") for name in (_RANKS_HERE, _PLACE, _THREADS)]
    if not all(number.isdecimal() for number in numbers):
        return list(cores)
    ranks, place, threads = map(int, numbers)
    if ranks * threads != len(cores) or place >= ranks:
        return list(cores)
    return list(cores[place * threads : (place + 1) * threads])
