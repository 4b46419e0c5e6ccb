"""Collectives by a thread of their own: order, waiting, failures."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.parallel.buckets import Form, Share
from ascend_moe_train.parallel.comm import Array, CommError, Group, How, LocalComm, RecordingComm, Wire
from ascend_moe_train.parallel.early import EarlySums
from ascend_moe_train.parallel.queued import QueuedComm
from ascend_moe_train.parallel.watched import CollectiveError, WatchedComm

WORLD = LocalComm.world
X = np.arange(6, dtype=np.float32).reshape(3, 2)


class Gate(LocalComm):
    """Gathers wait for leave; what a pair of ranks sums is twice what this one has."""

    def __init__(self) -> None:
        self.leave, self.thread = threading.Event(), ""

    def all_gather(self, group: Group, x: Array, out: Array | None = None) -> Array:
        self.thread = threading.current_thread().name
        assert self.leave.wait(60)
        return super().all_gather(group, x, out)

    def all_reduce(
        self, group: Group, x: Array, how: How = "sum", wire: Wire | None = None, out: Array | None = None
    ) -> Array:
        return super().all_reduce(group, x * group.size, how, wire, out)

    def reduce_scatter(self, group: Group, x: Array, wire: Wire | None = None, out: Array | None = None) -> Array:
        part = x.reshape(group.size, -1)[group.index]
        return super().reduce_scatter(group, part * group.size, wire, out)


def test_begin_does_not_wait_and_order_is_that_of_asking() -> None:
    inner = Gate()
    recording = RecordingComm(inner)
    comm = QueuedComm(recording)
    first = comm.begin("all_gather", WORLD, lambda: recording.all_gather(WORLD, X))
    second = comm.begin("all_reduce", WORLD, lambda: recording.all_reduce(WORLD, X))
    inner.leave.set()
    comm.barrier(WORLD)
    assert [call.verb for call in recording.calls] == ["all_gather", "all_reduce", "barrier"]
    assert np.array_equal(second(), X) and np.array_equal(first(), X)
    assert inner.thread == "collectives"


def test_waiting_is_told() -> None:
    waits: list[tuple[str, float]] = []
    times = iter((1.0, 3.5, 10.0, 10.25))
    comm = QueuedComm(
        LocalComm(), lambda verb, group, seconds: waits.append((verb, seconds)), clock=lambda: next(times)
    )
    comm.barrier(WORLD)
    comm.begin("all_gather", WORLD, lambda: None)()
    assert waits == [("barrier", 2.5), ("all_gather", 0.25)]


def test_what_fails_reaches_all_who_wait_and_nothing_else_is_called() -> None:
    recording = RecordingComm(WatchedComm(LocalComm(), lambda *told: None))
    comm = QueuedComm(recording)
    waits: list[Callable[[], Any]] = [
        comm.begin("send", WORLD, lambda: recording.send(WORLD, X, 1)),
        comm.begin("barrier", WORLD, lambda: recording.barrier(WORLD)),
    ]
    for wait in waits:
        with pytest.raises(CollectiveError, match=r"^rank 0: send in 'world': a group of one"):
            wait()
    with pytest.raises(CollectiveError, match="send in 'world'"):
        comm.barrier(WORLD)
    assert [call.verb for call in recording.calls] == ["send"]


def early(form: Form, shapes: list[tuple[int, ...]]) -> tuple[EarlySums, RecordingComm]:
    """The buckets (1, 0) and (2,) of three tensors on rank 1 of two."""
    group = Group(name="dp_cp", ranks=(0, 1), index=1)
    shares = [
        Share(name=f"w{i}", shape=shape, gradient="dense", group=group, form=form, weight=1.0)
        for i, shape in enumerate(shapes)
    ]
    recording = RecordingComm(Gate())
    return EarlySums([(1, 0), (2,)], shares, QueuedComm(recording), None), recording


@pytest.mark.parametrize("form", ["whole", "parts"])
def test_full_buckets_are_sent_in_order_and_come_back_summed(form: Form) -> None:
    grads = [np.arange(1, 1 + n, dtype=np.float32).reshape(shape) for n, shape in ((6, (2, 3)), (5, (5,)), (1, (1,)))]
    sums, recording = early(form, [grad.shape for grad in grads])
    for _ in range(2):  # a step after the other
        recording.calls.clear()
        sums.put("w2", grads[2])
        sums.put("w1", grads[1])
        sums.begin_full()
        sums.begin_full()
        sums.put("w0", grads[0])
        sums.begin_full()
        # of odd sizes the second part ends with a zero
        wholes = [grad.reshape(-1) for grad in grads]
        parts = [np.array([4, 5, 0]), np.array([4, 5, 6]), np.array([0])]
        one, zero, two = (wholes[1], wholes[0], wholes[2]) if form == "whole" else parts
        for bucket, expected in (((1, 0), np.concatenate([one, zero])), ((2,), two)):
            out = np.empty(len(expected), np.float32)
            sums.finish(bucket, out)
            assert np.array_equal(out, 2 * expected)
        sizes = [4, 44] if form == "whole" else [8, 48]
        assert [call.payload_bytes for call in recording.calls] == sizes
        assert {call.content for call in recording.calls} == {"gradients"}


def test_a_gradient_that_did_not_come_is_an_error() -> None:
    sums, _ = early("whole", [(1,), (1,), (1,)])
    sums.put("w1", X[:1, :1])
    with pytest.raises(CommError, match="rank 0: 1 gradients of a bucket did not come"):
        sums.finish((1, 0), np.empty(2, np.float32))
