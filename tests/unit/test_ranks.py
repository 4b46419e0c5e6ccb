"""The harness of the multi-rank tests: results, failures and hangs of ranks."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import ranks
from tests.ranks import CLUSTER_STARTS, NOT_BUILT, RanksFailedError, run_ranks

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


@pytest.mark.parametrize(
    ("printed", "starts"),
    [([f"x\n{NOT_BUILT} y"] * 2, 3), ([f"{NOT_BUILT} y"] * 9, CLUSTER_STARTS), (["SIGSEGV"] * 9, 1)],
)
def test_a_cluster_that_is_not_built_is_started_again(
    printed: list[str], starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a rank did is not tried again."""
    begun: list[Path] = []

    def run(command: list[str], extra: dict[str, str], deadline_s: float, folder: Path) -> tuple[int, str]:
        begun.append(folder)
        if len(begun) <= len(printed):
            return 1, printed[len(begun) - 1]
        for rank in range(2):
            np.savez(folder / f"result.{rank}.npz")
            (folder / f"result.{rank}.json").write_text(str(rank))
        return 0, ""

    monkeypatch.setattr(ranks, "_run", run)
    if starts > len(printed):
        assert run_ranks(2, "tests.unit.test_ranks:place", is_native=True) == [0, 1]
    else:
        with pytest.raises(RanksFailedError):
            run_ranks(2, "tests.unit.test_ranks:place", is_native=True)
    assert len(begun) == starts
