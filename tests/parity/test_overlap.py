"""Collectives by a thread of their own change nothing but when gradients are summed: figures, gradients, moments and
weights are bit for bit those without, and all ranks call the same in the same order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from tests.parity.layouts import Case
from tests.parity.test_training import assert_payloads_are_as_computed, assert_same_order
from tests.ranks import run_ranks

FAST = Case(layout="ep2", model="mixtral", mode="dropless", num_micro=1)
CASES = (
    Case(layout="dp2", model="deepseek", mode="capacity", num_micro=1),
    Case(layout="zero1 dp2", model="mixtral", mode="dropless", num_micro=1),
    Case(layout="zero2 dp2", model="mixtral", mode="capacity", num_micro=2),
    Case(layout="zero3 dp2", model="mixtral", mode="dropless", num_micro=1),
    Case(layout="ep2", model="deepseek", mode="dropless", num_micro=1, recompute="full"),
    Case(layout="tp2+sp", model="deepseek", mode="dropless", num_micro=1),
    Case(layout="cp2 ring", model="mixtral", mode="capacity", num_micro=2),
    Case(layout="ep2 x edp2", model="deepseek", mode="dropless", num_micro=1),
    Case(layout="tp2+sp x ep4, sums in nodes of 2", model="deepseek", mode="dropless", num_micro=1, recompute="full"),
    Case(layout="pp2", model="mtp deepseek of 2", mode="dropless", num_micro=4),
)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested results, by its place."""
    if isinstance(value, Mapping | list):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(each, f"{path}.{key}")
    else:
        yield path, value


def both(cases: Sequence[Case]) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Of each case the results of all ranks, without and with overlap."""
    asked = [replace(case, overlap=overlap) for case in cases for overlap in (False, True)]
    of_ranks = run_ranks(
        cases[0].num_ranks, "tests.parity.train_worker:on_rank", [asdict(case) for case in asked], deadline_s=900
    )
    found = [[results[number] for results in of_ranks] for number in range(len(asked))]
    return list(zip(found[::2], found[1::2], strict=True))


def check(case: Case, plain: list[dict[str, Any]], overlapped: list[dict[str, Any]]) -> None:
    for rank, (one, other) in enumerate(zip(plain, overlapped, strict=True)):
        for part in ("figures", "pieces"):
            pairs = zip(leaves(one[part]), leaves(other[part]), strict=True)
            wrong = [path for (path, x), (_, y) in pairs if not np.array_equal(x, y)]
            assert wrong == [], f"{case.name}, rank {rank}"
    assert_same_order(replace(case, overlap=True), overlapped)
    assert_payloads_are_as_computed(replace(case, overlap=True), overlapped)


def test_gradients_are_summed_during_the_backward_pass_with_the_same_bits() -> None:
    [(plain, overlapped)] = both([FAST])
    check(FAST, plain, overlapped)
    before, after = ([(verb, group) for verb, group, *_ in found[0]["calls"][1]] for found in (plain, overlapped))
    exchange, gradients = ("all_to_all_v", "ep"), ("all_reduce", "dp_cp")
    assert before.index(gradients) > len(before) - before[::-1].index(exchange) - 1
    # of the head, while the experts' backward pass is still to come; of attention, after it
    last = len(after) - after[::-1].index(exchange) - 1
    assert after.index(gradients) < last < len(after) - after[::-1].index(gradients) - 1
    assert before.count(exchange) == after.count(exchange) == 4


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_layout_has_the_same_bits(case: Case) -> None:
    [(plain, overlapped)] = both([case])
    check(case, plain, overlapped)
