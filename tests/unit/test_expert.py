"""Sizes that always suffice, rows in another order, and how many ranks a token reaches.

Shape letters: see model/kernels/protocol.py.
"""

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import nn

from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.model.router import Router
from ascend_moe_train.parallel.comm import LocalComm
from ascend_moe_train.parallel.exchange import ChunkedRows, Regrouping
from ascend_moe_train.parallel.expert import make_dispatcher
from ascend_moe_train.parallel.expert_sizes import ExpertSizes
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.mesh import Mesh
from ascend_moe_train.parallel.places import token_order
from tests.model_run import kernels

NO_NOISE = ms.Tensor(np.array([-1], np.int32))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_regrouping_moves_whole_segments(data: st.DataObject) -> None:
    blocks, per_block = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    sizes = [[data.draw(st.integers(0, 3)) for _ in range(per_block)] for _ in range(blocks)]
    block_rows = max(map(sum, sizes)) + data.draw(st.integers(0, 2))
    if block_rows == 0:
        return
    order = data.draw(st.permutations(range(blocks * per_block)))
    used = sum(map(sum, sizes))
    rows = data.draw(st.integers(max(1, used), blocks * block_rows))
    segments = []
    for block, in_block in enumerate(sizes):
        ends = block * block_rows + np.cumsum(in_block)
        segments += [list(range(end - size, end)) for end, size in zip(ends.tolist(), in_block, strict=True)]
    expected = [row for segment in order for row in segments[segment]]

    size_QS = ms.Tensor(np.array(sizes, np.int32))
    row_R1, source_R = Regrouping(order, num_blocks=blocks).places(size_QS, block_rows, rows)

    assert source_R.asnumpy().tolist() == expected + [-1] * (rows - used)
    back = np.full(blocks * block_rows, -1)
    back[expected] = np.arange(used)
    assert row_R1.asnumpy()[:, 0].tolist() == back.tolist()
    assert row_R1.dtype == source_R.dtype == ms.int32


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_chunks_have_the_rows_of_their_experts(data: st.DataObject) -> None:
    ep, chunks, of_chunk = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    E, T = ep * chunks * of_chunk, data.draw(st.integers(1, 5))
    K = data.draw(st.integers(1, min(E, 3)))
    expert_TK = np.array([data.draw(st.permutations(range(E)))[:K] for _ in range(T)], np.int32)
    # with some turned away, as an admission does it
    is_kept_N = np.array(data.draw(st.lists(st.booleans(), min_size=T * K, max_size=T * K)))
    kept_M = [n for n in np.argsort(expert_TK.reshape(-1), kind="stable").tolist() if is_kept_N[n]]
    row_N, source_N = np.full(T * K, -1, np.int32), np.full(T * K, -1, np.int32)
    row_N[kept_M], source_N[: len(kept_M)] = np.arange(len(kept_M)), kept_M
    counts_E = np.bincount(expert_TK.reshape(-1)[kept_M], minlength=E).astype(np.int32)

    rows = ChunkedRows(E, ep, chunks, T * K)
    given = (ms.Tensor(each) for each in (expert_TK, row_N.reshape(T, K), source_N, counts_E))
    row_TK, source_M = (each.asnumpy() for each in rows.places(*given))

    chunk_E = np.arange(E) % (chunks * of_chunk) // of_chunk
    expected = [[n for n in kept_M if chunk_E[expert_TK.reshape(-1)[n]] == chunk] for chunk in range(chunks)]
    assert source_M.reshape(chunks, T * K).tolist() == [each + [-1] * (T * K - len(each)) for each in expected]
    assert (row_TK.reshape(-1) >= 0).tolist() == is_kept_N.tolist()
    assert source_M[row_TK.reshape(-1)[is_kept_N]].tolist() == np.flatnonzero(is_kept_N).tolist()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_there_is_room_for_the_worst_routing(data: st.DataObject) -> None:
    """Tokens choose the experts of one rank, as many of them as they can."""
    ep, etp, local = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    top_k, T = data.draw(st.integers(1, ep * local)), data.draw(st.integers(1, 5))
    factor = data.draw(st.sampled_from([None, 0.3, 1.0, 2.0]))
    config = MoEConfig(num_experts=ep * local, top_k=top_k, ffn=1, capacity_factor=factor)
    mesh = Mesh.make(ep * etp * data.draw(st.integers(1, 2)), ep=ep, etp=etp)
    sizes = ExpertSizes.of(config, mesh, T, None)
    # rows for each expert of one rank, from each of P ranks: all tokens, of as many experts as a token may choose here
    rows_PL = np.zeros((ep * etp, local), np.int64)
    rows_PL[:, : min(top_k, local)] = T
    if sizes.capacity is not None:
        room_PL = np.maximum(sizes.capacity - (np.cumsum(rows_PL, axis=0) - rows_PL), 0)
        rows_PL = np.minimum(rows_PL, room_PL)
    from_ep_group = rows_PL.reshape(ep, etp, local).sum(axis=(0, 2))
    assert from_ep_group.max() <= sizes.receive_rows
    assert rows_PL.sum() <= sizes.expert_rows <= etp * sizes.receive_rows
    if factor is None:
        assert (from_ep_group == sizes.receive_rows).all()
    for inside in (size for size in range(1, ep + 1) if ep % size == 0):
        others = T * min(top_k, ep // inside * local)
        assert min(inside * others, ep // inside * sizes.receive_rows) == sizes.middle_rows(inside)


def test_receive_factor_bounds_the_room() -> None:
    config, mesh = MoEConfig(num_experts=8, top_k=2, ffn=1), Mesh.make(4, ep=4)
    rooms = [ExpertSizes.of(config, mesh, 10, factor).receive_rows for factor in (None, 1.0, 1.01, 100.0)]
    assert rooms == [80, 20, 21, 80]


class _Dispatch(nn.Cell):
    def __init__(self, dispatcher: Any) -> None:
        super().__init__()
        self.dispatcher = dispatcher

    def construct(self, x_TD: Any, expert_TK: Any, gate_TK: Any) -> Any:
        return self.dispatcher.dispatch(x_TD, expert_TK, gate_TK)[0]


def test_another_number_of_tokens_is_refused() -> None:
    config, mesh, collectives = MoEConfig(num_experts=2, top_k=1, ffn=1), Mesh.make(1), HostOps(LocalComm())
    sizes = ExpertSizes.of(config, mesh, 4, None)
    order = token_order(mesh, [0], 1, 4)
    made = make_dispatcher(config, sizes, mesh, collectives.world, order, collectives, kernels("portable"))
    dispatch = _Dispatch(made)
    x_TD, expert_TK, gate_TK = (np.ones((5, size), dtype) for size, dtype in ((3, "f4"), (1, "i4"), (1, "f4")))
    with pytest.raises(ValueError, match="5 tokens for a dispatcher that was made for 4"):
        dispatch(ms.Tensor(x_TD), ms.Tensor(expert_TK), ms.Tensor(gate_TK))


@pytest.mark.parametrize("options", [{"jitter": 0.3}, {"force_balance": True}])
def test_a_router_goes_by_the_places_of_its_tokens(options: dict[str, Any]) -> None:
    """It chooses for some tokens as it does for them among all."""
    E, D, T, taken = 5, 6, 24, np.array([2, 3, 4, 17, 18, 23], np.int32)
    generator = np.random.default_rng(0)
    weight, x_TD = generator.standard_normal((E, D)).astype(np.float32), generator.standard_normal((T, D))
    taken_T = ms.Tensor(taken)

    def places(num_tokens: int) -> Any:
        return taken_T

    found = []
    for rows, of_rows in ((slice(None), None), (taken, places)):
        router = Router(D, MoEConfig(num_experts=E, top_k=2, ffn=1, **options), 0)
        router.weight.set_data(ms.Tensor(weight))
        if of_rows is not None:
            router.places = of_rows
        chosen = router(ms.Tensor(x_TD[rows].astype(np.float32)), 1, ms.Tensor(np.array([3], np.int32)))
        found.append([x.asnumpy() for x in chosen[:2]])
    for whole, part in zip(*found, strict=True):
        assert np.array_equal(whole[taken], part)
        assert not np.array_equal(whole[: len(taken)], part)


@pytest.mark.parametrize(("num_groups", "top_groups"), [(8, 2), (4, 1), (4, 3), (2, 1)])
def test_a_token_reaches_few_ranks(num_groups: int, top_groups: int) -> None:
    """With groups of experts that ranks hold whole, or hold a part of each: DeepSeek-V3, section 2.1.2."""
    ep, E, top_k, D, T = 8, 16, 2, 6, 50
    config = MoEConfig(num_experts=E, top_k=top_k, ffn=1, num_groups=num_groups, top_groups=top_groups)
    router = Router(D, config, 0)
    generator = np.random.default_rng(0)
    router.weight.set_data(ms.Tensor(generator.standard_normal((E, D)).astype(np.float32)))
    x_TD = ms.Tensor(generator.standard_normal((T, D)).astype(np.float32))
    expert_TK = router(x_TD, 1, NO_NOISE)[0].asnumpy()
    ranks = {tuple(sorted(set((experts // (E // ep)).tolist()))) for experts in expert_TK}
    assert max(map(len, ranks)) <= min(top_k, top_groups * max(1, ep // num_groups))
    groups = {tuple(sorted(set((experts // (E // num_groups)).tolist()))) for experts in expert_TK}
    assert max(map(len, groups)) <= top_groups
    assert len(ranks) > 1
