"""Multi-token prediction (DeepSeek-V3, section 2.2): at depth k, counted from 1, the hidden state of token s and the
embedding of token s + k make the hidden state that predicts token s + k + 1.

B batch, S sequence, T = B*S tokens, D hidden, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_moe_train.model.config import ModelConfig
from tests.oracle.arrays import F64, I64
from tests.oracle.block import BlockTrace, Inputs, Params, below, block, block_vjp
from tests.oracle.loss import NOT_COUNTED, cross_entropy, cross_entropy_vjp
from tests.oracle.norm import rms_norm, rms_norm_vjp


@dataclass(frozen=True, kw_only=True)
class Depth:
    """What went into one depth, what it computed, and what it should have predicted."""

    tokens_BS: I64
    targets_BS: I64
    hidden_TD: F64
    block: BlockTrace
    normed_TD: F64
    logits_BSV: F64


def further_depths(hidden_TD: F64, params: Params, config: ModelConfig, batch: Inputs) -> list[Depth]:
    """Run every depth on the model's last hidden state, after its norm."""
    depths = []
    for k in range(1, (config.mtp.depth if config.mtp is not None else 0) + 1):
        p = below(params, f"mtp.{k - 1}.")
        tokens_BS = _ahead(batch.tokens_BS, k, 0)
        merged_TD = _merge_input(tokens_BS, hidden_TD, p, params, config) @ p["merge.weight"].T
        trace = block(merged_TD, below(p, "block."), config, config.num_layers + k - 1, batch)
        normed_TD = rms_norm(trace.y_TD, p["norm.weight"], config.norm_eps)
        logits_TV = normed_TD @ params[_head(config)].T
        depths.append(
            Depth(
                tokens_BS=tokens_BS,
                targets_BS=_targets(batch, k),
                hidden_TD=hidden_TD,
                block=trace,
                normed_TD=normed_TD,
                logits_BSV=logits_TV.reshape(*tokens_BS.shape, config.vocab_size),
            )
        )
        hidden_TD = normed_TD
    return depths


def further_loss(depths: Sequence[Depth], batch: Inputs) -> float:
    """Mean over depths of the summed cross entropy over the number of targets that the model itself has (equations 24
    and 25; lambda is left to the caller)."""
    return sum(cross_entropy(depth.logits_BSV, depth.targets_BS) * _share(depth, batch) for depth in depths) / len(
        depths
    )


def further_vjp(
    d_loss: float,
    depths: Sequence[Depth],
    params: Params,
    config: ModelConfig,
    batch: Inputs,
    router_grads: Mapping[int, tuple[F64, F64]],
) -> tuple[F64, dict[str, F64]]:
    """Return (d of the model's normed hidden state, gradients), those of embedding and head among them."""
    grads = {name: np.zeros_like(params[name]) for name in {"embed.weight", _head(config)}}
    d_hidden_TD = np.zeros_like(depths[0].hidden_TD)
    for k, depth in reversed(list(enumerate(depths))):
        p, layer = below(params, f"mtp.{k}."), config.num_layers + k
        scale = d_loss / len(depths) * _share(depth, batch)
        d_logits_TV = scale * cross_entropy_vjp(depth.logits_BSV, depth.targets_BS).reshape(-1, config.vocab_size)
        grads[_head(config)] += d_logits_TV.T @ depth.normed_TD
        d_normed_TD = d_hidden_TD + d_logits_TV @ params[_head(config)]
        d_y_TD, d_norm = rms_norm_vjp(d_normed_TD, depth.block.y_TD, p["norm.weight"], config.norm_eps)
        d_merged_TD, own = block_vjp(
            d_y_TD, depth.block, below(p, "block."), config, layer, batch, router_grads.get(layer)
        )
        merge_input = _merge_input(depth.tokens_BS, depth.hidden_TD, p, params, config)
        d_embed_part, d_hidden_part = np.split(d_merged_TD @ p["merge.weight"], 2, axis=1)
        embedded_TD = params["embed.weight"][depth.tokens_BS.reshape(-1)]
        d_embedded_TD, d_embed_norm = rms_norm_vjp(d_embed_part, embedded_TD, p["embed_norm.weight"], config.norm_eps)
        np.add.at(grads["embed.weight"], depth.tokens_BS.reshape(-1), d_embedded_TD)
        d_hidden_TD, d_hidden_norm = rms_norm_vjp(
            d_hidden_part, depth.hidden_TD, p["hidden_norm.weight"], config.norm_eps
        )
        mine = {f"block.{name}": grad for name, grad in own.items()} | {
            "embed_norm.weight": d_embed_norm,
            "hidden_norm.weight": d_hidden_norm,
            "merge.weight": d_merged_TD.T @ merge_input,
            "norm.weight": d_norm,
        }
        grads |= {f"mtp.{k}.{name}": grad for name, grad in mine.items()}
    return d_hidden_TD, grads


def _merge_input(tokens_BS: I64, hidden_TD: F64, own: Params, params: Params, config: ModelConfig) -> F64:
    """The normed embedding, then the normed hidden state."""
    embedded_TD = params["embed.weight"][tokens_BS.reshape(-1)]
    return np.concatenate(
        [
            rms_norm(embedded_TD, own["embed_norm.weight"], config.norm_eps),
            rms_norm(hidden_TD, own["hidden_norm.weight"], config.norm_eps),
        ],
        axis=1,
    )


def _ahead(x_BS: I64, k: int, filler: int) -> I64:
    return np.concatenate([x_BS[:, k:], np.full((len(x_BS), k), filler)], axis=1)


def _targets(batch: Inputs, k: int) -> I64:
    """Targets k places on, in the same document only."""
    same = _ahead(batch.segment_BS, k, -1) == batch.segment_BS
    return np.where(same, _ahead(batch.targets_BS, k, NOT_COUNTED), NOT_COUNTED)


def _share(depth: Depth, batch: Inputs) -> float:
    return float((depth.targets_BS != NOT_COUNTED).sum() / max((batch.targets_BS != NOT_COUNTED).sum(), 1))


def _head(config: ModelConfig) -> str:
    return "embed.weight" if config.tie_embeddings else "head.weight"
