"""Who has which tokens under context parallelism, what part of a batch that is, and who sees whom around the ring."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ascend_moe_train.data.loader import Batch
from ascend_moe_train.parallel.mesh import Mesh
from ascend_moe_train.parallel.places import (
    TokenOrder,
    own_part,
    own_places,
    ring_steps,
    starts,
    token_order,
    token_places,
)


def meshes() -> st.SearchStrategy[tuple[Mesh, int, int]]:
    """A mesh, sequences of a dp rank, and places of a sequence."""

    def fitting(sizes: tuple[int, int, int, int, int, int]) -> tuple[Mesh, int, int]:
        dp, cp, tp, pp, sequences, size = sizes
        # tokens of a cp rank divide by tp
        return Mesh.make(pp * dp * cp * tp, pp=pp, cp=cp, tp=tp), sequences * tp, 2 * cp * size

    small = st.sampled_from([1, 2, 3])
    return st.tuples(small, st.sampled_from([1, 2, 4]), small, small, small, small).map(fitting)


def brute_force(mesh: Mesh, rank: int, sequences: int, seq_len: int) -> list[int]:
    """Token by token, in the order that a rank has them."""
    here = mesh.coordinates(rank)
    size = seq_len // (2 * mesh.cp)
    mine = [
        (here.dp * sequences + b) * seq_len + s
        for b in range(sequences)
        for s in range(seq_len)
        if s // size in (here.cp, 2 * mesh.cp - 1 - here.cp)
    ]
    return mine[here.tp * len(mine) // mesh.tp : (here.tp + 1) * len(mine) // mesh.tp]


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_every_token_of_a_stage_is_somewhere_once(case: tuple[Mesh, int, int]) -> None:
    mesh, sequences, seq_len = case
    for ranks in mesh.groups(("dp", "cp", "tp")):
        found = [token_places(mesh, rank, sequences, seq_len).tolist() for rank in ranks]
        assert found == [brute_force(mesh, rank, sequences, seq_len) for rank in ranks]
        assert sorted(chain(*found)) == list(range(mesh.dp * sequences * seq_len))


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_runs_are_stretches_of_consecutive_tokens(case: tuple[Mesh, int, int]) -> None:
    mesh, sequences, seq_len = case
    order = token_order(mesh, mesh.groups(("dp", "cp", "tp"))[0], sequences, seq_len)
    assert mesh.cp > 1 or order.num_runs == 1
    stretches: dict[int, list[int]] = {}
    for w, (place_T, run_T) in enumerate(zip(order.place_WT, order.run_WT, strict=True)):
        for place, run in zip(place_T.tolist(), run_T.tolist(), strict=True):
            stretches.setdefault(w * order.num_runs + run, []).append(place)
    assert all(places == list(range(places[0], places[-1] + 1)) for places in stretches.values())
    used = [run for run in order.order_M.tolist() if run in stretches]
    assert list(chain(*(stretches[run] for run in used))) == list(range(mesh.dp * sequences * seq_len))
    assert order.order_M.tolist()[: len(used)] == used
    assert order.place_WT.reshape(-1)[order.token_order_U].tolist() == list(range(mesh.dp * sequences * seq_len))


def test_one_context_rank_has_one_run() -> None:
    mesh = Mesh.make(8, tp=2)
    order = token_order(mesh, range(8), 3, 6)
    assert order.num_runs == 1
    assert order.order_M.tolist() == list(range(8))
    assert order.token_order_U.tolist() == list(range(72))


def test_ranks_with_fewer_runs() -> None:
    order = TokenOrder.of([np.array([0, 1, 6, 7], np.int32), np.array([2, 3, 4, 5], np.int32)])
    assert (order.num_runs, order.order_M.tolist()) == (2, [0, 2, 1, 3])


def batch(sequences: int, seq_len: int) -> Batch:
    generator = np.random.default_rng(3)
    segment = np.sort(generator.integers(0, 3, (sequences, seq_len)), axis=1).astype(np.int32)
    tokens, targets, position = generator.integers(0, 100, (3, sequences, seq_len)).astype(np.int32)
    return Batch(tokens_BS=tokens, targets_BS=targets, segment_BS=segment, position_BS=position)


@pytest.mark.parametrize("cp", [2, 4])
def test_own_part_of_a_batch(cp: int) -> None:
    mesh, whole = Mesh.make(cp * 4, cp=cp, tp=2), batch(3, 16)
    for rank in range(mesh.world_size):
        here = mesh.coordinates(rank)
        part, places = own_part(whole, mesh, here), own_places(16, cp, here.cp)
        for name in ("tokens_BS", "targets_BS", "position_BS"):
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[:, places])
            assert getattr(part, name).dtype == np.int32
        assert part.segment_BS.dtype == np.int32
        for sequence, segment_S in enumerate(whole.segment_BS):
            first = [int(np.flatnonzero(segment_S == segment_S[place])[0]) for place in places]
            assert part.segment_BS[sequence].tolist() == first


def test_one_context_rank_has_all() -> None:
    whole, mesh = batch(2, 6), Mesh.make(4, tp=2)
    assert own_part(whole, mesh, mesh.coordinates(3)) is whole


def test_starts_of_documents() -> None:
    assert starts(np.array([[0, 0, 2, 2, 2], [1, 2, 3, 3, 4]], np.int32)).tolist() == [[0, 0, 2, 2, 2], [0, 1, 2, 2, 4]]


@dataclass(frozen=True)
class Seen:
    """(query, key) pairs of local rows."""

    within: NDArray[np.bool_]
    needed: NDArray[np.bool_]


def seen(seq_len: int, cp: int, index: int, step: int, window: int | None) -> Seen:
    """What a ring step computes, and what has to be seen."""
    found = ring_steps(seq_len, cp, index, window)[step]
    query, key = own_places(seq_len, cp, index), own_places(seq_len, cp, (index - step) % cp)
    back = query[:, None] - key[None, :]
    needed = (back >= 0) & (back < (seq_len if window is None else window))
    within = np.zeros_like(needed)
    within[slice(*found.queries), slice(*found.keys)] = True
    assert found.key_starts == tuple(key[slice(*found.keys)][:: found.piece_size].tolist())
    return Seen(within, needed)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 11])
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_ring_steps_hold_what_is_seen(cp: int, window: int | None) -> None:
    for index in range(cp):
        for step in range(cp):
            pairs = seen(cp * 6, cp, index, step, window)
            assert not (pairs.needed & ~pairs.within).any()
            assert pairs.needed.any() == pairs.within.any()


@pytest.mark.parametrize("cp", [2, 4])
def test_ring_steps_are_equal_work(cp: int) -> None:
    """Half of a square with another rank's keys, in which nothing is masked."""
    for index in range(cp):
        for step in range(1, cp):
            pairs = seen(cp * 4, cp, index, step, None)
            assert pairs.within.sum() * 2 == pairs.within.size
            assert (pairs.within == pairs.needed).all()
