"""Balancing experts by a bias on their scores instead of a loss. Shape letters: see model/kernels/protocol.py."""

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from ascend_moe_train.model.each import for_each

Tensor = Any


class BalanceBiases(nn.Cell):
    """Moves the balance biases of L routers after a step: down by `rate` for an expert with more assignments than the
    mean, up for one with less (Wang et al., 2024, algorithm 1; DeepSeek-V3, section 2.1.2).

    construct(counts_LE, applied (1,)) -> the biases (L, E) after it. `counts_LE` are the assignments of the whole step,
    before any drop. A step that was not applied moves nothing.
    """

    def __init__(self, biases: list[tuple[str, Any]], rate: float) -> None:
        super().__init__()
        self.biases = ms.ParameterTuple([parameter for _, parameter in biases])
        self.rate, self.by_layer = rate, ops.Unstack()

    def construct(self, counts_LE: Tensor, applied: Tensor) -> Tensor:
        counts_LE = ops.cast(counts_LE, ms.float32)
        move_LE = ops.sign(ops.mean(counts_LE, 1, True) - counts_LE) * (self.rate * applied)
        return ops.stack(for_each(ops.assign_add, self.biases, self.by_layer(move_LE)))
