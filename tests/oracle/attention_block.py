"""The first half of a decoder block: project, norm, turn by position, attend, project back.

B batch, S sequence, T = B*S tokens, D hidden, H query heads, G key-value heads, Z head size, Y head size of values.
"""

from collections.abc import Mapping

import numpy as np

from ascend_moe_train.model.config import ModelConfig
from tests.oracle.arrays import F64, I64, in_float64
from tests.oracle.attention import attention, attention_vjp
from tests.oracle.norm import rms_norm, rms_norm_vjp
from tests.oracle.rope import apply_rope, apply_rope_vjp, rope_angles, rope_magnitude, score_factor

Params = Mapping[str, F64]


@in_float64
def attention_block(
    x_TD: F64, params: Params, config: ModelConfig, layer: int, segment_BS: I64, position_BS: I64
) -> F64:
    """Grouped-query attention with the options of AttentionConfig; weights by the package's names, from `attn.` on."""
    q, k, v = _qkv(x_TD, params, config, segment_BS.shape)
    q, k = (_turn(_qk_norm(part, params, name, config), config, position_BS) for part, name in ((q, "q"), (k, "k")))
    out = attention(score_factor(config.rope) * q, k, v, segment_BS, *_reach(params, config, layer))
    return out.reshape(len(x_TD), -1) @ params["attn.out.weight"].T + params.get("attn.out.bias", 0.0)


@in_float64
def attention_block_vjp(
    d_y_TD: F64, x_TD: F64, params: Params, config: ModelConfig, layer: int, segment_BS: I64, position_BS: I64
) -> tuple[F64, dict[str, F64]]:
    """Return (d_x_TD, gradients of those of `params` that are attention's)."""
    raw_q, raw_k, v = _qkv(x_TD, params, config, segment_BS.shape)
    q = score_factor(config.rope) * _turn(_qk_norm(raw_q, params, "q", config), config, position_BS)
    k = _turn(_qk_norm(raw_k, params, "k", config), config, position_BS)
    reach = _reach(params, config, layer)
    out = attention(q, k, v, segment_BS, *reach)

    d_out, grads = _output_vjp(d_y_TD, out, params)
    d_q, d_k, d_v, d_sink_H = attention_vjp(d_out, q, k, v, segment_BS, *reach)
    if config.attention.sinks:
        grads["attn.sinks"] = d_sink_H
    d_q = _turn_vjp(score_factor(config.rope) * d_q, config, position_BS)
    d_k = _turn_vjp(d_k, config, position_BS)
    if config.qk_norm != "none":
        d_q, grads["attn.q_norm.weight"] = _qk_norm_vjp(d_q, raw_q, params["attn.q_norm.weight"], config)
        d_k, grads["attn.k_norm.weight"] = _qk_norm_vjp(d_k, raw_k, params["attn.k_norm.weight"], config)
    d_qkv = np.concatenate([part.reshape(len(x_TD), -1) for part in (d_q, d_k, d_v)], axis=1)
    grads["attn.qkv.weight"] = d_qkv.T @ x_TD
    if config.attention.bias != "none":
        grads["attn.qkv.bias"] = d_qkv.sum(axis=0)
    return d_qkv @ params["attn.qkv.weight"], grads


def _output_vjp(d_y_TD: F64, out_BSHY: F64, params: Params) -> tuple[F64, dict[str, F64]]:
    grads = {"attn.out.weight": d_y_TD.T @ out_BSHY.reshape(len(d_y_TD), -1)}
    if "attn.out.bias" in params:
        grads["attn.out.bias"] = d_y_TD.sum(axis=0)
    return (d_y_TD @ params["attn.out.weight"]).reshape(out_BSHY.shape), grads


def _reach(params: Params, config: ModelConfig, layer: int) -> tuple[int | None, F64 | None]:
    options = config.attention
    return options.window if layer in options.window_layers else None, params.get("attn.sinks")


def _qkv(x_TD: F64, params: Params, config: ModelConfig, shape: tuple[int, ...]) -> tuple[F64, F64, F64]:
    heads = x_TD @ params["attn.qkv.weight"].T + params.get("attn.qkv.bias", 0.0)
    all_heads = heads.reshape(*shape, -1, config.head_size)
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


def _turn(x_BSHZ: F64, config: ModelConfig, position_BS: I64) -> F64:
    angle_BSP = rope_angles(position_BS, config.rotary_size, config.rope)
    return apply_rope(x_BSHZ, angle_BSP, rope_magnitude(config.rope))


def _turn_vjp(d_y_BSHZ: F64, config: ModelConfig, position_BS: I64) -> F64:
    angle_BSP = rope_angles(position_BS, config.rotary_size, config.rope)
    return apply_rope_vjp(d_y_BSHZ, angle_BSP, rope_magnitude(config.rope))
