"""Ranks that compute for longer than their like are named, once."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from ascend_moe_train.train.config import GuardConfig
from ascend_moe_train.train.ranks import Ranks
from ascend_moe_train.train.stragglers import Pace, Stragglers, slow_ranks


def paces(*times_s: float, stages: int = 1) -> list[Pace]:
    return [Pace(rank=n, stage=n % stages, host="h", compute_s=time_s) for n, time_s in enumerate(times_s)]


def test_a_rank_is_slow_among_those_of_its_stage() -> None:
    assert slow_ranks(paces(1.0, 1.1, 1.6, 0.9), 1.5) == {2: 1.6}
    assert slow_ranks(paces(1.0, 3.0, 1.1, 3.1, stages=2), 1.5) == {}
    assert slow_ranks(paces(1.0, 3.0, 2.0, 9.0, stages=2), 1.5) == {3: 3.0, 2: 2.0}


def test_of_two_the_faster_is_the_measure() -> None:
    assert slow_ranks(paces(1.0, 1.6), 1.5) == {1: 1.6}


def test_differences_of_the_clock_and_still_ranks_do_not_count() -> None:
    assert slow_ranks(paces(0.001, 0.010), 1.5) == {}
    assert slow_ranks(paces(0.0, 0.0, 5.0), 1.5) == {}


@dataclass
class OneOfMany:
    """The ranks of a run, of which the others' values are given."""

    others: list[float]
    mesh: Any = field(default_factory=lambda: SimpleNamespace(world_size=3))
    stage: int = 0
    exchanges: int = 0

    def exchange(self, value: list[Any]) -> list[Any]:
        self.exchanges += 1
        return [value, *([0, "far", seconds] for seconds in self.others)]


def test_ranks_are_named_when_others_are_slow_than_before() -> None:
    ranks = OneOfMany([1.0, 2.0])
    watched = Stragglers(cast(Ranks, ranks), GuardConfig(straggler_window=2))
    assert [watched.after_step(time_s) for time_s in (0.5, 1.5)] == [
        None,
        "slow over the last 2 steps: rank 2 on far computes 2.0 times as long a step as its like (2 s)",
    ]
    assert [watched.after_step(1.0) for _ in range(2)] == [None, None]
    ranks.others = [1.0, 1.1]
    assert [watched.after_step(1.0) for _ in range(2)] == [None, "no rank is slow any more, over the last 2 steps"]
    assert ranks.exchanges == 3


def test_nobody_is_asked_when_it_is_off_or_alone() -> None:
    alone = OneOfMany([], mesh=SimpleNamespace(world_size=1))
    assert Stragglers(cast(Ranks, alone), GuardConfig(straggler_window=1)).after_step(1.0) is None
    many = OneOfMany([9.0, 1.0])
    off = GuardConfig(straggler_window=1, straggler_factor=None)
    assert Stragglers(cast(Ranks, many), off).after_step(1.0) is None
    assert alone.exchanges == many.exchanges == 0
