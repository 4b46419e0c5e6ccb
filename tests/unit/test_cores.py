"""Which cores a rank keeps to."""

import os
import sys
from pathlib import Path

import pytest

from ascend_moe_train.cluster import variables
from ascend_moe_train.cluster.cores import num_cores, own_cores, side_by_side
from ascend_moe_train.cluster.launch import launch, make_job
from ascend_moe_train.cluster.output import PlainScreen
from ascend_moe_train.cluster.verdict import Deadlines

NOTE = """
import os, pathlib, sys
from ascend_moe_train.cluster.cores import num_cores
text = " ".join(map(str, [num_cores(), *sorted(os.sched_getaffinity(0))]))
pathlib.Path(sys.argv[1], os.environ["AMT_RANK"]).write_text(text)
"""


def of_mpi(ranks: int, place: int, threads: str) -> dict[str, str]:
    return {"MPI_LOCALNRANKS": str(ranks), "MPI_LOCALRANKID": str(place), "OMP_NUM_THREADS": threads}


def test_ranks_share_out_all_cores() -> None:
    shares = [own_cores(of_mpi(3, place, "2"), [5, 7, 8, 9, 11, 12]) for place in range(3)]
    assert shares == [[5, 7], [8, 9], [11, 12]]


@pytest.mark.parametrize(
    "environment",
    [
        of_mpi(4, 0, "1"),
        of_mpi(2, 1, "3"),
        of_mpi(3, 1, "1"),
        of_mpi(2, 1, "many"),
        of_mpi(2, 2, "1"),
        {"RANK_ID": "1", "OMP_NUM_THREADS": "1"},
        {},
    ],
)
def test_otherwise_a_rank_may_use_all(environment: dict[str, str]) -> None:
    assert own_cores(environment, [3, 4]) == [3, 4]


def test_threads_of_a_core_are_neighbours(tmp_path: Path) -> None:
    for core, (socket, number) in enumerate([(1, 0), (0, 0), (0, 1), (1, 0), (0, 0)]):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{socket}\n")
        (folder / "core_id").write_text(f"{number}\n")
    assert side_by_side(range(5), tmp_path) == [1, 4, 2, 0, 3]
    assert side_by_side([2, 0, 1], tmp_path / "nothing") == [0, 1, 2]


def test_a_rank_counts_the_cores_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.CORES, "48")
    assert num_cores() == 48
    monkeypatch.setenv(variables.CORES, "none")
    assert num_cores() == len(os.sched_getaffinity(0))


def test_ranks_of_a_launcher_keep_to_their_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = os.sched_getaffinity(0)
    deadlines = Deadlines(compile_s=60.0, step_s=60.0, save_s=60.0)
    job = make_job(len(cores), [sys.executable, "-c", NOTE, str(tmp_path)], deadlines, run_dir=tmp_path / "run")
    assert launch(job, PlainScreen()).exit_code == 0
    found = [list(map(int, (tmp_path / str(rank)).read_text().split())) for rank in range(len(cores))]
    assert [count for count, *_ in found] == [len(cores)] * len(cores)
    assert sorted(own for _, *own in found) == [[core] for core in sorted(cores)]
