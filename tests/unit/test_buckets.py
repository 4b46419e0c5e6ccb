"""Parts, padding and buckets against brute force, for random models on random meshes; costs of examples by hand."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_moe_train.errors import TrainingError
from ascend_moe_train.parallel.buckets import CLASSES, Form, Share, buckets_of, fill_buckets, share_of
from ascend_moe_train.parallel.comm import Group, LocalComm
from ascend_moe_train.parallel.shards import Placement, boxes, placements
from ascend_moe_train.parallel.zero import check_adds_up
from ascend_moe_train.parallel.zero_costs import Uses, ZeroBytes, ZeroPlan, zero_bytes, zero_traffic
from tests.parallel_cases import Layout, layouts

FORMS: dict[int, Form] = {0: "whole", 1: "parts", 3: "on_use"}
stages = st.sampled_from(list(FORMS))


def share(name: str, placement: Placement, rank: int, stage: int) -> Share:
    repeated = placement.repeated
    neighbours = None if repeated is None else Group(name="kv", ranks=repeated.ranks, index=repeated.ranks.index(rank))
    group = Group(name=str(placement.gradient), ranks=placement.group, index=placement.index)
    return share_of(name, placement, group=group, form=FORMS[stage], neighbours=neighbours)


def shares_of(layout: Layout, rank: int, stage: int) -> tuple[dict[str, Placement], list[Share]]:
    """Placements of what has a gradient, and the shares of what is there."""
    placed = placements(layout.model, layout.mesh, rank, sequence_parallel=layout.sequence_parallel, lora=layout.lora)
    placed = {name: placement for name, placement in placed.items() if placement.gradient != "none"}
    return placed, [share(name, p, rank, stage) for name, p in placed.items() if p.local_size]


@given(st.lists(st.integers(1, 30)), st.integers(1, 40))
def test_buckets_are_full_and_in_order(sizes: list[int], most: int) -> None:
    places = list(reversed(range(len(sizes))))
    buckets = fill_buckets(sizes, places, most)
    assert [place for bucket in buckets for place in bucket] == places
    totals = [sum(sizes[place] for place in bucket) for bucket in buckets]
    assert all(total <= most or len(bucket) == 1 for total, bucket in zip(totals, buckets, strict=True))
    following = zip(totals, buckets[1:], strict=False)
    assert all(total + sizes[bucket[0]] > most for total, bucket in following)


@settings(max_examples=60, deadline=None)
@given(layouts(), stages)
def test_every_element_counts_once(layout: Layout, stage: int) -> None:
    """Over all ranks: by what they update of it, and by their weight."""
    counted: dict[str, Any] = {}
    for rank in range(layout.mesh.world_size):
        placed, shares = shares_of(layout, rank, stage)
        for each in shares:
            times = counted.setdefault(each.name, np.zeros(placed[each.name].shape))
            first = each.updated[0]
            for box in boxes(placed[each.name], first, first + each.num_counted):
                times[tuple(slice(start, stop) for start, stop in box.ranges)] += each.weight
    assert all(np.allclose(times, 1.0, rtol=1e-12) for times in counted.values())


@settings(max_examples=60, deadline=None)
@given(layouts(), stages)
def test_parts_of_a_group_are_the_tensor_and_less_than_n_zeros_each(layout: Layout, stage: int) -> None:
    _, shares = shares_of(layout, layout.mesh.world_size - 1, stage)
    for each in shares:
        n = each.group.size
        if each.form == "whole":
            assert (each.updated, each.updated_shape) == ((0, each.size), each.shape)
            assert stage == 0 or n == 1
            continue
        mine = replace(each, group=replace(each.group, index=0))
        ranges = [replace(mine, group=replace(each.group, index=index)).updated for index in range(n)]
        assert [position for start, stop in ranges for position in range(start, stop)] == list(range(each.size))
        assert each.updated_shape == (each.part,)
        assert 0 <= each.part * n - each.size < n


@settings(max_examples=60, deadline=None)
@given(layouts(), stages, st.integers(1, 2000))
def test_no_rank_waits_for_ever(layout: Layout, stage: int, bucket_bytes: int) -> None:
    """Each rank makes its calls one after the other; one is over when all ranks of its group are at it."""
    waiting = []
    for rank in range(layout.mesh.world_size):
        _, shares = shares_of(layout, rank, stage)
        buckets = buckets_of(shares, bucket_bytes)
        calls = [(shares[b[0]].neighbours, [shares[i].num_repeated for i in b]) for b in buckets.repeated]
        calls += [(shares[b[0]].group, [shares[i].size for i in b]) for b in buckets.reduced]
        calls += [(shares[b[0]].group, [shares[i].size for i in b]) for b in buckets.published]
        waiting.append([(group.ranks, sizes) for group, sizes in calls if group is not None])
    while any(waiting):
        ready = {calls[0][0] for calls in waiting if calls if all(of_rank(waiting, r) == calls[0] for r in calls[0][0])}
        assert ready
        for ranks in ready:
            for rank in ranks:
                waiting[rank].pop(0)


def of_rank(waiting: Sequence[Any], rank: int) -> Any:
    return waiting[rank][0] if waiting[rank] else None


def one(name: str, shape: tuple[int, ...], form: Form, n: int = 4, **changes: Any) -> Share:
    """A share of the second of n ranks that hold the same."""
    group = Group(name="dp", ranks=tuple(range(n)), index=min(1, n - 1))
    whole = Share(name=name, shape=shape, gradient="dense", group=group, form=form, weight=1.0)
    return replace(whole, **changes)


def plan(stage: int, shares: Sequence[Share], **changes: Any) -> ZeroPlan:
    names = tuple(each.name for each in shares if each.is_trained)
    world = Group(name="world", ranks=(0, 1, 2, 3), index=1)
    made = ZeroPlan(stage=stage, shares=tuple(shares), names=names, world=world, uses={}, bucket_bytes=60)
    return replace(made, **changes)


def test_buckets_go_by_kind_then_from_the_last_used_to_the_first() -> None:
    shares = [one(name, (2, 5), "parts") for name in "abc"]
    shares[1] = replace(shares[1], gradient="expert")
    found = buckets_of([*shares, one("d", (3,), "whole", n=1), one("e", (2,), "parts", is_trained=False)], 1000)
    assert (found.repeated, found.reduced, found.published) == ([], [(2, 0), (1,)], [(2, 0), (1,)])
    assert CLASSES.index("dense") < CLASSES.index("expert")
    assert buckets_of(shares, 79).reduced == [(2,), (0,), (1,)]


def test_costs_of_a_small_model_by_hand() -> None:
    matrix, norm, frozen = (5, 3), (6,), (7,)
    a, b = one("a", matrix, "parts"), one("b", norm, "parts")
    still = one("c", frozen, "whole", is_trained=False)
    assert (a.part, a.updated, b.part, b.updated) == (4, (4, 8), 2, (2, 4))
    first = plan(1, [a, b, still], wire="bf16")
    assert zero_bytes(first, num_micro=3) == ZeroBytes(weights=4 * 28, gradients=4 * 21, optimizer=12 * 6, host=0)
    # buckets of 60 bytes hold the matrix alone
    traffic = {
        ("reduce_scatter", "dp"): (2, 2 * (16 + 8)),
        ("all_gather", "dp"): (2, 4 * 6),
        ("all_reduce", "world"): (1, 4 * (5 + 2)),
    }
    assert zero_traffic(first, num_micro=3) == traffic
    assert zero_traffic(replace(first, stage=2), num_micro=3) == traffic | {
        ("reduce_scatter", "dp"): (6, 3 * 2 * (16 + 8))
    }
    third = plan(3, [replace(a, form="on_use"), b, still], uses={"a": Uses(gathers=2, reductions=1)})
    assert zero_bytes(third, num_micro=1) == ZeroBytes(weights=4 * 17, gradients=0, optimizer=4 * (8 + 6), host=0)
    assert zero_bytes(replace(third, offload=True), num_micro=2) == ZeroBytes(
        weights=4 * 17, gradients=4 * 6, optimizer=0, host=12 * 6
    )
    assert zero_traffic(third, num_micro=2) == {
        ("reduce_scatter", "dp"): (4, 2 * 4 * 16 + 2 * 4 * 8),
        ("all_gather", "dp"): (5, 2 * 2 * 4 * 4 + 4 * 2),
        ("all_reduce", "world"): (1, 4 * (5 + 2)),
    }


def test_repeated_rows_count_on_the_first_neighbour_and_are_summed_first() -> None:
    neighbours = Group(name="kv", ranks=(0, 1), index=1)
    qkv = one("qkv", (6, 3), "whole", repeated_from=4, neighbours=neighbours)
    assert (qkv.num_repeated, qkv.num_counted) == (6, 12)
    assert replace(qkv, neighbours=replace(neighbours, index=0)).num_counted == 18
    part = replace(qkv, form="parts", group=Group(name="dp", ranks=(0, 2), index=1))
    assert (part.updated, part.num_counted) == ((9, 18), 3)
    assert replace(part, repeated_from=2).num_counted == 0
    found = zero_traffic(plan(0, [qkv]), num_micro=2)
    assert found[("all_reduce", "kv")] == (1, 4 * 6)


@pytest.mark.parametrize("lost", [1, 5])
def test_parts_that_do_not_add_up_are_refused(lost: int) -> None:
    placed = {
        name: Placement(
            shape=(4, 3),
            gradient="dense",
            intervals=(((0, 4),), ((0, 3),)),
            group=(0,),
            index=0,
            replicas=1,
            is_first=True,
            repeated=None,
        )
        for name in ("a", "b", "c", "d", "e")
    }
    shares = [one(name, p.shape, "whole", n=1) for name, p in placed.items()]
    check_adds_up(plan(0, shares), placed, LocalComm())
    kept = plan(0, shares[lost:], names=tuple(placed))
    with pytest.raises(TrainingError, match=r"a \(dense\) 0 of 12") as caught:
        check_adds_up(kept, placed, LocalComm())
    assert ("and 2 more" in str(caught.value)) == (lost == 5)
    assert prod(placed["a"].shape) == 12
