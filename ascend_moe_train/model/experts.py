"""All experts of a layer as one grouped computation. Shape letters: see kernels/protocol.py."""

from typing import Any

from mindspore import nn

from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.layers import empty

Tensor = Any


class GroupedExperts(nn.Cell):
    """E SwiGLU feed-forwards over tokens in expert order: (R, D), rows per expert (E,) -> (R, D).

    What comes out in rows that no expert has is not specified.
    """

    def __init__(self, hidden: int, config: MoEConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.w13 = empty(config.num_experts, hidden, 2 * config.ffn)
        self.w2 = empty(config.num_experts, config.ffn, hidden)
        self.has_w13_bias = self.has_w2_bias = config.expert_bias
        if config.expert_bias:
            self.w13_bias = empty(config.num_experts, 2 * config.ffn)
            self.w2_bias = empty(config.num_experts, hidden)
        clamp = config.clamped_swiglu
        self.clamp = (clamp.alpha, clamp.limit) if clamp is not None else None

    def construct(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        h_RF = self.w13_product(x_RD, counts_E)
        if self.has_w13_bias:
            h_RF = self.kernels.add_by_expert(h_RF, self.w13_bias, counts_E)
        y_RD = self.w2_product(h_RF, counts_E)
        return self.kernels.add_by_expert(y_RD, self.w2_bias, counts_E) if self.has_w2_bias else y_RD

    def w13_product(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """(R, D) -> (R, 2F)."""
        return self.kernels.grouped_matmul(x_RD, self.w13, counts_E)

    def w2_product(self, h_RF: Tensor, counts_E: Tensor) -> Tensor:
        """Of the activated: (R, 2F) -> (R, D)."""
        return self.kernels.swiglu_grouped_matmul(h_RF, self.w2, counts_E, self.clamp)
