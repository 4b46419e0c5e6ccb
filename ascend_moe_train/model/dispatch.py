"""Tokens to expert order and back. Shape letters: see kernels/protocol.py."""

from typing import Any

from mindspore import ops
from mindspore.ops import constexpr

from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.model.counts import expert_capacity
from ascend_moe_train.model.kernels.protocol import Kernels

Tensor = Any


# What `combine` must know of what `dispatch` did: (row_TK: row of the expert buffer that holds an assignment, -1 if
# dropped; source_R: assignment in each row, -1 if empty; dropped (1,): assignments that found no place). A plain tuple,
# since in graph mode a NamedTuple loses the shapes and, without an error, the gradients of what travels with it.
DispatchMeta = tuple[Tensor, Tensor, Tensor]


# a graph takes what is computed of its shapes from functions that are marked so
_capacity = constexpr(expert_capacity)


class LocalDispatcher:
    """All experts in this process: sort by expert, weighted sum back. The oracle of every other dispatcher."""

    def __init__(self, config: MoEConfig, kernels: Kernels) -> None:
        self.kernels = kernels
        self.num_experts, self.top_k, self.capacity_factor = config.num_experts, config.top_k, config.capacity_factor
        self.by_probability = config.drop_policy == "probability"

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor) -> tuple[Tensor, Tensor, DispatchMeta]:
        """-> tokens in expert order (R, D), rows per expert (E,), and what `combine` needs."""
        T, K = expert_TK.shape
        capacity = None
        if self.capacity_factor is not None:
            capacity = _capacity(self.capacity_factor, T, K, self.num_experts)
        row_TK, source_R, counts_E = self.kernels.sort_by_expert(
            expert_TK, ops.stop_gradient(gate_TK), self.num_experts, capacity, self.by_probability
        )
        dropped = ops.reshape(T * K - ops.sum(counts_E), (1,))
        return self.kernels.permute(x_TD, row_TK, source_R), counts_E, (row_TK, source_R, dropped)

    def combine(self, y_RD: Tensor, gate_TK: Tensor, meta: DispatchMeta) -> Tensor:
        """Weighted sum of a token's expert outputs: (R, D) -> (T, D)."""
        row_TK, source_R, _ = meta
        return self.kernels.combine(y_RD, gate_TK, row_TK, source_R)
