"""SwiGLU feed-forward (Shazeer, 2020). T tokens, D hidden, F ffn; w13 holds the gate rows, then the up rows."""

import numpy as np

from ascend_moe_train.model.config import ClampedSwiGLUConfig
from tests.oracle.arrays import F64, in_float64


@in_float64
def swiglu(x_TD: F64, w13: F64, w2: F64) -> F64:
    """(silu(x gate^T) * (x up^T)) w2^T, with w13 (2F, D) and w2 (D, F)."""
    return gated(x_TD @ w13.T) @ w2.T


@in_float64
def swiglu_vjp(d_y_TD: F64, x_TD: F64, w13: F64, w2: F64) -> tuple[F64, F64, F64]:
    """Return (d_x_TD, d_w13, d_w2)."""
    h_T2F = x_TD @ w13.T
    d_h_T2F = gated_vjp(d_y_TD @ w2, h_T2F)
    return d_h_T2F @ w13, d_h_T2F.T @ x_TD, d_y_TD.T @ gated(h_T2F)


@in_float64
def gated(h_T2F: F64) -> F64:
    """Return silu(gate) * up (T, F) from h = [gate, up]; silu(a) = a * sigmoid(a)."""
    gate_TF, up_TF = np.split(h_T2F, 2, axis=1)
    y_TF: F64 = gate_TF * sigmoid(gate_TF) * up_TF
    return y_TF


@in_float64
def gated_vjp(d_y_TF: F64, h_T2F: F64) -> F64:
    """Return d_h_T2F; d silu(a)/da = s + a s (1 - s), where s = sigmoid(a)."""
    gate_TF, up_TF = np.split(h_T2F, 2, axis=1)
    s_TF = sigmoid(gate_TF)
    d_gate_TF = d_y_TF * up_TF * (s_TF + gate_TF * s_TF * (1.0 - s_TF))
    d_up_TF = d_y_TF * gate_TF * s_TF
    return np.concatenate([d_gate_TF, d_up_TF], axis=1)


@in_float64
def clamped_gated(h_T2F: F64, clamp: ClampedSwiGLUConfig) -> F64:
    """Return (up + 1) * g * sigmoid(alpha * g) (T, F), with g = min(gate, limit) and up within [-limit, limit]."""
    gate_TF, up_TF = _clamped(h_T2F, clamp)
    y_TF: F64 = (up_TF + 1.0) * gate_TF * sigmoid(clamp.alpha * gate_TF)
    return y_TF


@in_float64
def clamped_gated_vjp(d_y_TF: F64, h_T2F: F64, clamp: ClampedSwiGLUConfig) -> F64:
    """Return d_h_T2F: d(g s)/dg = s + alpha g s (1 - s), where s = sigmoid(alpha g); nothing flows where it clamps."""
    gate_TF, up_TF = _clamped(h_T2F, clamp)
    raw_gate_TF, raw_up_TF = np.split(h_T2F, 2, axis=1)
    s_TF = sigmoid(clamp.alpha * gate_TF)
    d_gate_TF = d_y_TF * (up_TF + 1.0) * (s_TF + clamp.alpha * gate_TF * s_TF * (1.0 - s_TF))
    d_up_TF = d_y_TF * gate_TF * s_TF
    return np.concatenate([d_gate_TF * (raw_gate_TF < clamp.limit), d_up_TF * (abs(raw_up_TF) < clamp.limit)], axis=1)


def _clamped(h_T2F: F64, clamp: ClampedSwiGLUConfig) -> tuple[F64, F64]:
    gate_TF, up_TF = np.split(h_T2F, 2, axis=1)
    return np.minimum(gate_TF, clamp.limit), np.clip(up_TF, -clamp.limit, clamp.limit)


@in_float64
def sigmoid(x: F64) -> F64:
    """1 / (1 + exp(-x)), exact to the last bits at both ends and without overflow."""
    s: F64 = np.exp(-np.logaddexp(0.0, -x))
    return s
