"""The whole decoder: tokens and weights to loss parts, and the gradient of the total in every weight.

B batch, S sequence, T = B*S tokens, D hidden, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_moe_train.model.config import ModelConfig
from tests.oracle.arrays import F64, I64, in_float64
from tests.oracle.block import BlockTrace, Params, below, block, block_vjp
from tests.oracle.block import Inputs as Inputs
from tests.oracle.loss import cross_entropy, cross_entropy_vjp
from tests.oracle.moe import MoEOutput
from tests.oracle.mtp import Depth, further_depths, further_loss, further_vjp
from tests.oracle.norm import rms_norm, rms_norm_vjp
from tests.oracle.router import balance_loss, balance_loss_vjp, z_loss, z_loss_vjp


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
    """`balance` and `z` are before their coefficients: summed over MoE layers, or pooled once (scope `model`). So is
    `further`, the loss of multi-token prediction, whose blocks are numbered after the last layer."""

    logits_BSV: F64
    cross_entropy: float
    balance: float
    z: float
    further: float
    total: float
    moe_layers: Mapping[int, MoEOutput]


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """Every block, the last hidden state after its norm, and the depths of multi-token prediction."""

    blocks: Sequence[BlockTrace]
    normed_TD: F64
    depths: Sequence[Depth]
    output: Output


@in_float64
def transformer(params: Params, config: ModelConfig, batch: Inputs) -> Output:
    """total = cross entropy + aux_loss_coef * balance + z_loss_coef * z + mtp.loss_coef * further. Weights by the
    package's parameter names."""
    return _forward(params, config, batch).output


@in_float64
def transformer_grads(params: Params, config: ModelConfig, batch: Inputs) -> tuple[Output, dict[str, F64]]:
    """Return the output and d total / d every weight, by name. A tied embedding collects from all of its uses."""
    trace = _forward(params, config, batch)
    router_grads = _router_loss_grads(trace.output.moe_layers, config, len(batch.tokens_BS))
    head = "embed.weight" if config.tie_embeddings else "head.weight"
    grads = {name: np.zeros_like(params[name]) for name in {"embed.weight", head}}
    d_normed_TD = np.zeros_like(trace.normed_TD)
    if config.mtp is not None:
        coef = config.mtp.loss_coef
        d_normed_TD, of_depths = further_vjp(coef, trace.depths, params, config, batch, router_grads)
        grads |= of_depths

    d_logits_TV = cross_entropy_vjp(trace.output.logits_BSV, batch.targets_BS).reshape(-1, config.vocab_size)
    grads[head] = grads[head] + d_logits_TV.T @ trace.normed_TD
    d_x_TD, grads["norm.weight"] = rms_norm_vjp(
        d_normed_TD + d_logits_TV @ params[head], trace.blocks[-1].y_TD, params["norm.weight"], config.norm_eps
    )
    for layer in reversed(range(config.num_layers)):
        p = below(params, f"layers.{layer}.")
        d_x_TD, own = block_vjp(d_x_TD, trace.blocks[layer], p, config, layer, batch, router_grads.get(layer))
        grads |= {f"layers.{layer}.{name}": grad for name, grad in own.items()}
    np.add.at(grads["embed.weight"], batch.tokens_BS.reshape(-1), d_x_TD)
    return trace.output, grads


def _forward(params: Params, config: ModelConfig, batch: Inputs) -> _Trace:
    x_TD = params["embed.weight"][batch.tokens_BS.reshape(-1)]
    blocks: list[BlockTrace] = []
    for layer in range(config.num_layers):
        blocks.append(block(x_TD, below(params, f"layers.{layer}."), config, layer, batch))
        x_TD = blocks[-1].y_TD
    normed_TD = rms_norm(x_TD, params["norm.weight"], config.norm_eps)
    logits_TV = normed_TD @ params["embed.weight" if config.tie_embeddings else "head.weight"].T
    logits_BSV = logits_TV.reshape(*batch.tokens_BS.shape, config.vocab_size)
    depths = further_depths(normed_TD, params, config, batch)
    all_blocks = enumerate([*blocks, *(depth.block for depth in depths)])
    moe_layers = {layer: trace.moe for layer, trace in all_blocks if trace.moe is not None}
    output = _losses(logits_BSV, moe_layers, depths, config, batch)
    return _Trace(blocks=blocks, normed_TD=normed_TD, depths=depths, output=output)


def _losses(
    logits_BSV: F64,
    moe_layers: Mapping[int, MoEOutput],
    depths: Sequence[Depth],
    config: ModelConfig,
    batch: Inputs,
) -> Output:
    ce = cross_entropy(logits_BSV, batch.targets_BS)
    balance, z, further, total = 0.0, 0.0, 0.0, ce
    if config.moe is not None and moe_layers:
        routings = [out.routing for out in moe_layers.values()]
        balance = balance_loss(routings, config.moe, len(batch.tokens_BS))
        z = sum(z_loss(routing.logits_TE) for routing in routings)
        total = ce + config.moe.aux_loss_coef * balance + config.moe.z_loss_coef * z
    if config.mtp is not None:
        further = further_loss(depths, batch)
        total += config.mtp.loss_coef * further
    return Output(
        logits_BSV=logits_BSV,
        cross_entropy=ce,
        balance=balance,
        z=z,
        further=further,
        total=total,
        moe_layers=moe_layers,
    )


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
