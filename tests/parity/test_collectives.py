"""Every backend of the collectives passes one table of cases."""

from functools import cache
from typing import Any

import pytest

from ascend_moe_train.parallel.comm import LocalComm
from ascend_moe_train.selftest.collective_graph import host_graph_results
from ascend_moe_train.selftest.collective_host import host_results
from tests.ranks import run_ranks

DEADLINE_S = 300.0
# then operators in graphs copy, by MindSpore's own way
NO_COMPILER = {"CC": "no-compiler"}
# on two, `test_graph_on_mpi_without_a_compiler` and tests/faults/test_selftest.py have the same cases
RANKS = [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)]

# MindSpore's own, on CPUs
NATIVE_VERBS = ["all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "reduce_scatter"]
REFUSED = ["max", "bf16", "reduce_scatter", "all_to_all", "all_to_all_v", "send", "recv", "all_gather", "broadcast"]
REFUSED += ["Int64", "Float64"]


@cache
def on_mpi(n: int) -> list[dict[str, Any]]:
    """What each rank finds wrong, on host arrays and in a graph: one start of processes."""
    return run_ranks(n, "tests.parity.collective_mpi:both", deadline_s=DEADLINE_S)


def wrong_of(results: list[dict[str, Any]]) -> list[str]:
    return [f"rank {rank}: {each}" for rank, result in enumerate(results) for each in result["wrong"]]


def test_host_on_one_rank() -> None:
    assert wrong_of([host_results(LocalComm())]) == []


@pytest.mark.parametrize("n", RANKS)
def test_host_on_mpi(n: int) -> None:
    assert wrong_of([result["host"] for result in on_mpi(n)]) == []


def test_graph_on_one_rank() -> None:
    assert wrong_of([host_graph_results(LocalComm())]) == []


def test_graph_on_mpi_without_a_compiler() -> None:
    found = run_ranks(2, "tests.parity.collective_mpi:in_a_graph", deadline_s=DEADLINE_S, environment=NO_COMPILER)
    assert wrong_of(found) == []


@pytest.mark.parametrize("n", RANKS)
def test_graph_on_mpi(n: int) -> None:
    assert wrong_of([result["graph"] for result in on_mpi(n)]) == []


def test_native_on_cpus() -> None:
    results = run_ranks(4, "tests.parity.collective_native:native", deadline_s=DEADLINE_S, is_native=True)
    assert wrong_of(results) == []
    for rank, result in enumerate(results):
        assert rank in result["half"]
        assert result["host"].tolist() == [sum(result["half"])] * 3
        assert result["exchanged"] == [{"ä": each} for each in range(4)]
        assert (result["broadcast"], result["agreed"]) == ([3], [2**42 + 6, 2**40 + 3, 2**42 + 1.5])
        assert result["verbs"] == NATIVE_VERBS
        assert [word in line for word, line in zip(REFUSED, result["refusals"], strict=True)] == [True] * len(REFUSED)
        assert all("; MPI" in line and "\n" not in line for line in result["refusals"])
