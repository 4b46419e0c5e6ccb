"""All experts of a layer as one grouped computation. Shape letters: see kernels/protocol.py."""

from typing import Any

from mindspore import nn

from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.layers import empty

Tensor = Any


class GroupedExperts(nn.Cell):
    """E SwiGLU feed-forwards over tokens in expert order: (R, D), rows per expert (E,) -> (R, D)."""

    def __init__(self, hidden: int, config: MoEConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.w13 = empty(config.num_experts, hidden, 2 * config.ffn)
        self.w2 = empty(config.num_experts, config.ffn, hidden)

    def construct(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        h_RF = self.kernels.swiglu(self.kernels.grouped_matmul(x_RD, self.w13, counts_E))
        return self.kernels.grouped_matmul(h_RF, self.w2, counts_E)
