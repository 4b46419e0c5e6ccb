"""The decoder-only transformer and its loss. Shape letters: see kernels/protocol.py."""

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from ascend_moe_train.model.attention import Attention, LatentAttention
from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.model.counts import buffer_shapes, moe_layers
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.layers import (
    Embedding,
    FeedForward,
    Linear,
    RMSNorm,
    in_any_order,
    initial_value,
    unchanged,
)
from ascend_moe_train.model.moe import MoE
from ascend_moe_train.model.rope import rope_tables
from ascend_moe_train.model.router import balance_loss

Tensor = Any


class Block(nn.Cell):
    """Pre-norm decoder block: attention, then experts or one dense feed-forward.

    Ports: `before_` and `after_` attention (`attn`), and experts or feed-forward (`ffn`). `is_recomputed`: of what it
    computes nothing is kept for the backward pass, see `chunk.RecomputedGradient`.
    """

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden, config.norm_eps, kernels)
        mla = config.attention.mla
        self.attn = Attention(config, layer, kernels) if mla is None else LatentAttention(config, mla, kernels)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps, kernels)
        self.before_attn, self.after_attn, self.before_ffn, self.after_ffn = (unchanged,) * 4
        self.is_moe, self.is_recomputed = config.is_moe(layer), False
        if config.moe is not None and self.is_moe:
            self.moe = MoE(config.hidden, config.moe, layer, kernels)
        else:
            self.ffn = FeedForward(config.hidden, config.ffn, kernels)

    def construct(
        self, x_TD: Tensor, segment_BS: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor, noise_seed: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        h_TD = self.before_attn(self.attn_norm(x_TD))
        x_TD = x_TD + self.after_attn(self.attn(h_TD, segment_BS, cos_BSZ, sin_BSZ))
        h_TD = self.before_ffn(self.ffn_norm(x_TD))
        if self.is_moe:
            y_TD, probability_BE, z_loss, counts_BE, dropped = self.moe(h_TD, segment_BS.shape[0], noise_seed)
            return x_TD + self.after_ffn(y_TD), (probability_BE, z_loss, counts_BE, dropped)
        return x_TD + self.after_ffn(self.ffn(h_TD)), ()


def ahead(tokens_BS: Tensor, targets_BS: Tensor, segment_BS: Tensor, depth: int) -> list[tuple[Tensor, Tensor]]:
    """For each depth of multi-token prediction the tokens so far on, and their targets: (B, S) each.

    After the last token comes token 0. A target after it, or in another document than its query, is -1.
    """
    found = []
    for far in range(1, depth + 1):
        nothing = ops.full((tokens_BS.shape[0], far), -1, dtype=ms.int32)
        next_BS = ops.concat((tokens_BS[:, far:], ops.zeros_like(nothing)), 1)
        target_BS = ops.concat((targets_BS[:, far:], nothing), 1)
        is_same_BS = ops.concat((segment_BS[:, far:], nothing), 1) == segment_BS
        found.append((next_BS, ops.select(is_same_BS, target_BS, ops.full_like(target_BS, -1))))
    return found


class TokenAfter(nn.Cell):
    """One depth of multi-token prediction (DeepSeek-V3, section 2.2): from the normed hidden state of the depth before
    and the embedding of the token that was to be predicted there, to the normed hidden state that predicts the one
    after it. The merged input holds the embedding first, as in the published weights."""

    def __init__(self, config: ModelConfig, depth: int, kernels: Kernels) -> None:
        super().__init__()
        self.embed_norm = RMSNorm(config.hidden, config.norm_eps, kernels)
        self.hidden_norm = RMSNorm(config.hidden, config.norm_eps, kernels)
        self.merge = Linear(2 * config.hidden, config.hidden, kernels)
        self.block = Block(config, config.num_layers + depth, kernels)
        self.norm = RMSNorm(config.hidden, config.norm_eps, kernels)

    def construct(
        self, x_TD: Tensor, e_TD: Tensor, segment_BS: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor, noise_seed: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        merged_TD = self.merge(ops.concat((self.embed_norm(e_TD), self.hidden_norm(x_TD)), -1))
        y_TD, figures = self.block(merged_TD, segment_BS, cos_BSZ, sin_BSZ, noise_seed)
        return self.norm(y_TD), figures


class Transformer(nn.Cell):
    """Tokens to next-token loss. Weights are zero until `initialize` or a checkpoint fills them.

    Ports: `after_embed` with `after_embed_back`, the gradient of its input from that of its output, `before_head`,
    `in_order` of what multi-token prediction does beside the rest, and `ahead`.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, num_positions: int) -> None:
        super().__init__()
        self.init_std, self.tie_embeddings = config.init_std, config.tie_embeddings
        if config.moe is not None:
            self.top_k, self.aux_loss_scope = config.moe.top_k, config.moe.aux_loss_scope
            self.aux_loss_coef, self.z_loss_coef = config.moe.aux_loss_coef, config.moe.z_loss_coef
            self.balance_bias_rate = config.moe.balance_bias_rate
        self.kernels = kernels
        self.after_embed, self.after_embed_back, self.before_head = unchanged, unchanged, unchanged
        self.in_order, self.ahead = in_any_order, ahead
        self.embed = Embedding(config.vocab_size, config.hidden, kernels)
        self.layers = nn.CellList([Block(config, i, kernels) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden, config.norm_eps, kernels)
        if not config.tie_embeddings:
            self.head = Linear(config.hidden, config.vocab_size, kernels)
        self.mtp_loss_coef = config.mtp.loss_coef if config.mtp is not None else 0.0
        if config.mtp is not None:
            self.mtp = nn.CellList([TokenAfter(config, depth, kernels) for depth in range(config.mtp.depth)])
        self.has_mtp = config.mtp is not None
        self.num_moe_layers, self.buffer_names = len(moe_layers(config)), frozenset(buffer_shapes(config))
        cos, sin = rope_tables(config.rope, config.rotary_size, num_positions)
        self.cos_table, self.sin_table = ms.Tensor(cos), ms.Tensor(sin)

    def weights(self) -> list[tuple[str, Any]]:
        """Name and parameter of every weight, in the order of `counts.parameter_shapes`.

        The names are places in this model; a parameter's own `name` changes with the cell that holds the model.
        """
        return [(name, parameter) for name, parameter in self.parameters_and_names() if name not in self.buffer_names]

    def buffers(self) -> list[tuple[str, Any]]:
        """The same for what is part of the model and never has a gradient, in the order of `counts.buffer_shapes`."""
        return [(name, parameter) for name, parameter in self.parameters_and_names() if name in self.buffer_names]

    def initialize(self, seed: int) -> None:
        """Fill every weight and buffer from (seed, its name)."""
        for name, parameter in [*self.weights(), *self.buffers()]:
            num_layers = len(self.layers)
            value = initial_value(name, parameter.shape, std=self.init_std, num_layers=num_layers, seed=seed)
            parameter.set_data(ms.Tensor(value))

    def hidden_states(
        self, tokens_BS: Tensor, segment_BS: Tensor, position_BS: Tensor, noise_seed: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """-> normed output (B*S, D), the router figures of every MoE layer, and the outputs of embedding and blocks."""
        x_TD = self.embedded(tokens_BS)
        x_TD, routed, trail = self.through(x_TD, 0, len(self.layers), segment_BS, position_BS, noise_seed)
        return self.norm(x_TD), routed, trail

    def embedded(self, tokens_BS: Tensor) -> Tensor:
        """(B, S) -> (B*S, D)."""
        return self.after_embed(self.rows(tokens_BS))

    def rows(self, tokens_BS: Tensor) -> Tensor:
        """(B, S) -> (B*S, D): the embedding's rows."""
        return self.embed(ops.reshape(tokens_BS, (-1,)), self.embed.weight)

    def turns(self, position_BS: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotary embedding: (B, S) -> (B, S, Z/2) each."""
        return ops.gather(self.cos_table, position_BS, 0), ops.gather(self.sin_table, position_BS, 0)

    def through(
        self, x_TD: Tensor, first: int, stop: int, segment_BS: Tensor, position_BS: Tensor, noise_seed: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Blocks first to stop - 1: (B*S, D) -> (B*S, D), router figures of those with experts, input and outputs."""
        cos_BSZ, sin_BSZ = self.turns(position_BS)
        routed, trail = [], [x_TD]
        for i in range(first, stop):
            x_TD, figures = self.layers[i](x_TD, segment_BS, cos_BSZ, sin_BSZ, noise_seed)
            trail.append(x_TD)
            if len(figures) > 0:
                routed.append(figures)
        return x_TD, routed, trail

    def logits(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> (T, V)."""
        if self.tie_embeddings:
            return self.kernels.matmul(x_TD, self.embed.weight)
        return self.head(x_TD)

    def router_losses(self, routed: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Load-balancing and z loss summed over MoE layers (scope `model`: pooled over layers), without coefficient."""
        aux, z = ops.zeros((1,), ms.float32), ops.zeros((1,), ms.float32)
        if self.aux_loss_scope == "model":
            counts = ops.concat([r[2] for r in routed], 0)
            aux = balance_loss(counts, ops.concat([r[0] for r in routed], 0), self.top_k, False)
        for probability_BE, z_loss, counts_BE, _ in routed:
            if self.aux_loss_scope != "model":
                aux = aux + balance_loss(counts_BE, probability_BE, self.top_k, self.aux_loss_scope == "sequence")
            z = z + z_loss
        return aux, z

    def construct(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        segment_BS: Tensor,
        position_BS: Tensor,
        loss_weight: Tensor,
        noise_seed: Tensor,
    ) -> tuple[Tensor, ...]:
        """-> total loss (1,), and without gradient: summed cross entropy * loss_weight[0], the same of multi-token
        prediction, aux, z, counts_LE, dropped.

        The blocks of multi-token prediction are the last of the L that hold experts. A negative noise_seed (1,)
        switches the router's jitter off. loss_weight (2,) is (1 / counted tokens of the step, 1 / micro-batches of the
        step), so that losses and gradients of micro-batches add up.
        """
        x_TD, routed, _ = self.hidden_states(tokens_BS, segment_BS, position_BS, noise_seed)
        return self.losses(x_TD, routed, tokens_BS, targets_BS, segment_BS, position_BS, loss_weight, noise_seed)

    def losses(
        self,
        x_TD: Tensor,
        routed: list[Tensor],
        tokens_BS: Tensor,
        targets_BS: Tensor,
        segment_BS: Tensor,
        position_BS: Tensor,
        loss_weight: Tensor,
        noise_seed: Tensor,
    ) -> tuple[Tensor, ...]:
        """What `construct` returns, from the normed output and the router figures of the blocks before it."""
        ce = self.cross_entropy(x_TD, targets_BS) * loss_weight[0]
        further = ops.zeros((1,), ms.float32)
        if self.has_mtp:
            ce, x_TD = self.in_order(ce, x_TD)
            further, routed_further = self.further_cross_entropy(
                x_TD, tokens_BS, targets_BS, segment_BS, position_BS, noise_seed
            )
            further = further * loss_weight[0]
            routed = routed + routed_further
        return self.with_router_losses(ce, further, routed, loss_weight)

    def with_router_losses(
        self, ce: Tensor, further: Tensor, routed: list[Tensor], loss_weight: Tensor
    ) -> tuple[Tensor, ...]:
        """What `construct` returns, from the two cross entropies and the router figures that go with them."""
        if len(routed) == 0:
            aux = z = ops.zeros((1,), ms.float32)
            total = self.total_loss(ce, further, aux, z)
            return total, ce, further, aux, z, ops.zeros((1, 1), ms.int32), ops.zeros((1,), ms.int32)
        aux, z = self.router_losses(routed)
        aux, z = aux * loss_weight[1], z * loss_weight[1]
        counts_LE = ops.stack([ops.sum(r[2], 0) for r in routed])
        dropped = ops.stack([r[3] for r in routed]).sum(0)
        return self.total_loss(ce, further, aux, z), ce, further, aux, z, counts_LE, dropped

    def total_loss(self, ce: Tensor, further: Tensor, aux: Tensor, z: Tensor) -> Tensor:
        """What training makes small, from its terms (1,) each."""
        if self.num_moe_layers == 0:
            return ce + self.mtp_loss_coef * further
        return ce + self.mtp_loss_coef * further + self.aux_loss_coef * aux + self.z_loss_coef * z

    def cross_entropy(self, x_TD: Tensor, targets_BS: Tensor) -> Tensor:
        """Summed over the counted targets: (1,)."""
        logits_TV = self.logits(self.before_head(x_TD))
        return ops.reshape(ops.sum(self.kernels.cross_entropy(logits_TV, ops.reshape(targets_BS, (-1,)))), (1,))

    def further_cross_entropy(
        self,
        x_TD: Tensor,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        segment_BS: Tensor,
        position_BS: Tensor,
        noise_seed: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """-> mean over depths of the summed loss of multi-token prediction, and the router figures of its blocks."""
        x_TD, tokens_BS = self.in_order(x_TD, tokens_BS)
        given = self.ahead(tokens_BS, targets_BS, segment_BS, len(self.mtp))
        cos_BSZ, sin_BSZ = self.turns(position_BS)
        total, routed = ops.zeros((1,), ms.float32), []
        for i, module in enumerate(self.mtp):
            next_BS, target_BS = given[i]
            x_TD, weight_VD = self.in_order(x_TD, self.embed.weight)
            e_TD = self.after_embed(self.embed(ops.reshape(next_BS, (-1,)), weight_VD))
            x_TD, figures = module(x_TD, e_TD, segment_BS, cos_BSZ, sin_BSZ, noise_seed)
            if len(figures) > 0:
                routed.append(figures)
            ce = self.cross_entropy(x_TD, target_BS)
            ce, x_TD = self.in_order(ce, x_TD)
            total = total + ce
        return total / len(self.mtp), routed
