"""Groups, recording, watching and agreement, without a second process."""

from collections.abc import Callable

import numpy as np
import pytest

from ascend_moe_train.parallel.agree import broadcast_json, exchange_json, max_int, sum_floats, sum_int
from ascend_moe_train.parallel.comm import (
    VERBS,
    Array,
    Call,
    Comm,
    CommError,
    Group,
    LocalComm,
    RecordingComm,
    own_group,
)
from ascend_moe_train.parallel.watched import CollectiveError, WatchedComm

WORLD = LocalComm.world
X = np.arange(6, dtype=np.float32).reshape(3, 2)


def test_ten_verbs() -> None:
    public = {name for name in vars(Comm) if not name.startswith("_")} - {"rank", "world"}
    assert public == set(VERBS)
    assert len(VERBS) == 10


def test_own_group_keeps_the_order_of_its_ranks() -> None:
    group = own_group("odd", [(0, 2), (3, 1)], 1, 4)
    assert group == Group(name="odd", ranks=(3, 1), index=1)
    assert group.size == 2


@pytest.mark.parametrize("partition", [[(0,)], [(0, 1), (1, 2)], [(0, 1, 2, 3)], [(0, 1), (1, 2), (2,)]])
def test_partitions_hold_every_rank_once(partition: list[tuple[int, ...]]) -> None:
    with pytest.raises(CommError, match=r"split 'tp'.*ranks 0\.\.2 once"):
        own_group("tp", partition, 0, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda comm: comm.all_reduce(WORLD, X.astype(np.int32), "sum", "fp16"),
            "wire dtype fp16 is for float32, not int32",
        ),
        (
            lambda comm: comm.all_to_all_v(WORLD, X, np.array([4]), np.array([4]), 9),
            r"send counts \[4\] add up to 4, of 3",
        ),
        (
            lambda comm: comm.all_to_all_v(WORLD, X, np.array([3]), np.array([3]), 2),
            r"receive counts \[3\] .* 3, of 2 rows",
        ),
        (lambda comm: comm.all_to_all_v(WORLD, X, np.array([-1]), np.array([0]), 9), "not 1 numbers from 0 on"),
        (lambda comm: comm.all_to_all_v(WORLD, X, np.array([1, 1]), np.array([2]), 9), "not 1 numbers from 0 on"),
        (lambda comm: comm.all_to_all_v(WORLD, X, np.array([1]), np.array([2]), 9), "1 rows sent, 2 expected"),
        (lambda comm: comm.send(WORLD, X, 1), "send in 'world'.* no peer 1"),
        (lambda comm: comm.recv(WORLD, (1,), np.float32, 1), "recv in 'world'.* no peer 1"),
    ],
)
def test_what_cannot_be_done(call: Callable[[Comm], object], message: str) -> None:
    with pytest.raises(CommError, match=message):
        call(LocalComm())


def test_results_are_copies_or_in_out() -> None:
    comm, out = LocalComm(), np.zeros_like(X)
    assert not np.shares_memory(comm.all_reduce(WORLD, X), X)
    assert comm.all_gather(WORLD, X, out) is out
    assert np.array_equal(out, X)


def test_recording_counts_payloads_in_order() -> None:
    comm = RecordingComm(LocalComm())
    group = comm.split("tp", [(0,)])
    comm.all_reduce(group, X, "sum", "fp16")
    comm.all_gather(group, X)
    comm.all_to_all_v(group, X, np.array([2]), np.array([2]), 5)
    comm.barrier(group)
    comm.all_gather(group, X)
    expected = [("split", "world", 0), ("all_reduce", "tp", 12), ("all_gather", "tp", 24), ("all_to_all_v", "tp", 16)]
    expected += [("barrier", "tp", 0), ("all_gather", "tp", 24)]
    assert comm.calls == [
        Call(number=i, verb=verb, group=name, payload_bytes=size) for i, (verb, name, size) in enumerate(expected)
    ]
    assert comm.totals()["all_gather", "tp"] == (2, 48)
    comm.calls.clear()
    comm.barrier(group)
    assert comm.calls == [Call(number=6, verb="barrier", group="tp", payload_bytes=0)]


def test_watching_tells_before_and_after_and_names_what_failed() -> None:
    told: list[tuple[str, str, int, bool]] = []

    def on_call(verb: str, group_name: str, number: int, done: bool) -> None:
        told.append((verb, group_name, number, done))

    comm = WatchedComm(LocalComm(), on_call)
    comm.barrier(WORLD)
    with pytest.raises(CollectiveError, match=r"^rank 0: send in 'world': a group of one") as caught:
        comm.send(WORLD, X, 1)
    assert told == [("barrier", "world", 0, False), ("barrier", "world", 0, True), ("send", "world", 1, False)]
    assert (caught.value.verb, caught.value.group_name, caught.value.rank) == ("send", "world", 0)
    assert isinstance(caught.value.__cause__, CommError)
    with pytest.raises(CollectiveError, match=r"^rank 0: all_to_all in 'world' failed: NotImplementedError$"):
        WatchedComm(Broken(), on_call).all_to_all(WORLD, X)


class Broken(LocalComm):
    def all_to_all(self, group: Group, x: Array, out: Array | None = None) -> Array:
        raise NotImplementedError


class Echo(LocalComm):
    """Rank 1 of three, where the others put in what this one does."""

    rank = 1
    world = Group(name="world", ranks=(0, 1, 2), index=1)

    def all_gather(self, group: Group, x: Array, out: Array | None = None) -> Array:
        return np.concatenate([x] * group.size)


def test_agreement_uses_what_all_backends_have() -> None:
    comm = RecordingComm(Echo())
    value = {"ä": [1.5, None, "x"], "n": 2**70}
    assert exchange_json(comm, value) == [value] * 3
    assert broadcast_json(comm, value, root=1) == value
    assert (sum_int(comm, -(2**50)), max_int(comm, -(2**50))) == (-3 * 2**50, -(2**50))
    assert sum_floats(comm, [1e-300, 0.1]) == [3e-300, pytest.approx(0.3, rel=1e-15)]
    assert exchange_json(comm, value, Group(name="alone", ranks=(1,), index=0)) == [value]
    assert {call.verb for call in comm.calls} == {"all_gather", "broadcast"}
