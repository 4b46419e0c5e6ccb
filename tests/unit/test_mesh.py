"""The mesh against its definition, and the one line that each size that does not fit gives."""

import re
from collections.abc import Callable
from functools import partial
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.mesh import DENSE_AXES, EXPERT_AXES, STAGE_AXES, Mesh, check_batch, num_micro
from ascend_moe_train.train.config import BatchConfig

SIZES = st.integers(1, 4)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Up to some hundred ranks: the fewest that the axes fit on, and small multiples."""
    pp, cp, tp, ep, etp = (draw(SIZES) for _ in range(5))
    ranks = pp * lcm(cp * tp, ep * etp) * draw(st.integers(1, 3))
    return Mesh.make(ranks, pp=pp, cp=cp, tp=tp, ep=ep, etp=etp)


def all_coordinates(mesh: Mesh) -> list[dict[str, int]]:
    """Of every rank, counted like the digits of an odometer whose last axis turns fastest."""
    found: list[dict[str, int]] = [{} for _ in range(mesh.world_size)]
    for axes in (DENSE_AXES, EXPERT_AXES):
        counter = [0] * len(axes)
        for rank in range(mesh.world_size):
            found[rank] |= dict(zip(axes, counter, strict=True))
            for i in reversed(range(len(axes))):
                counter[i] = (counter[i] + 1) % mesh.size((axes[i],))
                if counter[i]:
                    break
    return found


@settings(max_examples=200, deadline=None)
@given(meshes())
def test_coordinates_count_up(mesh: Mesh) -> None:
    assert [vars(mesh.coordinates(rank)) for rank in range(mesh.world_size)] == [
        {axis: where[axis] for axis in ("pp", "dp", "cp", "tp", "edp", "ep", "etp")} for where in all_coordinates(mesh)
    ]
    dense = {
        ((c.pp * mesh.dp + c.dp) * mesh.cp + c.cp) * mesh.tp + c.tp: rank
        for rank in range(mesh.world_size)
        if (c := mesh.coordinates(rank))
    }
    expert = {
        ((c.pp * mesh.edp + c.edp) * mesh.ep + c.ep) * mesh.etp + c.etp: rank
        for rank in range(mesh.world_size)
        if (c := mesh.coordinates(rank))
    }
    assert dense == expert == {rank: rank for rank in range(mesh.world_size)}


@settings(max_examples=200, deadline=None)
@given(meshes(), st.sampled_from([DENSE_AXES, EXPERT_AXES]), st.data())
def test_groups_differ_along_their_axes_only(mesh: Mesh, order: tuple[str, ...], data: st.DataObject) -> None:
    axes = tuple(data.draw(st.sets(st.sampled_from(order))))
    where = all_coordinates(mesh)
    others = [axis for axis in order if axis not in axes]
    by_the_rest: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        by_the_rest.setdefault(tuple(where[rank][axis] for axis in others), []).append(rank)
    expected = sorted(tuple(ranks) for ranks in by_the_rest.values())
    assert mesh.groups(axes) == expected
    assert {mesh.group(axes, rank) for rank in range(mesh.world_size)} == set(expected)
    assert all(rank in mesh.group(axes, rank) for rank in range(mesh.world_size))
    assert {len(ranks) for ranks in expected} == {mesh.size(axes)}


def test_known_mesh() -> None:
    mesh = Mesh.make(16, tp=2, ep=4, etp=2)
    assert (mesh.dp, mesh.edp) == (8, 2)
    assert mesh.group(("tp",), 5) == (4, 5)
    assert mesh.group(("dp", "cp"), 5) == (1, 3, 5, 7, 9, 11, 13, 15)
    assert mesh.group(("ep",), 13) == (9, 11, 13, 15)
    assert mesh.group(("edp",), 13) == (5, 13)
    assert mesh.group(STAGE_AXES, 13) == tuple(range(16))
    assert mesh.group((), 13) == (13,)


def test_what_is_no_group() -> None:
    mesh = Mesh.make(8, tp=2, ep=2)
    with pytest.raises(ValueError, match=r"axes \['tp', 'ep'\] are neither all of \['pp', 'dp', 'cp', 'tp'\]"):
        mesh.group(("tp", "ep"), 0)
    for rank in (-1, 8):
        with pytest.raises(ValueError, match=f"rank {rank} is not one of 8"):
            mesh.coordinates(rank)
    with pytest.raises(ValueError, match="hold 4 ranks of 8"):
        Mesh(world_size=8, pp=1, dp=4, cp=1, tp=1, edp=8, ep=1, etp=1)


def fits(ranks: int, sizes: dict[str, int]) -> bool:
    stages_hold = sizes["cp"] * sizes["tp"], sizes["ep"] * sizes["etp"]
    return ranks > 0 and ranks % sizes["pp"] == 0 and all(ranks // sizes["pp"] % each == 0 for each in stages_hold)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 60), st.fixed_dictionaries(dict.fromkeys(("pp", "cp", "tp", "ep", "etp"), st.integers(1, 8))))
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(ranks: int, sizes: dict[str, int]) -> None:
    if fits(ranks, sizes):
        assert Mesh.make(ranks, **sizes).world_size == ranks
        return
    with pytest.raises(ConfigError) as error:
        Mesh.make(ranks, **sizes)
    line = str(error.value)
    assert line.startswith(f"{ranks} ranks do not divide by parallel pp {sizes['pp']} x ")
    offered = re.search(r": use ([0-9 or]+) ranks", line)
    assert offered is not None
    numbers = [int(number) for number in offered[1].split(" or ")]
    assert numbers == nearest(ranks, lambda n: fits(n, sizes), 10**6)
    for axis, words in re.findall(r"parallel\.(\w+) (\d+(?: or \d+)?)", line):
        choices = [int(number) for number in words.split(" or ")]
        assert choices == nearest(sizes[axis], partial(fits_with, ranks, sizes, axis), ranks)


def fits_with(ranks: int, sizes: dict[str, int], axis: str, size: int) -> bool:
    return fits(ranks, {**sizes, axis: size})


def nearest(wanted: int, is_possible: Callable[[int], bool], most: int) -> list[int]:
    below = [n for n in range(1, wanted) if is_possible(n)][-1:]
    above = next(([n] for n in range(wanted + 1, most + 1) if is_possible(n)), [])
    return below + above


MISFITS = [
    (8, {"tp": 3}, "8 ranks do not divide by parallel pp 1 x cp 1 x tp 3 = 3: use 6 or 9 ranks, or parallel.tp 2 or 4"),
    (
        8,
        {"tp": 2, "ep": 3},
        "8 ranks do not divide by parallel pp 1 x ep 3 x etp 1 = 3: use 6 or 12 ranks, or parallel.ep 2 or 4",
    ),
    (2, {"tp": 4}, "2 ranks do not divide by parallel pp 1 x cp 1 x tp 4 = 4: use 4 ranks, or parallel.tp 2"),
    (8, {"tp": 0}, "tp 0 is not allowed: must be from 1 to 1048576"),
    (0, {}, "ranks 0 is not allowed: must be from 1 to 1048576"),
    (2**21, {}, "ranks 2097152 is not allowed: must be from 1 to 1048576"),
    (8, {"tp": 2**20, "ep": 2**20 - 1}, "8 ranks do not divide by parallel pp 1 x cp 1 x tp 1048576 = 1048576: use "),
]


@pytest.mark.parametrize(("ranks", "sizes", "message"), MISFITS)
def test_misfits(ranks: int, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        Mesh.make(ranks, **sizes)


def test_micro_batches_of_all_data_parallel_ranks() -> None:
    batch = BatchConfig(global_sequences=48, micro_sequences=4)
    for mesh, count in ((Mesh.make(1), 12), (Mesh.make(4), 3), (Mesh.make(8, tp=2), 3), (Mesh.make(12, cp=3), 3)):
        check_batch(batch, mesh)
        assert num_micro(batch, mesh) == count


@pytest.mark.parametrize(
    ("sequences", "choices"),
    [
        (8, "24"),
        (32, "24 or 48"),
        (60, "48 or 72, or batch.micro_sequences 2 or 5"),
        (6, "24, or batch.micro_sequences 1"),
    ],
)
def test_a_batch_that_cannot_be_shared_out(sequences: int, choices: str) -> None:
    batch = BatchConfig.model_construct(global_sequences=sequences, micro_sequences=4)
    line = (
        f"batch.global_sequences {sequences} does not divide by dp 6 x batch.micro_sequences 4 = 24 "
        f"(dp is 24 ranks / pp 2 x cp 1 x tp 2): use {choices}"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        check_batch(batch, Mesh.make(24, pp=2, tp=2))
