"""The harness of the multi-rank tests: results, failures and hangs of ranks."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import RanksFailedError, run_ranks

DEADLINE_S = 60.0


def place(argument: dict[str, Any]) -> dict[str, Any]:
    from ascend_moe_train.parallel.mpi import MpiComm

    comm = MpiComm()
    return {
        "rank": comm.rank,
        "size": comm.world.size,
        "given": argument,
        "nested": [np.arange(comm.rank), np.int64(3)],
    }


def misbehave(argument: dict[str, Any]) -> None:
    """One rank does something, the others wait for it for ever."""
    from ascend_moe_train.parallel.mpi import MpiComm

    comm = MpiComm()
    Path(argument["folder"], str(os.getpid())).touch()
    comm.barrier(comm.world)
    if comm.rank == 1:
        match argument["how"]:
            case "raise":
                raise ValueError("this rank has enough")
            case "exit":
                raise SystemExit(7)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stall":
                time.sleep(1000)
    comm.barrier(comm.world)


def is_running(process: int) -> bool:
    try:
        return bool(Path(f"/proc/{process}/environ").read_bytes())
    except OSError:
        return False


def test_results_come_by_rank() -> None:
    results = run_ranks(3, "tests.unit.test_ranks:place", {"x": [1, None]}, deadline_s=DEADLINE_S)
    assert [(each["rank"], each["size"], each["given"]) for each in results] == [
        (r, 3, {"x": [1, None]}) for r in range(3)
    ]
    assert [each["nested"][0].tolist() for each in results] == [[], [0], [0, 1]]
    assert results[0]["nested"][1] == 3


@pytest.mark.parametrize(
    ("how", "deadline_s", "message"),
    [
        ("raise", DEADLINE_S, "this rank has enough"),
        ("exit", DEADLINE_S, "exit code 7"),
        ("die", DEADLINE_S, "exit code 9"),
        ("stall", 8.0, "in misbehave"),
    ],
)
def test_nothing_hangs_and_nothing_stays(how: str, deadline_s: float, message: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match=message):
        argument = {"how": how, "folder": str(tmp_path)}
        run_ranks(3, "tests.unit.test_ranks:misbehave", argument, deadline_s=deadline_s)
    processes = [int(path.name) for path in tmp_path.iterdir()]
    assert len(processes) == 3
    assert not [each for each in processes if is_running(each)]
