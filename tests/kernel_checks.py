"""What the fp64 oracles make of the inputs of selftest/kernel_cases.py. Shape letters: model/kernels/protocol.py."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from ascend_moe_train.model.config import ClampedSwiGLUConfig, RopeConfig
from ascend_moe_train.selftest.kernel_cases import (
    CLAMP,
    EPS,
    GROUPED_CLAMP,
    INPUTS,
    WINDOW,
    Array,
    Case,
    Inputs,
    Placed,
    routing,
)
from tests.oracle.arrays import logsumexp
from tests.oracle.attention import attention, attention_vjp
from tests.oracle.dispatch import Dispatch, dispatch
from tests.oracle.experts import activated, activated_vjp
from tests.oracle.ffn import clamped_gated, clamped_gated_vjp, gated, gated_vjp
from tests.oracle.loss import NOT_COUNTED, cross_entropy_vjp
from tests.oracle.norm import rms_norm, rms_norm_vjp
from tests.oracle.rope import apply_rope, apply_rope_vjp, rope_angles

Expected = tuple[Array, tuple[Array, ...]]
"""A result, and the gradients of sum(result * weight) of the inputs `wrt`."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One kernel's inputs and what it must give."""

    given: Inputs
    result: Array
    gradients: tuple[Array, ...]


@cache
def dispatched(case: Case) -> Dispatch:
    return dispatch(*routing(case), case.moe)


def places(case: Case) -> Placed:
    """As `Kernels.sort_by_expert` must give them."""
    kept = dispatched(case).assignment_M
    row, source = np.full(case.T * case.K, -1, np.int32), np.full(case.rows, -1, np.int32)
    row[kept] = np.arange(len(kept))
    source[: len(kept)] = kept
    return Placed(row.reshape(case.T, case.K), source, dispatched(case).count_E.astype(np.int32))


def expect_matmul(case: Case, given: Inputs) -> Expected:
    x, w, dy = (each.astype(np.float64) for each in (*given.arrays, given.weight))
    return x @ w.T, (dy @ w, dy.T @ x)


def expect_embed(case: Case, given: Inputs) -> Expected:
    token, w = given.arrays
    dw = np.zeros(w.shape)
    np.add.at(dw, token, given.weight.astype(np.float64))
    return w[token], (dw,)


def expect_rms_norm(case: Case, given: Inputs) -> Expected:
    x, w = given.arrays
    return rms_norm(x, w, EPS), rms_norm_vjp(given.weight, x, w, EPS)


def expect_rope(case: Case, given: Inputs) -> Expected:
    angle = rope_angles(np.tile(np.arange(case.S), (case.B, 1)), case.Z, RopeConfig())
    return apply_rope(given.arrays[0], angle), (apply_rope_vjp(given.weight, angle),)


def expect_attention(case: Case, given: Inputs) -> Expected:
    q, k, v, segment = given.arrays
    return attention(q, k, v, segment), attention_vjp(given.weight, q, k, v, segment)[:3]


def expect_attention_to_a_window(case: Case, given: Inputs) -> Expected:
    q, k, v, sink, segment = given.arrays
    return (
        attention(q, k, v, segment, WINDOW, sink),
        attention_vjp(given.weight, q, k, v, segment, WINDOW, sink),
    )


def expect_split(case: Case, given: Inputs) -> Expected:
    (x,), dy = given.arrays, given.weight
    first, second = case.D, case.D + 1
    result = np.concatenate((x[..., second:], x[..., first:second], x[..., :first]), -1)
    dx = np.concatenate((dy[..., case.F + 1 :], dy[..., case.F : case.F + 1], dy[..., : case.F]), -1)
    return result, (dx,)


def expect_swiglu(case: Case, given: Inputs) -> Expected:
    (h,) = given.arrays
    return gated(h), (gated_vjp(given.weight, h),)


def expect_clamped_swiglu(case: Case, given: Inputs) -> Expected:
    (h,) = given.arrays
    return clamped_gated(h, CLAMP), (clamped_gated_vjp(given.weight, h, CLAMP),)


def expect_swiglu_matmul(case: Case, given: Inputs) -> Expected:
    h, w = given.arrays
    w64, dy64 = w.astype(np.float64), given.weight.astype(np.float64)
    return gated(h) @ w64.T, (gated_vjp(dy64 @ w64, h), dy64.T @ gated(h))


def experts_of(case: Case) -> Iterator[tuple[int, slice]]:
    """Each expert and its rows."""
    count = dispatched(case).count_E
    for e, end in enumerate(np.cumsum(count).tolist()):
        yield e, slice(end - count[e], end)


def expect_swiglu_grouped_matmul(case: Case, given: Inputs, clamp: ClampedSwiGLUConfig | None = None) -> Expected:
    h, w, dy = given.arrays[0], given.arrays[1].astype(np.float64), given.weight
    moe = case.moe.model_copy(update={"clamped_swiglu": clamp})
    result, dh, dw = np.zeros(dy.shape), np.zeros(h.shape), np.zeros(w.shape)
    for e, rows in experts_of(case):
        y, dy64 = activated(h[rows].astype(np.float64), moe), dy[rows].astype(np.float64)
        result[rows], dw[e] = y @ w[e], y.T @ dy64
        dh[rows] = activated_vjp(dy64 @ w[e].T, h[rows].astype(np.float64), moe)
    return result, (dh, dw)


def expect_clamped_swiglu_grouped_matmul(case: Case, given: Inputs) -> Expected:
    return expect_swiglu_grouped_matmul(case, given, GROUPED_CLAMP)


def expect_permute(case: Case, given: Inputs) -> Expected:
    x, kept = given.arrays[0], dispatched(case).assignment_M
    result, dx = np.zeros((case.rows, case.D)), np.zeros((case.T, case.D))
    result[: len(kept)] = x[kept // case.K]
    np.add.at(dx, kept // case.K, given.weight[: len(kept)].astype(np.float64))
    return result, (dx,)


def expect_combine(case: Case, given: Inputs) -> Expected:
    y, gate = given.arrays[:2]
    dout, kept = given.weight, dispatched(case).assignment_M
    token, y64 = kept // case.K, y[: len(kept)].astype(np.float64)
    gate_M1 = gate.reshape(-1)[kept][:, None].astype(np.float64)
    result, dy, dgate = np.zeros((case.T, case.D)), np.zeros(y.shape), np.zeros(case.T * case.K)
    np.add.at(result, token, gate_M1 * y64)
    dy[: len(kept)] = gate_M1 * dout[token]
    dgate[kept] = (y64 * dout[token]).sum(1)
    return result, (dy, dgate.reshape(gate.shape))


def expect_grouped_matmul(case: Case, given: Inputs) -> Expected:
    x, w, dy = (each.astype(np.float64) for each in (*given.arrays[:2], given.weight))
    result, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for e, rows in experts_of(case):
        result[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
    return result, (dx, dw)


def expect_add_by_expert(case: Case, given: Inputs) -> Expected:
    x, b = given.arrays[:2]
    result, db = x.astype(np.float64), np.zeros(b.shape)
    for e, rows in experts_of(case):
        result[rows] += b[e]
        db[e] = given.weight[rows].astype(np.float64).sum(0)
    return result, (given.weight, db)


def expect_cross_entropy(case: Case, given: Inputs) -> Expected:
    logits, target = given.arrays
    chosen = np.take_along_axis(logits, np.maximum(target, 0)[:, None], 1)[:, 0]
    result = (logsumexp(logits) - chosen) * (target != NOT_COUNTED)
    counted = max(int((target != NOT_COUNTED).sum()), 1)
    return result, (cross_entropy_vjp(logits, target) * counted * given.weight[:, None],)


EXPECTED: dict[str, Callable[[Case, Inputs], Expected]] = {
    "matmul": expect_matmul,
    "embed": expect_embed,
    "rms_norm": expect_rms_norm,
    "rope": expect_rope,
    "attention": expect_attention,
    "attention_to_a_window": expect_attention_to_a_window,
    "split": expect_split,
    "swiglu": expect_swiglu,
    "clamped_swiglu": expect_clamped_swiglu,
    "swiglu_matmul": expect_swiglu_matmul,
    "swiglu_grouped_matmul": expect_swiglu_grouped_matmul,
    "clamped_swiglu_grouped_matmul": expect_clamped_swiglu_grouped_matmul,
    "permute": expect_permute,
    "combine": expect_combine,
    "grouped_matmul": expect_grouped_matmul,
    "add_by_expert": expect_add_by_expert,
    "cross_entropy": expect_cross_entropy,
}


def check(name: str, case: Case) -> Check:
    """One kernel of INPUTS."""
    given = INPUTS[name](case, places(case))
    result, gradients = EXPECTED[name](case, given)
    return Check(given=given, result=result, gradients=gradients)
