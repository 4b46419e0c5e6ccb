"""Experts over rows sorted by expert.

M rows, D hidden, F ffn, E experts; expert e owns the next count_E[e] rows, which may be none. The weights are stored
for row-vector products, the transpose of a dense layer's: w13 (E, D, 2F) with gate columns then up, w2 (E, F, D), and
maybe biases w13_bias (E, 2F), w2_bias (E, D).
"""

from collections.abc import Iterator, Mapping

import numpy as np

from ascend_moe_train.model.config import MoEConfig
from tests.oracle.arrays import F64, I64, in_float64
from tests.oracle.ffn import clamped_gated, clamped_gated_vjp, gated, gated_vjp

Params = Mapping[str, F64]


@in_float64
def grouped_experts(x_MD: F64, count_E: I64, params: Params, moe: MoEConfig) -> F64:
    """Return y_MD: each row through its own expert. `params` are the weights above."""
    y_MD = np.zeros_like(x_MD)
    for e, rows in _rows_by_expert(count_E):
        h_M2F = x_MD[rows] @ params["w13"][e] + _bias(params, "w13_bias", e)
        y_MD[rows] = activated(h_M2F, moe) @ params["w2"][e] + _bias(params, "w2_bias", e)
    return y_MD


@in_float64
def grouped_experts_vjp(
    d_y_MD: F64, x_MD: F64, count_E: I64, params: Params, moe: MoEConfig
) -> tuple[F64, dict[str, F64]]:
    """Return (d_x_MD, gradients named as `params`); an expert without rows gets zeros."""
    d_x_MD, grads = np.zeros_like(x_MD), {name: np.zeros_like(weight) for name, weight in params.items()}
    for e, rows in _rows_by_expert(count_E):
        h_M2F = x_MD[rows] @ params["w13"][e] + _bias(params, "w13_bias", e)
        d_a_MF = d_y_MD[rows] @ params["w2"][e].T
        d_h_M2F = activated_vjp(d_a_MF, h_M2F, moe)
        d_x_MD[rows] = d_h_M2F @ params["w13"][e].T
        grads["w13"][e], grads["w2"][e] = x_MD[rows].T @ d_h_M2F, activated(h_M2F, moe).T @ d_y_MD[rows]
        if moe.expert_bias:
            grads["w13_bias"][e], grads["w2_bias"][e] = d_h_M2F.sum(axis=0), d_y_MD[rows].sum(axis=0)
    return d_x_MD, grads


def activated(h_M2F: F64, moe: MoEConfig) -> F64:
    """What the experts of a model make of the products with w13: (M, 2F) -> (M, F)."""
    return gated(h_M2F) if moe.clamped_swiglu is None else clamped_gated(h_M2F, moe.clamped_swiglu)


def activated_vjp(d_a_MF: F64, h_M2F: F64, moe: MoEConfig) -> F64:
    """Return d_h_M2F."""
    if moe.clamped_swiglu is None:
        return gated_vjp(d_a_MF, h_M2F)
    return clamped_gated_vjp(d_a_MF, h_M2F, moe.clamped_swiglu)


def _bias(params: Params, name: str, expert: int) -> F64 | float:
    return params[name][expert] if name in params else 0.0


def _rows_by_expert(count_E: I64) -> Iterator[tuple[int, slice]]:
    start = 0
    for e, count in enumerate(count_E.tolist()):
        yield e, slice(start, start + count)
        start += count
