"""A decoder block, y = x + attention(norm(x)), then y + ffn(norm(y)), and what it is fed.

B batch, S sequence, T = B*S tokens, D hidden, E experts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ascend_moe_train.model.config import ModelConfig
from tests.oracle.arrays import F64, I64, in_float64
from tests.oracle.attention_block import attention_block, attention_block_vjp
from tests.oracle.ffn import swiglu, swiglu_vjp
from tests.oracle.latent_attention import latent_attention, latent_attention_vjp
from tests.oracle.moe import MoEOutput, moe_layer, moe_layer_vjp
from tests.oracle.norm import rms_norm, rms_norm_vjp

Params = Mapping[str, F64]
Vjp = Callable[[F64, F64], tuple[F64, dict[str, F64]]]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One batch. `targets_BS` -1 is not counted; segments are documents; `noise_TD` is the jitter, by layer number."""

    tokens_BS: I64
    targets_BS: I64
    segment_BS: I64
    position_BS: I64
    noise_TD: Mapping[int, F64]


@dataclass(frozen=True, kw_only=True)
class BlockTrace:
    """What entered each half, what left the second, and what its experts did, if it has any."""

    attn_input_TD: F64
    ffn_input_TD: F64
    y_TD: F64
    moe: MoEOutput | None


@in_float64
def block(x_TD: F64, params: Params, config: ModelConfig, layer: int, batch: Inputs) -> BlockTrace:
    """Block number `layer`; weights by the package's names within a block."""
    normed_TD = rms_norm(x_TD, params["attn_norm.weight"], config.norm_eps)
    middle_TD = x_TD + _attention(normed_TD, params, config, layer, batch)
    normed_TD = rms_norm(middle_TD, params["ffn_norm.weight"], config.norm_eps)
    moe = None
    if config.moe is not None and config.is_moe(layer):
        moe = moe_layer(normed_TD, below(params, "moe."), config.moe, batch.noise_TD.get(layer))
        y_TD = middle_TD + moe.y_TD
    else:
        y_TD = middle_TD + swiglu(normed_TD, params["ffn.w13.weight"], params["ffn.w2.weight"])
    return BlockTrace(attn_input_TD=x_TD, ffn_input_TD=middle_TD, y_TD=y_TD, moe=moe)


@in_float64
def block_vjp(
    d_y_TD: F64,
    trace: BlockTrace,
    params: Params,
    config: ModelConfig,
    layer: int,
    batch: Inputs,
    router_grads: tuple[F64, F64] | None,
) -> tuple[F64, dict[str, F64]]:
    """Return (d_x_TD, gradients named as `params`); `router_grads` are what the router's losses send back."""
    feed_forward = partial(
        _feed_forward_vjp,
        params=params,
        config=config,
        noise_TD=batch.noise_TD.get(layer),
        router_grads=router_grads,
    )
    attend = partial(_attention_vjp, params=params, config=config, layer=layer, batch=batch)
    d_middle_TD, of_ffn = _residual_vjp(d_y_TD, trace.ffn_input_TD, "ffn_norm.weight", params, config, feed_forward)
    d_x_TD, of_attn = _residual_vjp(d_middle_TD, trace.attn_input_TD, "attn_norm.weight", params, config, attend)
    return d_x_TD, of_ffn | of_attn


def _attention(x_TD: F64, params: Params, config: ModelConfig, layer: int, batch: Inputs) -> F64:
    places = (batch.segment_BS, batch.position_BS)
    if config.attention.mla is not None:
        return latent_attention(x_TD, params, config, config.attention.mla, *places)
    return attention_block(x_TD, params, config, layer, *places)


def _attention_vjp(
    d_y_TD: F64, x_TD: F64, params: Params, config: ModelConfig, layer: int, batch: Inputs
) -> tuple[F64, dict[str, F64]]:
    places = (batch.segment_BS, batch.position_BS)
    if config.attention.mla is not None:
        return latent_attention_vjp(d_y_TD, x_TD, params, config, config.attention.mla, *places)
    return attention_block_vjp(d_y_TD, x_TD, params, config, layer, *places)


def _residual_vjp(
    d_y_TD: F64, x_TD: F64, norm: str, params: Params, config: ModelConfig, sublayer_vjp: Vjp
) -> tuple[F64, dict[str, F64]]:
    """Backward of y = x + sublayer(rms_norm(x)): (d_x_TD, gradients of the sublayer and of the norm)."""
    d_normed_TD, grads = sublayer_vjp(d_y_TD, rms_norm(x_TD, params[norm], config.norm_eps))
    d_x_TD, d_weight_D = rms_norm_vjp(d_normed_TD, x_TD, params[norm], config.norm_eps)
    return d_y_TD + d_x_TD, {**grads, norm: d_weight_D}


def _feed_forward_vjp(
    d_y_TD: F64,
    x_TD: F64,
    params: Params,
    config: ModelConfig,
    noise_TD: F64 | None,
    router_grads: tuple[F64, F64] | None,
) -> tuple[F64, dict[str, F64]]:
    """Experts where `router_grads` is given, else dense."""
    if config.moe is not None and router_grads is not None:
        d_x_TD, grads = moe_layer_vjp(d_y_TD, *router_grads, x_TD, below(params, "moe."), config.moe, noise_TD)
        return d_x_TD, {f"moe.{name}": grad for name, grad in grads.items()}
    d_x_TD, d_w13, d_w2 = swiglu_vjp(d_y_TD, x_TD, params["ffn.w13.weight"], params["ffn.w2.weight"])
    return d_x_TD, {"ffn.w13.weight": d_w13, "ffn.w2.weight": d_w2}


def below(params: Params, prefix: str) -> dict[str, F64]:
    """The weights whose names start with `prefix`, under the rest of their names."""
    return {name.removeprefix(prefix): weight for name, weight in params.items() if name.startswith(prefix)}
