"""Which experts a token goes to, with what weight, and how evenly. Shape letters: see kernels/protocol.py."""

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.model.kernels.constants import numbers
from ascend_moe_train.model.layers import empty

Tensor = Any


def uniform_noise(place_T: Tensor, columns: int, seed: Tensor, amplitude: Tensor) -> Tensor:
    """Numbers in [1 - amplitude, 1 + amplitude), a pure function of (seed, place, column): (T, columns).

    A counter hashed by the PCG output permutation (O'Neill, 2014), since framework generators keep state that a
    resumed run would have to restore. `seed` is int32 (1,), `amplitude` fp32 (1,).
    """
    x = (ops.expand_dims(place_T, 1) * columns + numbers(columns)) * 747796405 + seed * 1013904223
    x = ops.bitwise_xor(x, ops.bitwise_right_shift(x, ops.full_like(x, 16))) * 277803737
    x = ops.bitwise_xor(x, ops.bitwise_right_shift(x, ops.full_like(x, 13)))
    unit = ops.cast(ops.bitwise_and(x, ops.full_like(x, 0xFFFFFF)), ms.float32) / 16777216.0
    return 1.0 - amplitude + 2.0 * amplitude * unit


_segment_sum = ops.UnsortedSegmentSum()


def count_assignments(expert_TK: Tensor, sequence_T: Tensor, num_sequences: int, num_experts: int) -> Tensor:
    """How often the tokens of each sequence chose each expert: (B, E), int32."""
    T, K = expert_TK.shape
    place_TK = ops.expand_dims(sequence_T, 1) * num_experts + expert_TK
    one_N = ops.ones((T * K,), ms.int32)
    counts_N = _segment_sum(one_N, ops.reshape(place_TK, (T * K,)), num_sequences * num_experts)
    return ops.reshape(counts_N, (num_sequences, num_experts))


class RouterFigures:
    """What a router's losses and the user want to know of its decisions over a batch of B sequences."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def collect(self, expert_TK: Tensor, probability_TE: Tensor, log_sum_T: Tensor, num_sequences: int) -> Any:
        """-> (expert_TK, probability_BE, z_loss (1,), counts_BE).

        The mean over tokens of probability_TE is P of the load-balancing loss; z_loss is the mean of
        logsumexp(logits)^2 (ST-MoE: Zoph et al., 2022, section 3.2); counts_BE are assignments per sequence and expert,
        before any drop.
        """
        T = expert_TK.shape[0]
        per_sequence = T // num_sequences
        z_loss = ops.reshape(ops.mean(log_sum_T * log_sum_T), (1,))
        counts_BE = count_assignments(expert_TK, numbers(T) // per_sequence, num_sequences, self.num_experts)
        probability_BE = ops.mean(ops.reshape(probability_TE, (num_sequences, per_sequence, self.num_experts)), 1)
        return expert_TK, probability_BE, z_loss, counts_BE


class Router(nn.Cell):
    """Token-choice top-k router, in fp32 whatever the activations are.

    `jitter` multiplies its input by noise (Switch Transformer, appendix C), unless noise_seed is negative. The balance
    bias is no weight: it has no gradient, and `optim.balance` updates it.

    construct returns (expert_TK int32, gate_TK, probability_BE, z_loss (1,), counts_BE), the last three from
    `figures`. `places` makes of the number of tokens T each one's place in the batch, (T,), for what depends on that.
    """

    def __init__(self, hidden: int, config: MoEConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.places = layer, numbers
        self.figures = RouterFigures(config.num_experts)
        # graph mode reads plain numbers as constants, but not the fields of a pydantic object
        self.top_k, self.num_experts = config.top_k, config.num_experts
        self.jitter, self.force_balance = config.jitter, config.force_balance
        self.is_sigmoid, self.after_topk = config.score == "sigmoid", config.score_order == "after_topk"
        self.normalize_topk, self.routed_scale = config.normalize_topk, config.routed_scale
        self.num_groups, self.top_groups = config.num_groups, config.top_groups
        self.best_of_each = 2 if config.groups_by == "best_two" else 1
        self.weight = empty(config.num_experts, hidden)
        self.has_bias = config.router_bias
        if self.has_bias:
            self.bias = empty(config.num_experts)
        self.has_balance_bias = config.balance_bias_rate is not None
        if self.has_balance_bias:
            self.balance_bias = empty(config.num_experts, is_trained=False)
        self.project = ops.MatMul(transpose_b=True)

    def construct(self, x_TD: Tensor, num_sequences: int, noise_seed: Tensor) -> Any:
        K, E = self.top_k, self.num_experts
        x_TD = ops.cast(x_TD, ms.float32)
        if self.jitter > 0:
            amplitude = self.jitter * ops.cast(noise_seed >= 0, ms.float32)
            x_TD = x_TD * uniform_noise(
                self.places(x_TD.shape[0]), x_TD.shape[1], noise_seed * 8191 + self.layer, amplitude
            )
        logits_TE = self.project(x_TD, self.weight)
        if self.has_bias:
            logits_TE = logits_TE + self.bias
        T = logits_TE.shape[0]
        score_TE, probability_TE = self.scores(logits_TE)
        expert_TK = self.choose(score_TE, T, K, E)
        gate_TK = self.gates(ops.gather_elements(score_TE, 1, expert_TK))
        top_T1 = ops.stop_gradient(ops.amax(logits_TE, 1, True))
        log_sum_T = ops.log(ops.sum(ops.exp(logits_TE - top_T1), 1)) + ops.squeeze(top_T1, 1)
        expert_TK, probability_BE, z_loss, counts_BE = self.figures.collect(
            expert_TK, probability_TE, log_sum_T, num_sequences
        )
        return expert_TK, gate_TK, probability_BE, z_loss, counts_BE

    def scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """What the gates are taken from, and what counts as probability in the balancing loss."""
        if self.is_sigmoid:
            score_TE = ops.sigmoid(logits_TE)
            return score_TE, score_TE / (ops.sum(score_TE, 1, True) + 1e-20)
        probability_TE = ops.softmax(logits_TE, -1)
        if self.after_topk:
            return logits_TE, probability_TE
        return probability_TE, probability_TE

    def choose(self, score_TE: Tensor, T: int, K: int, E: int) -> Tensor:
        if self.force_balance:
            return (ops.expand_dims(self.places(T), 1) * K + numbers(K)) % E
        score_TE = ops.stop_gradient(score_TE)
        if self.has_balance_bias:
            score_TE = score_TE + self.balance_bias
        if self.top_groups < self.num_groups:
            score_TE = self.within_top_groups(score_TE, T, E)
        _, expert_TK = ops.topk(score_TE, K)
        return ops.cast(expert_TK, ms.int32)

    def within_top_groups(self, score_TE: Tensor, T: int, E: int) -> Tensor:
        """Scores of experts outside the best groups become unreachably low."""
        best_TNK, _ = ops.topk(ops.reshape(score_TE, (T, self.num_groups, E // self.num_groups)), self.best_of_each)
        _, top_TN = ops.topk(ops.sum(best_TNK, 2), self.top_groups)
        is_top_TNN = ops.expand_dims(ops.cast(top_TN, ms.int32), 2) == numbers(self.num_groups)
        kept_TN1 = ops.expand_dims(ops.sum(ops.cast(is_top_TNN, ms.int32), 1) > 0, 2)
        kept_TNE = ops.broadcast_to(kept_TN1, (T, self.num_groups, E // self.num_groups))
        return ops.select(ops.reshape(kept_TNE, (T, E)), score_TE, ops.full_like(score_TE, -1e30))

    def gates(self, score_TK: Tensor) -> Tensor:
        if self.after_topk:
            return ops.softmax(score_TK, -1) * self.routed_scale
        if self.normalize_topk:
            score_TK = score_TK / (ops.sum(score_TK, 1, True) + 1e-20)
        return score_TK * self.routed_scale


def balance_loss(counts_BE: Tensor, probability_BE: Tensor, top_k: int, per_sequence: bool) -> Tensor:
    """E * sum_e f_e P_e (Switch Transformer: Fedus et al., 2022, eq. 4), over the batch or the mean over sequences."""
    counts_BE = ops.stop_gradient(ops.cast(counts_BE, ms.float32))
    E = probability_BE.shape[1]
    share_BE = counts_BE / ops.sum(counts_BE, 1, True)
    if per_sequence:
        return ops.reshape(ops.mean(ops.sum(share_BE * probability_BE, 1)) * E, (1,))
    return ops.reshape(ops.sum(ops.mean(share_BE, 0) * ops.mean(probability_BE, 0)) * E, (1,))
