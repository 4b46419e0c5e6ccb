"""Multi-head latent attention (DeepSeek-V2, section 2.1).

B batch, S sequence, T = B*S tokens, D hidden, H heads, C latent width, N part of a head without position, R rotated
part, Y head size of values.
"""

from collections.abc import Mapping

import numpy as np

from ascend_moe_train.model.config import MLAConfig, ModelConfig
from tests.oracle.arrays import F64, I64, in_float64
from tests.oracle.attention import attention, attention_vjp
from tests.oracle.norm import rms_norm, rms_norm_vjp
from tests.oracle.rope import apply_rope, apply_rope_vjp, rope_angles, rope_magnitude, score_factor

Params = Mapping[str, F64]


@in_float64
def latent_attention(
    x_TD: F64, params: Params, config: ModelConfig, mla: MLAConfig, segment_BS: I64, position_BS: I64
) -> F64:
    """Weights by the package's names, from `attn.` on. In each head of q and k, the part without position is first."""
    q, k, v = _qkv(x_TD, params, config, mla, position_BS)
    return attention(q, k, v, segment_BS).reshape(len(x_TD), -1) @ params["attn.out.weight"].T


@in_float64
def latent_attention_vjp(
    d_y_TD: F64, x_TD: F64, params: Params, config: ModelConfig, mla: MLAConfig, segment_BS: I64, position_BS: I64
) -> tuple[F64, dict[str, F64]]:
    """Return (d_x_TD, gradients of attention's weights). The rotated key collects from all heads."""
    q, k, v = _qkv(x_TD, params, config, mla, position_BS)
    out_BSHY = attention(q, k, v, segment_BS)
    grads = {"attn.out.weight": d_y_TD.T @ out_BSHY.reshape(len(x_TD), -1)}
    d_out = (d_y_TD @ params["attn.out.weight"]).reshape(out_BSHY.shape)
    d_q, d_k, d_v, _ = attention_vjp(d_out, q, k, v, segment_BS)

    d_q = _turn_last_vjp(score_factor(config.rope) * d_q, mla, config, position_BS)
    d_q_TZ = d_q.reshape(len(x_TD), -1)
    if mla.q_latent is None:
        grads["attn.q.weight"] = d_q_TZ.T @ x_TD
        d_x_TD = d_q_TZ @ params["attn.q.weight"]
    else:
        d_x_TD = _unfold_vjp(d_q_TZ, x_TD @ params["attn.q_down.weight"].T, "q", params, mla, grads)
        grads["attn.q_down.weight"] = d_x_TD.T @ x_TD
        d_x_TD = d_x_TD @ params["attn.q_down.weight"]

    d_k = _turn_last_vjp(d_k, mla, config, position_BS)
    d_turned_TR = d_k[..., mla.nope_dim :].sum(axis=2).reshape(len(x_TD), -1)
    d_kv = np.concatenate([d_k[..., : mla.nope_dim], d_v], axis=-1).reshape(len(x_TD), -1)
    latent_TC = x_TD @ params["attn.kv_down.weight"][: mla.kv_latent].T
    d_latent_TC = _unfold_vjp(d_kv, latent_TC, "kv", params, mla, grads)
    d_down = np.concatenate([d_latent_TC, d_turned_TR], axis=1)
    grads["attn.kv_down.weight"] = d_down.T @ x_TD
    return d_x_TD + d_down @ params["attn.kv_down.weight"], grads


def _qkv(x_TD: F64, params: Params, config: ModelConfig, mla: MLAConfig, position_BS: I64) -> tuple[F64, F64, F64]:
    shape = (*position_BS.shape, config.num_heads, -1)
    if mla.q_latent is None:
        q = x_TD @ params["attn.q.weight"].T
    else:
        q = _unfold(x_TD @ params["attn.q_down.weight"].T, "q", params, mla)
    q = score_factor(config.rope) * _turn_last(q.reshape(shape), mla, config, position_BS)
    latent_TC, turned_TR = np.split(x_TD @ params["attn.kv_down.weight"].T, [mla.kv_latent], axis=1)
    k_nope, v = np.split(_unfold(latent_TC, "kv", params, mla).reshape(shape), [mla.nope_dim], axis=-1)
    turned = np.broadcast_to(turned_TR.reshape(*position_BS.shape, 1, mla.rope_dim), (*k_nope.shape[:3], mla.rope_dim))
    return q, _turn_last(np.concatenate([k_nope, turned], axis=-1), mla, config, position_BS), v


def _unfold(latent_TC: F64, name: str, params: Params, mla: MLAConfig) -> F64:
    normed_TC = rms_norm(latent_TC, params[f"attn.{name}_latent_norm.weight"], mla.norm_eps)
    return normed_TC @ params[f"attn.{name}_up.weight"].T


def _unfold_vjp(d_y: F64, latent_TC: F64, name: str, params: Params, mla: MLAConfig, grads: dict[str, F64]) -> F64:
    """Return d_latent_TC; the gradients of norm and `up` go into `grads`."""
    norm, up = f"attn.{name}_latent_norm.weight", f"attn.{name}_up.weight"
    grads[up] = d_y.T @ rms_norm(latent_TC, params[norm], mla.norm_eps)
    d_latent_TC, grads[norm] = rms_norm_vjp(d_y @ params[up], latent_TC, params[norm], mla.norm_eps)
    return d_latent_TC


def _turn_last(x_BSHZ: F64, mla: MLAConfig, config: ModelConfig, position_BS: I64) -> F64:
    nope, turned = np.split(x_BSHZ, [mla.nope_dim], axis=-1)
    angle_BSP = rope_angles(position_BS, mla.rope_dim, config.rope)
    return np.concatenate([nope, apply_rope(turned, angle_BSP, rope_magnitude(config.rope))], axis=-1)


def _turn_last_vjp(d_y_BSHZ: F64, mla: MLAConfig, config: ModelConfig, position_BS: I64) -> F64:
    d_nope, d_turned = np.split(d_y_BSHZ, [mla.nope_dim], axis=-1)
    angle_BSP = rope_angles(position_BS, mla.rope_dim, config.rope)
    return np.concatenate([d_nope, apply_rope_vjp(d_turned, angle_BSP, rope_magnitude(config.rope))], axis=-1)
