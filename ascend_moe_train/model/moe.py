"""The MoE layer: router, dispatcher, experts, and shared experts. Shape letters: see kernels/protocol.py."""

from typing import Any

from mindspore import nn

from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.model.dispatch import LocalDispatcher
from ascend_moe_train.model.experts import GroupedExperts
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.layers import FeedForward, in_any_order, unchanged
from ascend_moe_train.model.router import Router

Tensor = Any


class MoE(nn.Cell):
    """(T, D) -> (T, D), and the router's figures: probability_BE, z_loss (1,), counts_BE, dropped (1,).

    Ports: `before_shared` and `after_shared` around the shared experts, `in_order` of routed and shared ones.
    """

    def __init__(self, hidden: int, config: MoEConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        self.router = Router(hidden, config, layer)
        self.dispatcher = LocalDispatcher(config, kernels)
        self.experts = GroupedExperts(hidden, config, kernels)
        self.has_shared = config.shared_ffn > 0
        self.before_shared, self.after_shared, self.in_order = unchanged, unchanged, in_any_order
        if self.has_shared:
            self.shared = FeedForward(hidden, config.shared_ffn, kernels)

    def construct(self, x_TD: Tensor, num_sequences: int, noise_seed: Tensor) -> Any:
        expert_TK, gate_TK, probability_BE, z_loss, counts_BE = self.router(x_TD, num_sequences, noise_seed)
        x_RD, counts_E, meta = self.dispatcher.dispatch(x_TD, expert_TK, gate_TK)
        y_TD = self.dispatcher.combine(self.experts(x_RD, counts_E), gate_TK, meta)
        if self.has_shared:
            y_TD, x_TD = self.in_order(y_TD, x_TD)
            y_TD = y_TD + self.after_shared(self.shared(self.before_shared(x_TD)))
        return y_TD, probability_BE, z_loss, counts_BE, meta[2]
