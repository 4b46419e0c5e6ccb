"""What is computed again changes no result: losses, gradients, norms, weights and drops, on one process and on many."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from tests.parity.recompute_cases import Policy, RecomputeCase
from tests.parity.test_training import (
    assert_equal_to_one_process,
    assert_payloads_are_as_computed,
    assert_same_order,
    reference,
)
from tests.parity.train_worker import train
from tests.ranks import run_ranks


def one(model: str, mode: str, policy: Policy, layers: int | None = None) -> RecomputeCase:
    return RecomputeCase(layout=None, model=model, mode=mode, num_micro=1, policy=policy, layers=layers)


def many(layout: str, model: str, mode: str, num_micro: int, layers: int | None = None) -> RecomputeCase:
    return RecomputeCase(
        layout=layout, model=model, mode=mode, num_micro=num_micro, policy="full", layers=layers, sequences=8
    )


ALONE = [
    one("mixtral", "capacity", "full"),
    one("mixtral", "capacity", "selective"),
    one("deepseek", "dropless", "full"),
    one("deepseek", "dropless", "selective"),
    # a dense and a layer with experts of which one runs again, and an embedding that is used twice
    one("tied mixtral of 2", "dropless", "full", layers=1),
    one("mtp deepseek of 2", "capacity", "full"),
]
ON_TWO = [
    many("tp2", "deepseek", "dropless", 1),
    many("tp2+sp", "mixtral", "capacity", 1),
    many("ep2", "deepseek", "capacity", 2),
    many("zero3 dp2", "deepseek", "dropless", 1, layers=1),
    RecomputeCase(layout="zero3 dp2", model="mixtral", mode="dropless", num_micro=1, policy="selective"),
    many("pp2 zero bubble", "mtp deepseek of 2", "dropless", 4),
    many("cp2 ring", "mixtral", "dropless", 1),
]
ON_FOUR = [
    many("pp2 x tp2 x ep2", "tied mixtral of 2", "capacity", 4),
    many("tp2+sp x ep2 x etp2 zero3", "deepseek", "dropless", 1),
]


def same_bits(found: Any, expected: Any) -> bool:
    """Whether two nests of results hold the same arrays and numbers."""
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same_bits(found[key], expected[key]) for key in found)
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(same_bits, found, expected))
    return np.asarray(found).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_one_process_trains_the_same_bits(case: RecomputeCase) -> None:
    found, expected = train(case), reference(case.reference)
    for part in ("figures", "pieces"):
        assert same_bits(found[part], expected[part])


def check(cases: list[RecomputeCase], num_ranks: int, deadline_s: float) -> None:
    of_ranks = run_ranks(
        num_ranks, "tests.parity.recompute_cases:on_rank", [asdict(case) for case in cases], deadline_s=deadline_s
    )
    for number, case in enumerate(cases):
        by_rank = [results[number] for results in of_ranks]
        try:
            assert_equal_to_one_process(case, by_rank)
            assert_same_order(case, by_rank)
            assert_payloads_are_as_computed(case, by_rank)
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from error


def test_two_ranks_train_as_one_process_does() -> None:
    check(ON_TWO, 2, deadline_s=900)


@pytest.mark.slow
def test_four_ranks_train_as_one_process_does() -> None:
    check(ON_FOUR, 4, deadline_s=1200)
