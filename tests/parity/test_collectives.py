"""Every backend of the collectives passes one table of cases."""

from typing import Any

import pytest

from ascend_moe_train.parallel.comm import LocalComm
from tests.parity.collective_graph import host_graph_results
from tests.parity.collective_host import host_results
from tests.ranks import run_ranks

DEADLINE_S = 300.0
# then operators in graphs copy, by MindSpore's own way
NO_COMPILER = {"CC": "no-compiler"}
RANKS = [2, 4, pytest.param(8, marks=pytest.mark.slow)]


def wrong_of(results: list[dict[str, Any]]) -> list[str]:
    return [f"rank {rank}: {each}" for rank, result in enumerate(results) for each in result["wrong"]]


def test_host_on_one_rank() -> None:
    assert wrong_of([host_results(LocalComm())]) == []


@pytest.mark.parametrize("n", RANKS)
def test_host_on_mpi(n: int) -> None:
    assert wrong_of(run_ranks(n, "tests.parity.collective_host:mpi_host", deadline_s=DEADLINE_S)) == []


def test_graph_on_one_rank() -> None:
    assert wrong_of([host_graph_results(LocalComm())]) == []


def test_graph_on_mpi_without_a_compiler() -> None:
    found = run_ranks(2, "tests.parity.collective_graph:mpi_graph", deadline_s=DEADLINE_S, environment=NO_COMPILER)
    assert wrong_of(found) == []


@pytest.mark.parametrize("n", RANKS)
def test_graph_on_mpi(n: int) -> None:
    assert wrong_of(run_ranks(n, "tests.parity.collective_graph:mpi_graph", deadline_s=DEADLINE_S)) == []
