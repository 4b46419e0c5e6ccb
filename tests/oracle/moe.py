"""The Mixture-of-Experts layer: route, dispatch, experts, combine, plus the shared expert that every token visits.

T tokens, D hidden, E experts, K top-k, N = T*K assignments, M assignments kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ascend_moe_train.model.config import MoEConfig
from tests.oracle.arrays import F64, Flags, in_float64
from tests.oracle.dispatch import Dispatch, dispatch
from tests.oracle.experts import grouped_experts, grouped_experts_vjp
from tests.oracle.ffn import swiglu, swiglu_vjp
from tests.oracle.router import Routing, route, route_vjp

RowsWire = Callable[[F64], F64]


def as_they_are(rows_MD: F64) -> F64:
    """A wire that keeps all bits."""
    return rows_MD


@dataclass(frozen=True, kw_only=True)
class MoEOutput:
    """The layer's output and what the losses and the reports need."""

    y_TD: F64
    routing: Routing
    dispatch: Dispatch


@in_float64
def moe_layer(
    x_TD: F64,
    params: Mapping[str, F64],
    moe: MoEConfig,
    noise_TD: F64 | None = None,
    admitted_N: Flags | None = None,
    wire: RowsWire = as_they_are,
) -> MoEOutput:
    """y_t = sum over kept slots k of weight_tk * expert_tk(x_t), + shared(x_t).

    `params`: router.weight (E, D), maybe router.bias and router.balance_bias (E), experts.w13 (E, D, 2F), experts.w2
    (E, F, D), maybe their biases, and with a shared expert shared.w13.weight (2Fs, D), shared.w2.weight (D, Fs).
    `admitted_N`: see `dispatch`. `wire` is what rows are on their way to an expert, and on their way back.
    """
    routing = route(*_routed(x_TD, params, moe, noise_TD))
    plan = dispatch(routing.expert_TK, routing.weight_TK, moe, admitted_N)
    token_M = plan.assignment_M // moe.top_k
    weight_M = routing.weight_TK.reshape(-1)[plan.assignment_M]
    out_MD = wire(grouped_experts(wire(x_TD[token_M]), plan.count_E, _of_experts(params), moe))
    y_TD = np.zeros_like(x_TD)
    np.add.at(y_TD, token_M, weight_M[:, None] * out_MD)
    if moe.shared_ffn:
        y_TD += swiglu(x_TD, params["shared.w13.weight"], params["shared.w2.weight"])
    return MoEOutput(y_TD=y_TD, routing=routing, dispatch=plan)


@in_float64
def moe_layer_vjp(
    d_y_TD: F64,
    d_prob_TE: F64,
    d_logits_TE: F64,
    x_TD: F64,
    params: Mapping[str, F64],
    moe: MoEConfig,
    noise_TD: F64 | None = None,
    admitted_N: Flags | None = None,
    wire: RowsWire = as_they_are,
) -> tuple[F64, dict[str, F64]]:
    """Return (d_x_TD, gradients named as `params`). A dropped assignment's gate weight and row get no gradient.
    Gradients of rows go through the same wire, and know nothing of its rounding."""
    forward = moe_layer(x_TD, params, moe, noise_TD, admitted_N, wire)
    routing, plan = forward.routing, forward.dispatch
    token_M = plan.assignment_M // moe.top_k
    weight_M = routing.weight_TK.reshape(-1)[plan.assignment_M]
    x_MD = wire(x_TD[token_M])
    out_MD = wire(grouped_experts(x_MD, plan.count_E, _of_experts(params), moe))

    d_weight_N = np.zeros(routing.weight_TK.size)
    d_weight_N[plan.assignment_M] = (d_y_TD[token_M] * out_MD).sum(axis=1)
    d_rows_MD, of_experts = grouped_experts_vjp(
        wire(weight_M[:, None] * d_y_TD[token_M]), x_MD, plan.count_E, _of_experts(params), moe
    )
    d_input, d_weight = route_vjp(
        d_weight_N.reshape(-1, moe.top_k), d_prob_TE, d_logits_TE, *_routed(x_TD, params, moe, noise_TD)
    )
    width = x_TD.shape[1]
    d_x_TD = d_input[:, :width]
    np.add.at(d_x_TD, token_M, wire(d_rows_MD))
    grads = {f"experts.{name}": grad for name, grad in of_experts.items()} | {"router.weight": d_weight[:, :width]}
    if moe.router_bias:
        grads["router.bias"] = d_weight[:, width]
    if moe.shared_ffn:
        d_shared_TD, grads["shared.w13.weight"], grads["shared.w2.weight"] = swiglu_vjp(
            d_y_TD, x_TD, params["shared.w13.weight"], params["shared.w2.weight"]
        )
        d_x_TD = d_x_TD + d_shared_TD
    return d_x_TD, grads


def _of_experts(params: Mapping[str, F64]) -> dict[str, F64]:
    return {name.removeprefix("experts."): weight for name, weight in params.items() if name.startswith("experts.")}


def _routed(
    x_TD: F64, params: Mapping[str, F64], moe: MoEConfig, noise_TD: F64 | None
) -> tuple[F64, F64, MoEConfig, F64 | None, F64 | None]:
    """What the router computes with: a bias of the logits is the weight of an input that is always 1."""
    weight_ED = params["router.weight"]
    if moe.router_bias:
        ones_T1 = np.ones((len(x_TD), 1))
        weight_ED = np.concatenate([weight_ED, params["router.bias"][:, None]], axis=1)
        x_TD = np.concatenate([x_TD, ones_T1], axis=1)
        noise_TD = None if noise_TD is None else np.concatenate([noise_TD, ones_T1], axis=1)
    return x_TD, weight_ED, moe, noise_TD, params.get("router.balance_bias")
