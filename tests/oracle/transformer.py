"""The whole decoder: tokens and weights to loss parts, and the gradient of the total in every weight.

B batch, S sequence, T = B*S tokens, D hidden, H query heads, G key-value heads, Z head size, V vocabulary, L layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ascend_moe_train.model.config import ModelConfig
from tests.oracle.arrays import F64, I64, in_float64
from tests.oracle.attention import attention, attention_vjp
from tests.oracle.ffn import swiglu, swiglu_vjp
from tests.oracle.loss import cross_entropy, cross_entropy_vjp
from tests.oracle.moe import MoEOutput, moe_layer, moe_layer_vjp
from tests.oracle.norm import rms_norm, rms_norm_vjp
from tests.oracle.rope import apply_rope, apply_rope_vjp, rope_angles, rope_magnitude, score_factor
from tests.oracle.router import balance_loss, balance_loss_vjp, z_loss, z_loss_vjp

Params = Mapping[str, F64]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One batch. `targets_BS` -1 is not counted; segments are documents; `noise_TD` is the jitter, by layer number."""

    tokens_BS: I64
    targets_BS: I64
    segment_BS: I64
    position_BS: I64
    noise_TD: Mapping[int, F64]


def inputs(
    tokens_BS: I64,
    targets_BS: I64,
    segment_BS: I64 | None = None,
    position_BS: I64 | None = None,
    noise_TD: Mapping[int, F64] | None = None,
) -> Inputs:
    """Fill in the usual: one document per sequence, positions 0..S-1, no jitter."""
    return Inputs(
        tokens_BS=tokens_BS,
        targets_BS=targets_BS,
        segment_BS=np.zeros_like(tokens_BS) if segment_BS is None else segment_BS,
        position_BS=np.zeros_like(tokens_BS) + np.arange(tokens_BS.shape[1]) if position_BS is None else position_BS,
        noise_TD=noise_TD or {},
    )


@dataclass(frozen=True, kw_only=True)
class Output:
    """`balance` and `z` are before their coefficients: summed over MoE layers, or pooled once (scope `model`)."""

    logits_BSV: F64
    cross_entropy: float
    balance: float
    z: float
    total: float
    moe_layers: Mapping[int, MoEOutput]


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """What entered each half of each block, and what left the last."""

    attn_input_TD: Sequence[F64]
    ffn_input_TD: Sequence[F64]
    last_TD: F64
    output: Output


@in_float64
def transformer(params: Params, config: ModelConfig, batch: Inputs) -> Output:
    """total = cross entropy + aux_loss_coef * balance + z_loss_coef * z. Weights by the package's parameter names."""
    return _forward(params, config, batch).output


@in_float64
def transformer_grads(params: Params, config: ModelConfig, batch: Inputs) -> tuple[Output, dict[str, F64]]:
    """Return the output and d total / d every weight, by name. A tied embedding collects from both of its uses."""
    trace = _forward(params, config, batch)
    logits_BSV = trace.output.logits_BSV
    grads: dict[str, F64] = {}

    head = "embed.weight" if config.tie_embeddings else "head.weight"
    d_logits_TV = cross_entropy_vjp(logits_BSV, batch.targets_BS).reshape(-1, config.vocab_size)
    grads[head] = d_logits_TV.T @ rms_norm(trace.last_TD, params["norm.weight"], config.norm_eps)
    d_x_TD, grads["norm.weight"] = rms_norm_vjp(
        d_logits_TV @ params[head], trace.last_TD, params["norm.weight"], config.norm_eps
    )

    router_grads = _router_loss_grads(trace.output.moe_layers, config, len(batch.tokens_BS))
    for layer in reversed(range(config.num_layers)):
        p = _below(params, f"layers.{layer}.")
        feed_forward = partial(feed_forward_vjp, params=p, config=config, noise_TD=batch.noise_TD.get(layer))
        if layer in router_grads:
            feed_forward = partial(feed_forward, router_grads=router_grads[layer])
        attend = partial(attention_block_vjp, params=p, config=config, batch=batch)
        d_x_TD, of_ffn = _residual_vjp(d_x_TD, trace.ffn_input_TD[layer], "ffn_norm.weight", p, config, feed_forward)
        d_x_TD, of_attn = _residual_vjp(d_x_TD, trace.attn_input_TD[layer], "attn_norm.weight", p, config, attend)
        grads |= {f"layers.{layer}.{name}": grad for name, grad in (of_ffn | of_attn).items()}

    d_embed_VD = np.zeros_like(params["embed.weight"])
    np.add.at(d_embed_VD, batch.tokens_BS.reshape(-1), d_x_TD)
    grads["embed.weight"] = d_embed_VD + grads.get("embed.weight", 0.0)
    return trace.output, grads


def _residual_vjp(
    d_y_TD: F64,
    x_TD: F64,
    norm: str,
    params: Params,
    config: ModelConfig,
    sublayer_vjp: Callable[[F64, F64], tuple[F64, dict[str, F64]]],
) -> tuple[F64, dict[str, F64]]:
    """Backward of y = x + sublayer(rms_norm(x)): (d_x_TD, gradients of the sublayer and of the norm)."""
    d_normed_TD, grads = sublayer_vjp(d_y_TD, rms_norm(x_TD, params[norm], config.norm_eps))
    d_x_TD, d_weight_D = rms_norm_vjp(d_normed_TD, x_TD, params[norm], config.norm_eps)
    return d_y_TD + d_x_TD, {**grads, norm: d_weight_D}


def _forward(params: Params, config: ModelConfig, batch: Inputs) -> _Trace:
    x_TD = params["embed.weight"][batch.tokens_BS.reshape(-1)]
    attn_input_TD, ffn_input_TD = [], []
    moe_layers: dict[int, MoEOutput] = {}
    for layer in range(config.num_layers):
        p = _below(params, f"layers.{layer}.")
        attn_input_TD.append(x_TD)
        x_TD = x_TD + attention_block(rms_norm(x_TD, p["attn_norm.weight"], config.norm_eps), p, config, batch)
        ffn_input_TD.append(x_TD)
        normed_TD = rms_norm(x_TD, p["ffn_norm.weight"], config.norm_eps)
        if config.moe is not None and config.is_moe(layer):
            moe_layers[layer] = moe_layer(normed_TD, _below(p, "moe."), config.moe, batch.noise_TD.get(layer))
            x_TD = x_TD + moe_layers[layer].y_TD
        else:
            x_TD = x_TD + swiglu(normed_TD, p["ffn.w13.weight"], p["ffn.w2.weight"])
    head_VD = params["embed.weight" if config.tie_embeddings else "head.weight"]
    logits_TV = rms_norm(x_TD, params["norm.weight"], config.norm_eps) @ head_VD.T
    logits_BSV = logits_TV.reshape(*batch.tokens_BS.shape, config.vocab_size)
    output = _losses(logits_BSV, moe_layers, config, batch)
    return _Trace(attn_input_TD=attn_input_TD, ffn_input_TD=ffn_input_TD, last_TD=x_TD, output=output)


def _losses(logits_BSV: F64, moe_layers: Mapping[int, MoEOutput], config: ModelConfig, batch: Inputs) -> Output:
    ce = cross_entropy(logits_BSV, batch.targets_BS)
    balance, z, total = 0.0, 0.0, ce
    if config.moe is not None and moe_layers:
        routings = [out.routing for out in moe_layers.values()]
        balance = balance_loss(routings, config.moe, len(batch.tokens_BS))
        z = sum(z_loss(routing.logits_TE) for routing in routings)
        total = ce + config.moe.aux_loss_coef * balance + config.moe.z_loss_coef * z
    return Output(logits_BSV=logits_BSV, cross_entropy=ce, balance=balance, z=z, total=total, moe_layers=moe_layers)


def _router_loss_grads(
    moe_layers: Mapping[int, MoEOutput], config: ModelConfig, batch: int
) -> dict[int, tuple[F64, F64]]:
    """Return by layer (d total / d prob_TE through the balance loss, d total / d logits_TE through the z-loss)."""
    if config.moe is None or not moe_layers:
        return {}
    routings = [out.routing for out in moe_layers.values()]
    d_probs = balance_loss_vjp(routings, config.moe, batch)
    return {
        layer: (config.moe.aux_loss_coef * d_prob, config.moe.z_loss_coef * z_loss_vjp(routing.logits_TE))
        for layer, d_prob, routing in zip(moe_layers, d_probs, routings, strict=True)
    }


@in_float64
def feed_forward_vjp(
    d_y_TD: F64,
    x_TD: F64,
    params: Params,
    config: ModelConfig,
    noise_TD: F64 | None = None,
    router_grads: tuple[F64, F64] | None = None,
) -> tuple[F64, dict[str, F64]]:
    """Return (d_x_TD, gradients) of a block's second half: experts where `router_grads` is given, else dense."""
    if config.moe is not None and router_grads is not None:
        d_x_TD, grads = moe_layer_vjp(d_y_TD, *router_grads, x_TD, _below(params, "moe."), config.moe, noise_TD)
        return d_x_TD, {f"moe.{name}": grad for name, grad in grads.items()}
    d_x_TD, d_w13, d_w2 = swiglu_vjp(d_y_TD, x_TD, params["ffn.w13.weight"], params["ffn.w2.weight"])
    return d_x_TD, {"ffn.w13.weight": d_w13, "ffn.w2.weight": d_w2}


@in_float64
def attention_block(x_TD: F64, params: Params, config: ModelConfig, batch: Inputs) -> F64:
    """Project to q, k, v; norm q and k if configured; turn by position; attend; project back."""
    q, k, v = _qkv(x_TD, params, config, batch)
    q, k = (_turn(_qk_norm(part, params, name, config), config, batch) for part, name in ((q, "q"), (k, "k")))
    out_BSHZ = attention(score_factor(config.rope) * q, k, v, batch.segment_BS)
    return out_BSHZ.reshape(len(x_TD), -1) @ params["attn.out.weight"].T


@in_float64
def attention_block_vjp(
    d_y_TD: F64, x_TD: F64, params: Params, config: ModelConfig, batch: Inputs
) -> tuple[F64, dict[str, F64]]:
    """Return (d_x_TD, gradients of attn.qkv.weight, attn.out.weight and, if there, attn.q_norm / k_norm.weight)."""
    raw_q, raw_k, v = _qkv(x_TD, params, config, batch)
    q = score_factor(config.rope) * _turn(_qk_norm(raw_q, params, "q", config), config, batch)
    k = _turn(_qk_norm(raw_k, params, "k", config), config, batch)
    out_BSHZ = attention(q, k, v, batch.segment_BS)

    grads = {"attn.out.weight": d_y_TD.T @ out_BSHZ.reshape(len(x_TD), -1)}
    d_out_BSHZ = (d_y_TD @ params["attn.out.weight"]).reshape(out_BSHZ.shape)
    d_q, d_k, d_v, _ = attention_vjp(d_out_BSHZ, q, k, v, batch.segment_BS)
    d_q, d_k = _turn_vjp(score_factor(config.rope) * d_q, config, batch), _turn_vjp(d_k, config, batch)
    if config.qk_norm != "none":
        d_q, grads["attn.q_norm.weight"] = _qk_norm_vjp(d_q, raw_q, params["attn.q_norm.weight"], config)
        d_k, grads["attn.k_norm.weight"] = _qk_norm_vjp(d_k, raw_k, params["attn.k_norm.weight"], config)
    d_qkv = np.concatenate([part.reshape(len(x_TD), -1) for part in (d_q, d_k, d_v)], axis=1)
    grads["attn.qkv.weight"] = d_qkv.T @ x_TD
    return d_qkv @ params["attn.qkv.weight"], grads


def _qkv(x_TD: F64, params: Params, config: ModelConfig, batch: Inputs) -> tuple[F64, F64, F64]:
    heads = x_TD @ params["attn.qkv.weight"].T
    all_heads = heads.reshape(*batch.tokens_BS.shape, -1, config.head_size)
    q, k, v = np.split(all_heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=2)
    return q, k, v


def _qk_norm(x_BSHZ: F64, params: Params, name: str, config: ModelConfig) -> F64:
    if config.qk_norm == "none":
        return x_BSHZ
    weight = params[f"attn.{name}_norm.weight"]
    return rms_norm(_normed_unit(x_BSHZ, config), weight, config.norm_eps).reshape(x_BSHZ.shape)


def _qk_norm_vjp(d_y_BSHZ: F64, x_BSHZ: F64, weight: F64, config: ModelConfig) -> tuple[F64, F64]:
    d_y, x = _normed_unit(d_y_BSHZ, config), _normed_unit(x_BSHZ, config)
    d_x, d_weight = rms_norm_vjp(d_y, x, weight, config.norm_eps)
    return d_x.reshape(x_BSHZ.shape), d_weight


def _normed_unit(x_BSHZ: F64, config: ModelConfig) -> F64:
    """What one norm goes over as the last axis: a head, or all heads of a token."""
    return x_BSHZ if config.qk_norm == "head" else x_BSHZ.reshape(*x_BSHZ.shape[:2], -1)


def _turn(x_BSHZ: F64, config: ModelConfig, batch: Inputs) -> F64:
    angle_BSP = rope_angles(batch.position_BS, config.rotary_size, config.rope)
    return apply_rope(x_BSHZ, angle_BSP, rope_magnitude(config.rope))


def _turn_vjp(d_y_BSHZ: F64, config: ModelConfig, batch: Inputs) -> F64:
    angle_BSP = rope_angles(batch.position_BS, config.rotary_size, config.rope)
    return apply_rope_vjp(d_y_BSHZ, angle_BSP, rope_magnitude(config.rope))


def _below(params: Params, prefix: str) -> dict[str, F64]:
    return {name.removeprefix(prefix): weight for name, weight in params.items() if name.startswith(prefix)}
