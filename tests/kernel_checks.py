"""Inputs for every kernel, and what the fp64 oracles make of them. Shape letters: see model/kernels/protocol.py."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.model.config import ClampedSwiGLUConfig, MoEConfig, RopeConfig
from tests.oracle.arrays import logsumexp
from tests.oracle.attention import attention, attention_vjp
from tests.oracle.dispatch import Dispatch, capacity, dispatch
from tests.oracle.experts import activated, activated_vjp
from tests.oracle.ffn import clamped_gated, clamped_gated_vjp, gated, gated_vjp
from tests.oracle.loss import NOT_COUNTED, cross_entropy_vjp
from tests.oracle.norm import rms_norm, rms_norm_vjp
from tests.oracle.rope import apply_rope, apply_rope_vjp, rope_angles

Array = NDArray[Any]
EPS = 1e-5
WINDOW = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, and how assignments are spread over experts."""

    name: str
    B: int = 2
    S: int = 70
    H: int = 4
    G: int = 2
    Z: int = 6
    D: int = 19
    F: int = 13
    E: int = 5
    K: int = 2
    V: int = 33
    experts: tuple[int, ...] = (0, 1, 3, 4)
    documents: int = 3
    capacity_factor: float | None = None
    by_probability: bool = False

    @property
    def T(self) -> int:
        return self.B * self.S

    @property
    def moe(self) -> MoEConfig:
        return MoEConfig(
            num_experts=self.E,
            top_k=self.K,
            ffn=1,
            capacity_factor=self.capacity_factor,
            drop_policy="probability" if self.by_probability else "position",
        )

    @property
    def capacity(self) -> int | None:
        return None if self.capacity_factor is None else capacity(self.moe, self.T)

    @property
    def rows(self) -> int:
        return self.T * self.K if self.capacity is None else min(self.T * self.K, self.E * self.capacity)


CASES = {
    case.name: case
    for case in (
        Case(name="odd sizes, idle expert"),
        Case(name="one token", B=1, S=1, H=1, G=1, Z=2, D=1, F=1, E=1, K=1, V=1, experts=(0,), documents=1),
        Case(name="one expert", B=1, S=131, H=2, G=1, Z=16, D=64, F=32, experts=(3,), documents=1, capacity_factor=2.0),
        Case(name="drops", S=33, H=3, G=3, Z=34, D=40, F=32, E=3, experts=(0, 1, 1), capacity_factor=0.5),
        Case(name="drops by probability", S=33, H=3, G=1, D=16, F=48, capacity_factor=0.5, by_probability=True),
    )
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One kernel's inputs and what it must give: the result, and the gradients of sum(result * weight)."""

    inputs: tuple[Array, ...]
    result: Array
    weight: Array
    gradients: tuple[Array, ...]
    wrt: tuple[int, ...]
    constants: tuple[Any, ...] = field(default=())


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Array:
    """fp32 numbers of a normal distribution."""
    return np.random.default_rng(seed).normal(0.0, scale, shape).astype(np.float32)


def check_matmul(case: Case) -> Check:
    x, w, dy = normal((case.T, case.D), 1), normal((case.F, case.D), 2), normal((case.T, case.F), 3)
    x64, w64, dy64 = x.astype(np.float64), w.astype(np.float64), dy.astype(np.float64)
    return Check(inputs=(x, w), result=x64 @ w64.T, weight=dy, gradients=(dy64 @ w64, dy64.T @ x64), wrt=(0, 1))


def check_embed(case: Case) -> Check:
    token = np.random.default_rng(4).integers(0, case.V, case.T).astype(np.int32)
    w, dy = normal((case.V, case.D), 5), normal((case.T, case.D), 6)
    dw = np.zeros(w.shape)
    np.add.at(dw, token, dy.astype(np.float64))
    return Check(inputs=(token, w), result=w[token], weight=dy, gradients=(dw,), wrt=(1,))


def check_rms_norm(case: Case) -> Check:
    x, w, dy = normal((case.T, case.D), 7), normal((case.D,), 8), normal((case.T, case.D), 9)
    return Check(
        inputs=(x, w),
        constants=(EPS,),
        result=rms_norm(x, w, EPS),
        weight=dy,
        gradients=rms_norm_vjp(dy, x, w, EPS),
        wrt=(0, 1),
    )


def segments(case: Case) -> Array:
    return np.sort(np.random.default_rng(10).integers(0, case.documents, (case.B, case.S)), axis=1).astype(np.int32)


def check_rope(case: Case) -> Check:
    x, dy = normal((case.B, case.S, case.H, case.Z), 11), normal((case.B, case.S, case.H, case.Z), 12)
    position = np.tile(np.arange(case.S), (case.B, 1))
    angle = rope_angles(position, case.Z, RopeConfig())
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return Check(
        inputs=(x, cos, sin), result=apply_rope(x, angle), weight=dy, gradients=(apply_rope_vjp(dy, angle),), wrt=(0,)
    )


def check_attention(case: Case) -> Check:
    q, dy = normal((case.B, case.S, case.H, case.Z), 13), normal((case.B, case.S, case.H, case.Z), 14)
    k, v = normal((case.B, case.S, case.G, case.Z), 15), normal((case.B, case.S, case.G, case.Z), 16)
    inputs = (q, k, v, segments(case))
    gradients = attention_vjp(dy, *inputs)[:3]
    return Check(inputs=inputs, result=attention(*inputs), weight=dy, gradients=gradients, wrt=(0, 1, 2))


def check_attention_to_a_window(case: Case) -> Check:
    """With sinks, and values that are wider than keys."""
    Y = case.Z + 5
    q, dy = normal((case.B, case.S, case.H, case.Z), 30), normal((case.B, case.S, case.H, Y), 31)
    k, v = normal((case.B, case.S, case.G, case.Z), 32), normal((case.B, case.S, case.G, Y), 33)
    segment, sink = segments(case), normal((case.H,), 34)
    return Check(
        inputs=(q, k, v, sink, segment),
        constants=(WINDOW,),
        result=attention(q, k, v, segment, WINDOW, sink),
        weight=dy,
        gradients=attention_vjp(dy, q, k, v, segment, WINDOW, sink),
        wrt=(0, 1, 2, 3),
    )


def check_split(case: Case) -> Check:
    """The parts joined again in the opposite order."""
    sizes = (case.D, 1, case.F)
    x, dy = normal((case.B, case.S, sum(sizes)), 35), normal((case.B, case.S, sum(sizes)), 36)
    first, second = case.D, case.D + 1
    result = np.concatenate((x[..., second:], x[..., first:second], x[..., :first]), -1)
    dx = np.concatenate((dy[..., case.F + 1 :], dy[..., case.F : case.F + 1], dy[..., : case.F]), -1)
    return Check(inputs=(x,), constants=(sizes,), result=result, weight=dy, gradients=(dx,), wrt=(0,))


def check_swiglu(case: Case) -> Check:
    h, dy = normal((case.T, 2 * case.F), 17, scale=4), normal((case.T, case.F), 18)
    return Check(inputs=(h,), result=gated(h), weight=dy, gradients=(gated_vjp(dy, h),), wrt=(0,))


def check_clamped_swiglu(case: Case) -> Check:
    clamp = ClampedSwiGLUConfig(alpha=1.7, limit=3.0)
    h, dy = normal((case.T, 2 * case.F), 38, scale=4), normal((case.T, case.F), 39)
    return Check(
        inputs=(h,),
        constants=(clamp.alpha, clamp.limit),
        result=clamped_gated(h, clamp),
        weight=dy,
        gradients=(clamped_gated_vjp(dy, h, clamp),),
        wrt=(0,),
    )


def check_swiglu_matmul(case: Case) -> Check:
    h, w, dy = normal((case.T, 2 * case.F), 40), normal((case.D, case.F), 41), normal((case.T, case.D), 42)
    w64, dy64 = w.astype(np.float64), dy.astype(np.float64)
    gradients = (gated_vjp(dy64 @ w64, h), dy64.T @ gated(h))
    return Check(inputs=(h, w), result=gated(h) @ w64.T, weight=dy, gradients=gradients, wrt=(0, 1))


def check_swiglu_grouped_matmul(case: Case, clamp: ClampedSwiGLUConfig | None = None) -> Check:
    h, w, dy = (
        normal((case.rows, 2 * case.F), 43),
        normal((case.E, case.F, case.D), 44),
        normal((case.rows, case.D), 45),
    )
    moe = case.moe.model_copy(update={"clamped_swiglu": clamp})
    count, w64 = dispatched(case).count_E, w.astype(np.float64)
    result, dh, dw = np.zeros(dy.shape), np.zeros(h.shape), np.zeros(w.shape)
    for e, end in enumerate(np.cumsum(count).tolist()):
        rows = slice(end - count[e], end)
        y, dy64 = activated(h[rows].astype(np.float64), moe), dy[rows].astype(np.float64)
        result[rows], dw[e] = y @ w64[e], y.T @ dy64
        dh[rows] = activated_vjp(dy64 @ w64[e].T, h[rows].astype(np.float64), moe)
    return Check(
        inputs=(h, w, count.astype(np.int32)),
        constants=(None if clamp is None else (clamp.alpha, clamp.limit),),
        result=result,
        weight=dy,
        gradients=(dh, dw),
        wrt=(0, 1),
    )


def check_clamped_swiglu_grouped_matmul(case: Case) -> Check:
    return check_swiglu_grouped_matmul(case, ClampedSwiGLUConfig(alpha=1.7, limit=1.1))


def routing(case: Case) -> tuple[Array, Array]:
    """Experts and gates of every assignment; gates have many ties."""
    generator = np.random.default_rng(19)
    expert = generator.choice(np.array(case.experts), (case.T, case.K)).astype(np.int32)
    return expert, (generator.integers(1, 9, (case.T, case.K)) / 8).astype(np.float32)


@cache
def dispatched(case: Case) -> Dispatch:
    return dispatch(*routing(case), case.moe)


def places(case: Case) -> tuple[Array, Array]:
    """row_TK and source_R of the protocol."""
    kept = dispatched(case).assignment_M
    row, source = np.full(case.T * case.K, -1, np.int32), np.full(case.rows, -1, np.int32)
    row[kept] = np.arange(len(kept))
    source[: len(kept)] = kept
    return row.reshape(case.T, case.K), source


def check_permute(case: Case) -> Check:
    x, dy = normal((case.T, case.D), 20), normal((case.rows, case.D), 21)
    kept = dispatched(case).assignment_M
    result, dx = np.zeros((case.rows, case.D)), np.zeros((case.T, case.D))
    result[: len(kept)] = x[kept // case.K]
    np.add.at(dx, kept // case.K, dy[: len(kept)].astype(np.float64))
    return Check(inputs=(x, *places(case)), result=result, weight=dy, gradients=(dx,), wrt=(0,))


def check_combine(case: Case) -> Check:
    y, dout = normal((case.rows, case.D), 22), normal((case.T, case.D), 23)
    gate, kept = routing(case)[1], dispatched(case).assignment_M
    token, y64 = kept // case.K, y[: len(kept)].astype(np.float64)
    gate_M1 = gate.reshape(-1)[kept][:, None].astype(np.float64)
    result, dy, dgate = np.zeros((case.T, case.D)), np.zeros(y.shape), np.zeros(case.T * case.K)
    np.add.at(result, token, gate_M1 * y64)
    dy[: len(kept)] = gate_M1 * dout[token]
    dgate[kept] = (y64 * dout[token]).sum(1)
    gradients = (dy, dgate.reshape(gate.shape))
    return Check(inputs=(y, gate, *places(case)), result=result, weight=dout, gradients=gradients, wrt=(0, 1))


def check_grouped_matmul(case: Case) -> Check:
    x, w, dy = normal((case.rows, case.D), 24), normal((case.E, case.D, case.F), 25), normal((case.rows, case.F), 26)
    count = dispatched(case).count_E
    result, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for e, end in enumerate(np.cumsum(count).tolist()):
        rows = slice(end - count[e], end)
        x64, w64, dy64 = x[rows].astype(np.float64), w[e].astype(np.float64), dy[rows].astype(np.float64)
        result[rows], dx[rows], dw[e] = x64 @ w64, dy64 @ w64.T, x64.T @ dy64
    return Check(inputs=(x, w, count.astype(np.int32)), result=result, weight=dy, gradients=(dx, dw), wrt=(0, 1))


def check_add_by_expert(case: Case) -> Check:
    x, b, dy = normal((case.rows, case.F), 35), normal((case.E, case.F), 36), normal((case.rows, case.F), 37)
    count = dispatched(case).count_E
    expert = np.repeat(np.arange(case.E), count)
    result, db = x.astype(np.float64), np.zeros(b.shape)
    result[: len(expert)] += b[expert]
    np.add.at(db, expert, dy[: len(expert)].astype(np.float64))
    return Check(inputs=(x, b, count.astype(np.int32)), result=result, weight=dy, gradients=(dy, db), wrt=(0, 1))


def check_cross_entropy(case: Case) -> Check:
    logits, dloss = normal((case.T, case.V), 27, scale=3), normal((case.T,), 28)
    target: Array = np.random.default_rng(29).integers(NOT_COUNTED, case.V, case.T).astype(np.int32)
    chosen = np.take_along_axis(logits, np.maximum(target, 0)[:, None], 1)[:, 0]
    result = (logsumexp(logits) - chosen) * (target != NOT_COUNTED)
    counted = max(int((target != NOT_COUNTED).sum()), 1)
    gradient = cross_entropy_vjp(logits, target) * counted * dloss[:, None]
    return Check(inputs=(logits, target), result=result, weight=dloss, gradients=(gradient,), wrt=(0,))


CHECKS: dict[str, Callable[[Case], Check]] = {
    "matmul": check_matmul,
    "embed": check_embed,
    "rms_norm": check_rms_norm,
    "rope": check_rope,
    "attention": check_attention,
    "attention_to_a_window": check_attention_to_a_window,
    "split": check_split,
    "swiglu": check_swiglu,
    "clamped_swiglu": check_clamped_swiglu,
    "swiglu_matmul": check_swiglu_matmul,
    "swiglu_grouped_matmul": check_swiglu_grouped_matmul,
    "clamped_swiglu_grouped_matmul": check_clamped_swiglu_grouped_matmul,
    "permute": check_permute,
    "combine": check_combine,
    "grouped_matmul": check_grouped_matmul,
    "add_by_expert": check_add_by_expert,
    "cross_entropy": check_cross_entropy,
}
