"""Layers of experts on small meshes, what each rank holds of them, and what the fp64 oracle makes of the whole.

Shape letters: see model/kernels/protocol.py; T tokens of one rank, W ranks, U = W * T all tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.config import ModelConfig, MoEConfig
from ascend_moe_train.parallel.mesh import Coordinates, Mesh
from ascend_moe_train.parallel.places import token_places
from tests.oracle.arrays import F64, I64, Flags
from tests.oracle.moe import MoEOutput, moe_layer, moe_layer_vjp
from tests.oracle.router import balance_loss, balance_loss_vjp, z_loss, z_loss_vjp
from tests.oracle.wires import WIRES

HIDDEN, FFN, NUM_EXPERTS = 12, 8, 8
BALANCE, Z = 0.3, 0.2
SKEWED, EVEN = "skewed", "even"


@dataclass(frozen=True, kw_only=True)
class Case:
    """`sequences` of `seq_len` tokens on each data parallel rank. `skewed` routing sends all tokens to expert 5 (and of
    top-2 the rest elsewhere, but never to expert 0)."""

    name: str
    ranks: int
    parallel: Mapping[str, int] = field(default_factory=dict)
    moe: Mapping[str, Any] = field(default_factory=dict)
    receive_factor: float | None = None
    sequences: int = 2
    seq_len: int = 6
    kernels: str = "native"
    precision: str = "fp32"
    wire: str | None = None
    chunks: int = 1
    dedup: str | None = None

    @property
    def moe_config(self) -> MoEConfig:
        return MoEConfig(**({"num_experts": NUM_EXPERTS, "top_k": 2, "ffn": FFN, "router_bias": True} | dict(self.moe)))

    @property
    def mesh(self) -> Mesh:
        sizes = {axis: size for axis, size in self.parallel.items() if axis in ("cp", "tp", "ep", "etp")}
        return Mesh.make(self.ranks, **sizes)

    @property
    def num_tokens(self) -> int:
        """On one rank."""
        return self.sequences * self.seq_len // (self.mesh.cp * self.mesh.tp)

    @property
    def run(self) -> RunConfig:
        model = ModelConfig(
            vocab_size=4, hidden=HIDDEN, num_layers=1, num_heads=2, num_kv_heads=2, ffn=8, moe=self.moe_config
        )
        return RunConfig.model_validate(
            {
                "run": {"dir": "run", "steps": 200},
                "model": model,
                "data": {"train": ({"path": "corpus"},), "tokenizer": "none", "seq_len": self.seq_len},
                "batch": {"micro_sequences": self.sequences, "global_sequences": self.sequences * self.mesh.dp},
                "parallel": {
                    **self.parallel,
                    "receive_factor": self.receive_factor,
                    "expert_wire": self.wire,
                    "expert_chunks": self.chunks,
                    "dedup_tokens": self.dedup,
                },
            }
        )


CASES = {
    case.name: case
    for case in (
        Case(name="ep2", ranks=2, parallel={"ep": 2}),
        Case(name="etp2", ranks=2, parallel={"etp": 2}, moe={"expert_bias": True}),
        Case(name="dp2, capacity", ranks=2, moe={"capacity_factor": 0.8, "aux_loss_scope": "sequence"}),
        Case(name="dp2", ranks=2, moe={"aux_loss_scope": "model"}),
        Case(name="ep2, fp16", ranks=2, parallel={"ep": 2}, precision="fp16"),
        Case(name="ep2, top-1", ranks=2, parallel={"ep": 2}, moe={"top_k": 1}, kernels="portable"),
        Case(name="ep2, bound", ranks=2, parallel={"ep": 2}, receive_factor=1.0, seq_len=5),
        Case(name="ep4", ranks=4, parallel={"ep": 4}, moe={"num_groups": 4, "top_groups": 2}),
        Case(
            name="ep4, by probability",
            ranks=4,
            parallel={"ep": 4},
            moe={"capacity_factor": 0.7, "drop_policy": "probability", "aux_loss_scope": "sequence"},
        ),
        Case(name="ep2 x etp2", ranks=4, parallel={"ep": 2, "etp": 2}, moe={"expert_bias": True, "score": "sigmoid"}),
        Case(
            name="ep2 x etp2, bound",
            ranks=4,
            parallel={"ep": 2, "etp": 2},
            receive_factor=1.0,
            kernels="portable",
        ),
        Case(
            name="tp2, ep2 x edp2, capacity",
            ranks=4,
            parallel={"ep": 2, "tp": 2},
            moe={"capacity_factor": 0.9, "aux_loss_scope": "sequence"},
            sequences=3,
        ),
        Case(
            name="edp2 x etp2, by probability",
            ranks=4,
            parallel={"etp": 2},
            moe={"capacity_factor": 0.6, "drop_policy": "probability"},
        ),
        Case(
            name="ep4 in two steps, bound",
            ranks=4,
            parallel={"ep": 4, "hierarchical_ranks": 2},
            receive_factor=1.2,
            moe={"jitter": 0.1},
        ),
        Case(
            name="cp2, ep2, capacity",
            ranks=2,
            parallel={"cp": 2, "ep": 2},
            moe={"capacity_factor": 0.7, "aux_loss_scope": "sequence", "jitter": 0.1},
            sequences=3,
            seq_len=8,
        ),
        Case(
            name="cp2 x tp2, ep2 x edp2, capacity",
            ranks=4,
            parallel={"cp": 2, "tp": 2, "ep": 2},
            moe={"capacity_factor": 0.9},
            sequences=3,
            seq_len=12,
        ),
        Case(
            name="dp2 x cp2, ep4, by probability",
            ranks=4,
            parallel={"cp": 2, "ep": 4},
            moe={"capacity_factor": 0.7, "drop_policy": "probability", "aux_loss_scope": "sequence"},
            seq_len=8,
        ),
        Case(
            name="cp4, etp2, capacity",
            ranks=4,
            parallel={"cp": 4, "etp": 2},
            moe={"capacity_factor": 0.5},
            seq_len=16,
        ),
        Case(name="ep2, bf16 wire", ranks=2, parallel={"ep": 2}, wire="bf16", moe={"expert_bias": True}),
        Case(name="ep2, fp16 wire, capacity", ranks=2, parallel={"ep": 2}, wire="fp16", moe={"capacity_factor": 0.8}),
        Case(name="ep2, fp16, int8 wire", ranks=2, parallel={"ep": 2}, wire="int8", precision="fp16"),
        Case(
            name="ep4 in two steps, int8 wire, bound",
            ranks=4,
            parallel={"ep": 4, "hierarchical_ranks": 2},
            wire="int8",
            receive_factor=1.2,
        ),
        Case(name="ep4, bound", ranks=4, parallel={"ep": 4}, receive_factor=1.2, moe={"jitter": 0.1}),
        Case(
            name="ep4 in two steps, top-3 by probability",
            ranks=4,
            parallel={"ep": 4, "hierarchical_ranks": 2},
            moe={"top_k": 3, "capacity_factor": 0.7, "drop_policy": "probability", "aux_loss_scope": "sequence"},
            kernels="portable",
        ),
        Case(name="ep4 in two steps, fp16", ranks=4, parallel={"ep": 4, "hierarchical_ranks": 2}, precision="fp16"),
    )
}
# of these, the rows that experts see are looked at too
DISPATCHED = ("ep2 x etp2, bound", "ep4 in two steps, bound")
# by name, what each is bit for bit
TWINS = {"ep4 in two steps, bound": "ep4, bound"}
for _name, _how in (
    ("ep4 in two steps, bound", "copies"),
    ("ep4 in two steps, bound", "sums"),
    ("ep4 in two steps, top-3 by probability", "copies"),
    ("ep4 in two steps, top-3 by probability", "sums"),
    ("ep4 in two steps, fp16", "copies"),
    ("ep4 in two steps, fp16", "sums"),
    ("ep4 in two steps, int8 wire, bound", "copies"),
    ("ep4 in two steps, int8 wire, bound", "sums"),
):
    CASES[f"{_name}, {_how}"] = replace(CASES[_name], name=f"{_name}, {_how}", dedup=_how)
    if _how == "copies" and CASES[_name].wire is None:
        TWINS[f"{_name}, {_how}"] = _name
for _name, _chunks in (
    ("ep2", 2),
    ("ep2, top-1", 4),
    ("ep2 x etp2, bound", 2),
    ("tp2, ep2 x edp2, capacity", 2),
    ("ep4 in two steps, bound", 2),
):
    TWINS[f"{_name}, {_chunks} chunks"] = _name
    CASES[f"{_name}, {_chunks} chunks"] = replace(CASES[_name], name=f"{_name}, {_chunks} chunks", chunks=_chunks)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What goes into the whole layer, and the gradient of its output."""

    x_UD: F64
    dy_UD: F64
    params: dict[str, F64]


def data(case: Case, routing: str) -> Data:
    """In fp32's numbers, so that rounding is no part of the comparison."""
    generator = np.random.default_rng(5)

    def normal(*shape: int) -> F64:
        return generator.standard_normal(shape).astype(np.float32).astype(np.float64)

    tokens, E = case.num_tokens * case.ranks, NUM_EXPERTS
    bias = 0.1 * normal(E)
    if routing == SKEWED:
        bias[5], bias[0] = 16.0, -16.0
    params = {
        "router.weight": normal(E, HIDDEN),
        "router.bias": bias.astype(np.float32).astype(np.float64),
        "experts.w13": normal(E, HIDDEN, 2 * FFN) * 0.25,
        "experts.w2": normal(E, FFN, HIDDEN) * 0.5,
    }
    if case.moe_config.expert_bias:
        params |= {"experts.w13_bias": normal(E, 2 * FFN), "experts.w2_bias": normal(E, HIDDEN)}
    return Data(x_UD=normal(tokens, HIDDEN), dy_UD=normal(tokens, HIDDEN), params=params)


def own_tokens(case: Case, rank: int) -> NDArray[np.int32]:
    """The rank's rows of the tokens of all."""
    return token_places(case.mesh, rank, case.sequences, case.seq_len)


def rank_of_token(case: Case) -> I64:
    """Who has each token: (U,)."""
    rank_U = np.full(case.num_tokens * case.ranks, -1)
    for rank in range(case.ranks):
        rank_U[own_tokens(case, rank)] = rank
    return rank_U


def own_weight(name: str, here: Coordinates, mesh: Mesh) -> tuple[Any, ...] | None:
    """The index of a rank's part of a weight; None if it holds none."""
    if not name.startswith("experts."):
        return (slice(None),)
    local, width = NUM_EXPERTS // mesh.ep, FFN // mesh.etp
    experts = np.arange(here.ep * local, (here.ep + 1) * local)
    columns = np.arange(here.etp * width, (here.etp + 1) * width)
    gate_up = np.concatenate([columns, FFN + columns])
    match name.removeprefix("experts."):
        case "w13":
            return np.ix_(experts, np.arange(HIDDEN), gate_up)
        case "w2":
            return np.ix_(experts, columns, np.arange(HIDDEN))
        case "w13_bias":
            return np.ix_(experts, gate_up)
        case _:
            return np.ix_(experts, np.arange(HIDDEN)) if here.etp == 0 else None


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one process would see. `figures`: balance and z loss."""

    output: MoEOutput
    balance: float
    z: float
    dx_UD: F64
    grads: dict[str, F64]


def expected(case: Case, routing: str, noise_UD: F64 | None = None) -> Expected:
    """The oracle's answer, with the assignments turned away that have no room where they go."""
    given, moe, batch = data(case, routing), case.moe_config, case.sequences * case.mesh.dp
    everything = moe_layer(given.x_UD, given.params, moe, noise_UD)
    admitted_N = within_bound(case, everything.routing.expert_TK)
    wire = WIRES[case.wire]
    output = moe_layer(given.x_UD, given.params, moe, noise_UD, admitted_N, wire)
    logits = output.routing.logits_TE
    d_prob = BALANCE * balance_loss_vjp([output.routing], moe, batch)[0]
    dx_UD, grads = moe_layer_vjp(
        given.dy_UD, d_prob, Z * z_loss_vjp(logits), given.x_UD, given.params, moe, noise_UD, admitted_N, wire
    )
    balance = balance_loss([output.routing], moe, batch)
    return Expected(output=output, balance=balance, z=z_loss(logits), dx_UD=dx_UD, grads=grads)


def receive_rows(case: Case) -> int | None:
    """Room of a rank for rows of its ep group; None if whatever comes has room."""
    if case.receive_factor is None:
        return None
    return int(np.ceil(case.receive_factor * case.num_tokens * case.moe_config.top_k))


def within_bound(case: Case, expert_UK: I64) -> Flags:
    """Whether an assignment finds room: one by one, by rank, then expert, then token."""
    mesh, room = case.mesh, receive_rows(case)
    expert_N = expert_UK.reshape(-1)
    admitted_N = np.ones(expert_N.size, np.bool_)
    rank_N = np.repeat(rank_of_token(case), expert_UK.shape[1])
    filled: dict[tuple[int, int, int], int] = {}
    for n in np.lexsort((expert_N, rank_N)):
        here = mesh.coordinates(int(rank_N[n]))
        receiver = (here.edp, int(expert_N[n]) // (NUM_EXPERTS // mesh.ep), here.etp)
        admitted_N[n] = room is None or filled.get(receiver, 0) < room
        filled[receiver] = filled.get(receiver, 0) + int(admitted_N[n])
    return admitted_N


def crossing(case: Case, output: MoEOutput) -> NDArray[np.int64]:
    """Tokens of each rank that have experts in each node: (W, O)."""
    size = case.parallel["hierarchical_ranks"]
    expert_N, rank_U = output.routing.expert_TK.reshape(-1), rank_of_token(case)
    token_M = output.dispatch.assignment_M // case.moe_config.top_k
    node_M = expert_N[output.dispatch.assignment_M] * case.mesh.ep // NUM_EXPERTS // size
    found_WO = np.zeros((case.ranks, case.mesh.ep // size), np.int64)
    for token, node in set(zip(token_M.tolist(), node_M.tolist(), strict=True)):
        found_WO[rank_U[token], node] += 1
    return found_WO


def rows_between(case: Case, output: MoEOutput) -> NDArray[np.int64]:
    """Rows that each rank sends to each rank: (W, W)."""
    mesh = case.mesh
    rows_WW = np.zeros((case.ranks, case.ranks), np.int64)
    expert_N, rank_U = output.routing.expert_TK.reshape(-1), rank_of_token(case)
    for n in output.dispatch.assignment_M:
        rank = int(rank_U[n // case.moe_config.top_k])
        peer = mesh.group(("ep",), rank)[int(expert_N[n]) // (NUM_EXPERTS // mesh.ep)]
        rows_WW[rank, peer] += 1
    return rows_WW
