"""Slow links: what a call lasts, and whose calls are slow."""

import ast
from collections.abc import Iterator
from typing import get_args

import numpy as np
import pytest

from ascend_moe_train.parallel.buckets import CLASSES
from ascend_moe_train.parallel.comm import Array, Group, How, LocalComm, Wire, payload_bytes
from ascend_moe_train.parallel.config import GroupName
from ascend_moe_train.parallel.cuts import GROUP_AXES
from ascend_moe_train.parallel.sharing import NEIGHBOURS
from ascend_moe_train.parallel.slow import SlowComm
from ascend_moe_train.parallel.streams import WAYS
from tests.rules.source import modules

PAIR = Group(name="ep", ranks=(0, 1), index=0)
OTHER = Group(name="dp", ranks=(0, 1), index=0)
X = np.arange(6, dtype=np.float32).reshape(3, 2)


class Line(LocalComm):
    """Collectives that take `own_s` seconds of a clock that stands still but for them and for sleeps."""

    def __init__(self, own_s: float) -> None:
        self.now_s, self.own_s, self.sent_s = 100.0, own_s, 0.0

    def all_reduce(
        self, group: Group, x: Array, how: How = "sum", wire: Wire | None = None, out: Array | None = None
    ) -> Array:
        self.now_s += self.own_s
        return super().all_reduce(group, x, how, wire, out)

    def send(self, group: Group, x: Array, peer: int) -> None:
        self.sent_s = self.now_s

    def recv(self, group: Group, shape: tuple[int, ...], dtype: object, peer: int, out: Array | None = None) -> Array:
        return X

    def barrier(self, group: Group) -> None:
        self.now_s += self.own_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


def slow(line: Line, groups: tuple[str, ...] | None = None, bytes_per_s: float | None = 8.0) -> SlowComm:
    return SlowComm(
        line, latency_s=0.5, bytes_per_s=bytes_per_s, groups=groups, clock=lambda: line.now_s, sleep=line.sleep
    )


@pytest.mark.parametrize(("own_s", "lasts_s"), [(0.0, 3.5), (2.0, 3.5), (9.0, 9.0)])
def test_a_call_lasts_as_long_as_the_slower_of_both(own_s: float, lasts_s: float) -> None:
    line = Line(own_s)
    assert np.array_equal(slow(line).all_reduce(PAIR, X), X)
    assert line.now_s - 100.0 == lasts_s


def test_bytes_are_those_that_move() -> None:
    line = Line(0.0)
    slow(line).all_reduce(PAIR, X, "sum", "fp16")
    assert line.now_s - 100.0 == 0.5 + payload_bytes(X, "fp16") / 8.0 == 2.0
    line = Line(0.0)
    slow(line, bytes_per_s=None).all_reduce(PAIR, X)
    assert line.now_s - 100.0 == 0.5


def test_a_message_leaves_when_its_time_is_over_and_is_received_at_once() -> None:
    line = Line(0.0)
    comm = slow(line)
    comm.send(PAIR, X, 1)
    assert line.sent_s - 100.0 == line.now_s - 100.0 == 3.5
    comm.recv(PAIR, X.shape, X.dtype, 1)
    assert line.now_s - 100.0 == 3.5


def test_only_the_groups_that_are_named_and_have_others() -> None:
    line = Line(0.0)
    comm = slow(line, groups=("ep",))
    comm.all_reduce(OTHER, X)
    comm.split("ep", [(0,)])
    comm.barrier(Group(name="ep", ranks=(0,), index=0))
    assert line.now_s == 100.0
    comm.barrier(PAIR)
    assert line.now_s == 100.5


def names_of_splits() -> Iterator[str]:
    """Of the groups that the code makes by a name that stands in it."""
    for module in modules("ascend_moe_train/parallel", "ascend_moe_train/train"):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
                first = node.args[0] if len(node.args) == 2 else None
                if (
                    isinstance(first, ast.Constant)
                    and isinstance(first.value, str)
                    and isinstance(node.args[1], ast.Call | ast.Name)
                ):
                    yield first.value


def test_every_group_of_a_run_can_be_named() -> None:
    made = {*names_of_splits(), *("_".join(GROUP_AXES[kind]) for kind in CLASSES if kind != "ends")}
    made |= {"world", "ends", NEIGHBOURS, *(f"pp {way}" for way in WAYS)}
    assert made == set(get_args(GroupName))
