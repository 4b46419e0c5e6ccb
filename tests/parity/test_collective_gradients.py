"""Gradients of the collectives against NumPy and as adjoints; one order on all ranks; the dead are dropped by all."""

from typing import Any

import numpy as np
import pytest

from ascend_moe_train.parallel import autodiff
from ascend_moe_train.parallel.comm import Array, Group, LocalComm, RecordingComm, Wire, into
from tests.oracle.differences import relative_error
from tests.parity.collective_gradients import (
    REPLICATED,
    ROWS,
    counts_of,
    recorded_orders,
    results,
    unordered,
)
from tests.ranks import run_ranks

DEADLINE_S = 300.0
ROUNDING = 1e-6
FORWARD, BACKWARD = "all_gather", "reduce_scatter"


def expected_of(port: str, x: list[Array], w: list[Array]) -> tuple[list[Array], list[Array]]:
    """(y, dx) of each rank of a group, from everybody's x and w."""
    n = len(x)
    joined_x, joined_w = np.concatenate(x), np.concatenate(w)
    match port:
        case "copy":
            return x, [np.sum(w, 0)] * n
        case "reduce":
            return [np.sum(x, 0)] * n, w
        case "split":
            return np.split(x[0], n), [joined_w] * n
        case "gather":
            return [joined_x] * n, np.split(w[0], n)
        case "gather_sum":
            return [joined_x] * n, np.split(np.sum(w, 0), n)
        case "scatter_sum":
            return np.split(np.sum(x, 0), n), [joined_w] * n
        case "exchange":
            return _exchanged(x), _exchanged(w)
        case _:
            return _moved(x, counts_of(n)), _moved(w, counts_of(n).T)


def _exchanged(x: list[Array]) -> list[Array]:
    parts = [np.split(each, len(x)) for each in x]
    return [np.concatenate([each[index] for each in parts]) for index in range(len(x))]


def _moved(x: list[Array], counts: Array) -> list[Array]:
    parts = [np.split(each, np.cumsum(sent)) for each, sent in zip(x, counts, strict=True)]
    moved = [np.concatenate([each[index] for each in parts]) for index in range(len(x))]
    return [np.concatenate([each, np.zeros((ROWS - len(each), each.shape[1]))]) for each in moved]


def check_gradients(found: list[dict[str, Any]]) -> None:
    """Of all ranks of a group, in its order."""
    for port, (x_is_same, w_is_same) in REPLICATED.items():
        x, w, y, dx = ([rank[port][name].astype(np.float64) for rank in found] for name in ("x", "w", "y", "dx"))
        expected_y, expected_dx = expected_of(port, x, w)
        assert max(map(relative_error, y, expected_y)) < ROUNDING, port
        assert max(map(relative_error, dx, expected_dx)) < ROUNDING, port
        # <A x, w> = <x, A' w>, where a tensor that all ranks share counts once
        forward = sum((y[r] * w[r]).sum() for r in range(1 if w_is_same else len(found)))
        backward = sum((x[r] * dx[r]).sum() for r in range(1 if x_is_same else len(found)))
        assert abs(forward - backward) < 1e-5 * sum(np.abs(y[r] * w[r]).sum() for r in range(len(found))), port


def check(found: list[dict[str, Any]]) -> None:
    """The gradients of each group, and one order on all ranks that is that of the program."""
    for name in ("world", "half"):
        for ranks in {tuple(rank["groups"][name]) for rank in found}:
            check_gradients([found[rank]["gradients"][name] for rank in ranks])
    names = ("world", "half", "other") if len(found) > 2 else ("world",) * 3
    order = [f"{FORWARD} {name}" for name in names] + [f"{BACKWARD} {name}" for name in reversed(names)]
    for rank in found:
        assert all(each == (order if len(found) > 1 else []) for each in rank["orders"])


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_on_mpi(n: int) -> None:
    check(run_ranks(n, "tests.parity.collective_gradients:mpi", deadline_s=DEADLINE_S))


def test_on_one_rank() -> None:
    check([results(LocalComm())])


class TwoAlike(LocalComm):
    """Rank 0 of two that do the same."""

    world = Group(name="world", ranks=(0, 1), index=0)

    def all_gather(self, group: Group, x: Array, out: Array | None = None) -> Array:
        return into(out, np.concatenate([x, x]))

    def reduce_scatter(self, group: Group, x: Array, wire: Wire | None = None, out: Array | None = None) -> Array:
        return into(out, 2 * x[: len(x) // 2])


@pytest.mark.parametrize("in_order", [autodiff.InOrder(), unordered])
def test_only_in_order_forces_the_order(in_order: Any) -> None:
    names = ("a", "b", "c")
    first, second, third = (Group(name=name, ranks=(0, 1), index=0) for name in names)
    orders = recorded_orders(RecordingComm(TwoAlike()), (first, second, third), in_order)
    expected = [f"{FORWARD} {name}" for name in names] + [f"{BACKWARD} {name}" for name in reversed(names)]
    assert (orders == [expected] * len(orders)) == (in_order is not unordered)
