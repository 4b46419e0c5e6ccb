"""Which token rows cross to which node, and where their copies go, against a plain count of them; and how many cross.

Shape letters: see parallel/once_per_node.py.
"""

import math
from itertools import combinations
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ascend_moe_train.cli.plan_allow import alternatives
from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.parallel.comm import Group, LocalComm
from ascend_moe_train.parallel.expert_sizes import ExpertSizes, expected_nodes
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.mesh import Mesh
from ascend_moe_train.parallel.node_routes import NodeRoutes
from ascend_moe_train.planner.hardware import parse_cluster
from ascend_moe_train.planner.judge import judged
from ascend_moe_train.planner.plan import TYPICAL, Job
from ascend_moe_train.planner.run_file import plan_of_run
from ascend_moe_train.planner.sent import sent_bytes
from ascend_moe_train.presets import PRESETS
from tests.model_run import kernels


class Routing:
    """What all ranks of an ep group have: experts and whether an assignment was admitted, (A, T, K) each."""

    def __init__(self, data: st.DataObject) -> None:
        draw = data.draw
        self.I, self.O, self.L = draw(st.integers(2, 3)), draw(st.integers(2, 3)), draw(st.integers(1, 2))
        self.A = self.I * self.O
        self.E, self.T = self.A * self.L, draw(st.integers(1, 4))
        self.K = draw(st.integers(1, min(self.E, 4)))
        generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        order = [generator.permutation(self.E)[: self.K] for _ in range(self.A * self.T)]
        self.expert = np.array(order, np.int32).reshape(self.A, self.T, self.K)
        self.is_kept = generator.random(self.expert.shape) < draw(st.sampled_from([1.0, 0.6]))

    @property
    def accepted_AE(self) -> NDArray[np.int32]:
        rows = [np.bincount(e[kept], minlength=self.E) for e, kept in zip(self.expert, self.is_kept, strict=True)]
        return np.array(rows, np.int32)

    def routes(self, o: int, i: int) -> NodeRoutes:
        config = MoEConfig(num_experts=self.E, top_k=self.K, ffn=1)
        sizes = ExpertSizes.of(config, Mesh.make(self.A, ep=self.A), self.T, None)
        inside = Group(name="inside", ranks=tuple(range(o * self.I, (o + 1) * self.I)), index=i)
        across = Group(name="across", ranks=tuple(range(i, self.A, self.I)), index=o)
        return NodeRoutes(sizes, inside, across, HostOps(LocalComm()), kernels("portable"))

    def crossing(self, rank: int, node: int) -> list[int]:
        """Tokens of a rank that have experts in a node, in order."""
        is_there_TK = self.is_kept[rank] & (self.expert[rank] // (self.I * self.L) == node)
        return np.flatnonzero(is_there_TK.any(1)).tolist()

    def copies(self, o: int, i: int) -> list[tuple[int, int, int]]:
        """(expert, node that it is from, token) of the copies on a rank, in the order of all three."""
        first, stop = o * self.I * self.L, (o + 1) * self.I * self.L
        found = []
        for node in range(self.O):
            expert_TK, is_kept_TK = self.expert[node * self.I + i], self.is_kept[node * self.I + i]
            for t, k in zip(*np.nonzero(is_kept_TK & (expert_TK >= first) & (expert_TK < stop)), strict=True):
                found.append((int(expert_TK[t, k]), node, int(t)))
        return sorted(found)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_token_crosses_once_to_each_node_of_its_experts(data: st.DataObject) -> None:
    routing = Routing(data)
    o, i = data.draw(st.integers(0, routing.O - 1)), data.draw(st.integers(0, routing.I - 1))
    rank, routes = o * routing.I + i, routing.routes(o, i)
    given = ms.Tensor(routing.expert[rank]), ms.Tensor(routing.is_kept[rank])
    row_TO, source_M, counts_O = (each.asnumpy() for each in routes.chosen(*given))

    expected = [(t, node) for node in range(routing.O) for t in routing.crossing(rank, node)]
    assert counts_O.tolist() == [len(routing.crossing(rank, node)) for node in range(routing.O)]
    assert len(source_M) == routes.send_rows == min(routing.K, routing.O) * routing.T
    filled = [t * routing.O + node for t, node in expected]
    assert source_M.tolist() == filled + [-1] * (len(source_M) - len(filled))
    row_of = {pair: row for row, pair in enumerate(expected)}
    wanted = [[row_of.get((t, node), -1) for node in range(routing.O)] for t in range(routing.T)]
    assert row_TO.tolist() == wanted


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_copies_are_in_the_order_of_experts_and_senders(data: st.DataObject) -> None:
    """And the tables back to senders, and on to experts, are those of that order."""
    routing = Routing(data)
    o, i = data.draw(st.integers(0, routing.O - 1)), data.draw(st.integers(0, routing.I - 1))
    routes, copies = routing.routes(o, i), routing.copies(o, i)
    come = [(node, t) for node in range(routing.O) for t in routing.crossing(node * routing.I + i, o)]
    named_CK = np.zeros((routes.node_rows, routing.K), np.int32)
    for row, (node, t) in enumerate(come):
        sender = node * routing.I + i
        named_CK[row] = np.where(routing.is_kept[sender, t], routing.expert[sender, t] + 1, 0)
    row_CK, source_Q = (each.asnumpy() for each in routes.copied(ms.Tensor(named_CK)))

    assert len(copies) <= routes.copies == len(source_Q)
    filled = source_Q[: len(copies)]
    assert [(int(named_CK.reshape(-1)[n]) - 1, *come[n // routing.K]) for n in filled] == copies
    assert (source_Q[len(copies) :] == -1).all()
    assert row_CK.reshape(-1)[filled].tolist() == list(range(len(copies)))
    assert (row_CK >= 0).sum() == len(copies)

    copies_1S, own_1S, send_I, recv_I = (each.asnumpy() for each in routes.sizes(ms.Tensor(routing.accepted_AE)))
    back_O, own_O = (each.asnumpy() for each in routes.each_way(ms.Tensor(routing.accepted_AE)))
    assert copies_1S.sum() == len(copies)
    at = o * routing.I + i
    of_node = [routing.copies(o, place) for place in range(routing.I)]
    mine = [[each for each in of_place if each[0] // routing.L == at] for of_place in of_node]
    assert recv_I.tolist() == [len(each) for each in mine] and own_1S.sum() == sum(map(len, mine))
    assert send_I.tolist() == [sum(e // routing.L == o * routing.I + j for e, _, _ in copies) for j in range(routing.I)]
    assert back_O.tolist() == [sum(node == other for _, node, _ in copies) for other in range(routing.O)]
    own = [
        (routing.expert[at][routing.is_kept[at]] // (routing.I * routing.L) == node).sum() for node in range(routing.O)
    ]
    assert own_O.tolist() == own
    by_sender = sorted(range(len(copies)), key=lambda n: (copies[n][1], copies[n][0], copies[n][2]))
    assert regrouped(routes, copies_1S, routes.copies)[: len(copies)] == by_sender
    arrived = [(place, each) for place, of_place in enumerate(mine) for each in of_place]
    by_source = sorted(range(len(arrived)), key=lambda n: (arrived[n][1][1], arrived[n][0], arrived[n][1]))
    assert regrouped(routes, own_1S, max(1, len(arrived)))[: len(arrived)] == by_source


def regrouped(routes: NodeRoutes, sizes_1S: Any, rows: int) -> list[int]:
    found: list[int] = routes.by_node.places(ms.Tensor(sizes_1S), rows, rows)[1].asnumpy().tolist()
    return found


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_there_is_room_for_all_that_may_come(data: st.DataObject) -> None:
    """Where tokens of all nodes choose the experts of one node, as many as they can."""
    inside, nodes, local = data.draw(st.integers(2, 3)), data.draw(st.integers(2, 3)), data.draw(st.integers(1, 3))
    ep = inside * nodes
    top_k, T = data.draw(st.integers(1, ep * local)), data.draw(st.integers(1, 5))
    config = MoEConfig(num_experts=ep * local, top_k=top_k, ffn=1)
    factor = data.draw(st.sampled_from([None, 1.0]))
    sizes = ExpertSizes.of(config, Mesh.make(ep, ep=ep), T, factor)
    sent, come, copies = sizes.once_rows(inside)
    assert sent == T * min(top_k, nodes)
    worst = nodes * T * min(top_k, inside * local)
    assert copies == min(worst, inside * sizes.receive_rows)
    assert come == min(nodes * T, copies)


@pytest.mark.parametrize(("experts", "top_k", "nodes"), [(8, 2, 2), (8, 3, 4), (6, 4, 3), (6, 6, 2), (12, 1, 4)])
def test_expected_nodes_are_the_mean_over_all_choices(experts: int, top_k: int, nodes: int) -> None:
    of_node = experts // nodes
    chosen = [len({expert // of_node for expert in each}) for each in combinations(range(experts), top_k)]
    assert expected_nodes(experts, top_k, nodes) == pytest.approx(sum(chosen) / len(chosen), rel=1e-12)


def test_top_8_of_64_experts_on_4_nodes() -> None:
    """The figures of docs/parallel.md."""
    once = expected_nodes(64, 8, 4)
    assert once == pytest.approx(4 * (1 - math.comb(48, 8) / math.comb(64, 8)), rel=1e-12)
    assert round(once, 2) == 3.66
    # of it, and of 8 rows, what leaves the node: three quarters
    assert (round(once * 3 / 4, 2), 8 * 3 / 4) == (2.74, 6.0)
    generator = np.random.default_rng(0)
    chosen_TK = generator.permuted(np.tile(np.arange(64), (4000, 1)), axis=1)[:, :8]
    reached = np.mean([len(set((each // 16).tolist())) for each in chosen_TK])
    assert reached == pytest.approx(once, abs=0.03)


def test_a_planned_step_has_fewer_bytes_across_nodes() -> None:
    """Fewer with sums than with copies, in time as in bytes."""
    seconds, sent = [], []
    for how in (None, "copies", "sums"):
        run = RunConfig.model_validate(
            {
                "run": {"dir": "x", "steps": 1000, "precision": "bf16"},
                "model": PRESETS["qwen3_30b_a3b"](),
                "data": {"train": ({"path": "x"},), "tokenizer": "x", "seq_len": 4096},
                "batch": {"global_sequences": 64, "micro_sequences": 1},
                "parallel": {"ep": 32, "hierarchical_ranks": 8, "dedup_tokens": how},
            }
        )
        cluster = parse_cluster("32x910B")
        seconds.append(judged(run, cluster, TYPICAL, "run.yaml").shown["items_s"]["ep"])
        job = Job(model=run.model, seq_len=4096, global_sequences=64)
        rows = sent_bytes(job, plan_of_run(run, 32))["all_to_all_v", "ep across nodes", "expert rows"]
        sent.append(rows)
    assert seconds[0] > seconds[1] > seconds[2]
    once = expected_nodes(128, 8, 4) / 8
    assert sent[1:] == pytest.approx([sent[0] * (1 + once) / 2, sent[0] * once], rel=1e-6)


def test_a_search_tries_it_where_there_are_nodes() -> None:
    cluster, nodes = parse_cluster("32x910B"), {"hierarchical_ranks": 8}
    for how in ("copies", "sums"):
        found = alternatives(nodes | {"dedup_tokens": how}, (), cluster, "ours")
        assert [each.keys for each in found] == [{}, nodes, nodes | {"dedup_tokens": how}]
        found = alternatives({}, (f"hierarchical_ranks=8,dedup_tokens={how}", "expert_chunks=2"), cluster, "ours")
        assert [each.keys for each in found] == [{}, nodes | {"dedup_tokens": how}, {"expert_chunks": 2}]
        with pytest.raises(ConfigError, match=f"^dedup_tokens '{how}' needs nodes and whole rows: allow it with them"):
            alternatives({}, (f"dedup_tokens={how}",), cluster, "ours")
