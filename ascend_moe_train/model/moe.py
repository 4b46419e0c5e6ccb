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


def at_once(experts: Any, x_RD: Tensor, counts_E: Tensor) -> Tensor:
    """What experts make of all rows, at the port of a layer until something else is put there from outside."""
    return experts(x_RD, counts_E)


class MoE(nn.Cell):
    """(T, D) -> (T, D), and the router's figures: probability_BE, z_loss (1,), counts_BE, dropped (1,).

    Ports: `before_shared` and `after_shared` around the shared experts, `in_order` of routed and shared ones, and
    `compute`, the routed experts of what the dispatcher gives. `is_beside`: the dispatcher has shared experts computed
    while tokens are on their way.
    """

    def __init__(self, hidden: int, config: MoEConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        self.router = Router(hidden, config, layer)
        self.dispatcher: Any = LocalDispatcher(config, kernels)
        self.experts = GroupedExperts(hidden, config, kernels)
        self.has_shared, self.is_beside = config.shared_ffn > 0, False
        self.before_shared, self.after_shared, self.in_order = unchanged, unchanged, in_any_order
        self.compute = at_once
        if self.has_shared:
            self.shared = FeedForward(hidden, config.shared_ffn, kernels)

    def construct(self, x_TD: Tensor, num_sequences: int, noise_seed: Tensor) -> Any:
        expert_TK, gate_TK, probability_BE, z_loss, counts_BE = self.router(x_TD, num_sequences, noise_seed)
        if self.has_shared and self.is_beside:
            x_RD, counts_E, meta, h_TF = self.dispatcher.dispatch_beside(x_TD, expert_TK, gate_TK, self.enter_shared)
            y_RD = self.experts(x_RD, counts_E)
            y_TD, shared_TD = self.dispatcher.combine_beside(y_RD, gate_TK, meta, h_TF, self.leave_shared)
            return y_TD + shared_TD, probability_BE, z_loss, counts_BE, meta[2]
        x_RD, counts_E, meta = self.dispatcher.dispatch(x_TD, expert_TK, gate_TK)
        y_TD = self.dispatcher.combine(self.compute(self.experts, x_RD, counts_E), gate_TK, meta)
        if self.has_shared:
            y_TD, x_TD = self.in_order(y_TD, x_TD)
            y_TD = y_TD + self.leave_shared(self.enter_shared(x_TD))
        return y_TD, probability_BE, z_loss, counts_BE, meta[2]

    def enter_shared(self, x_TD: Tensor) -> Tensor:
        """The first product of the shared experts."""
        return self.shared.w13(self.before_shared(x_TD))

    def leave_shared(self, h_TF: Tensor) -> Tensor:
        """Their output, from that."""
        return self.after_shared(self.shared.w2.of_swiglu(h_TF))
