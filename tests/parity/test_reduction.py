"""Gradients, their norms and the figures of a step over ranks that hold different parts of a model."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.parallel.shards import take
from tests.oracle.differences import relative_error
from tests.parity.reduction_cases import CASES, QKV, RANKS, ROWS, Case, figures, random, total
from tests.ranks import run_ranks

DEADLINE_S = 900.0
TOLERANCE = 1e-5
# tp 2 and ep 2 by themselves, which the others have within
SLOW = ("tp 2, zero_stage 0", "ep 2, zero_stage 1")
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)


@cache
def of_ranks(slow: bool) -> list[dict[str, Any]]:
    names = [name for name in CASES if (name in SLOW) == slow]
    return run_ranks(RANKS, "tests.parity.reduction_worker:on_rank", names, deadline_s=DEADLINE_S)


def results(case: Case) -> list[dict[str, Any]]:
    return [each[case.name] for each in of_ranks(case.name in SLOW)]


@EACH
def test_gradients_are_those_of_the_whole_model(name: str) -> None:
    case = CASES[name]
    for rank, found in enumerate(results(case)):
        placed = case.placed(rank)
        assert found["grads"].keys() == {each for each, placement in placed.items() if placement.local_size}
        for tensor, part in found["grads"].items():
            expected = take(total(tensor, placed[tensor]), placed[tensor]).reshape(-1)
            flat, num_elements = part["value"].reshape(-1), part["stop"] - part["start"]
            assert relative_error(flat[:num_elements], expected[part["start"] : part["stop"]]) < TOLERANCE, tensor
            assert not flat[num_elements:].any(), tensor


@EACH
def test_every_rank_knows_all_squares_and_figures(name: str) -> None:
    case = CASES[name]
    mesh, placed = case.mesh, case.placed(0)
    of_ranks = np.array([figures(case, rank) for rank in range(RANKS)], np.float64)
    first_of_dp = [rank for rank in range(RANKS) if mesh.coordinates(rank).tp == 0]
    expected = [*of_ranks[first_of_dp, :2].sum(0), *of_ranks[0, 2:4], of_ranks[:, 4].sum()]
    squares = {tensor: float((total(tensor, placement) ** 2).sum()) for tensor, placement in placed.items()}
    for found in results(case):
        np.testing.assert_allclose(found["figures"], expected, rtol=TOLERANCE)
        assert found["squares"] == pytest.approx(squares, rel=TOLERANCE)


@EACH
def test_traffic_is_the_closed_form(name: str) -> None:
    case = CASES[name]
    for found in results(case):
        if case.stage < 3:
            assert found["sent"] == found["expected_sent"]
        else:  # the rest is in the backward pass
            assert found["sent"]["all_reduce world"] == found["expected_sent"]["all_reduce world"]


def test_a_gradient_that_neighbours_share_is_summed_in_the_backward_pass() -> None:
    case = next(case for case in CASES.values() if case.stage == 3)
    placed = [case.placed(rank) for rank in range(RANKS)]
    weights = [take(random(QKV, 0, each[QKV].shape), each[QKV]) for each in placed]
    xs = [random("x", each[QKV].index, (ROWS, each[QKV].shape[1])) for each in placed]
    dys = [random("dy", rank, (ROWS, each[QKV].local_shape[0])) for rank, each in enumerate(placed)]
    of_ranks = [dy.T @ x for dy, x in zip(dys, xs, strict=True)]
    for rank, found in enumerate(results(case)):
        y, dx, part = found["product"]
        np.testing.assert_allclose(y, xs[rank] @ weights[rank].T, rtol=TOLERANCE, atol=TOLERANCE)
        np.testing.assert_allclose(dx, dys[rank] @ weights[rank], rtol=TOLERANCE, atol=TOLERANCE)
        placement = placed[rank][QKV]
        assert placement.repeated is not None and len(placement.group) > 1
        expected = np.sum([of_ranks[each] for each in placement.group], axis=0)
        everywhere = [each for other in placement.repeated.ranks for each in placed[other][QKV].group]
        expected[placement.repeated.start :] = np.sum(
            [of_ranks[each][placement.repeated.start :] for each in everywhere], axis=0
        )
        start, stop = placement.part
        np.testing.assert_allclose(
            part[: stop - start], expected.reshape(-1)[start:stop], rtol=TOLERANCE, atol=TOLERANCE
        )
