"""Sums over ranks in fp16 that neither overflow nor lose what is small."""

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from ascend_moe_train.parallel.comm import Collectives, Group, Operator, Tensor, Wire

LARGEST = 2.0**15  # fp16 ends at 65504
MOST = 2.0**100  # of a factor, so that neither it nor what it multiplies is infinite


class PowerOfTwo:
    """From largest magnitudes the powers of two that bring them near `room`; one where there is none, or no finite
    one. Primitives only: for backward passes."""

    def __init__(self, room: float) -> None:
        self.room, self.most = ms.Tensor([room], ms.float32), ms.Tensor([MOST], ms.float32)
        self.is_finite, self.select, self.power = ops.IsFinite(), ops.Select(), ops.Pow()
        self.floor, self.log, self.both = ops.Floor(), ops.Log(), ops.LogicalAnd()
        self.minimum, self.ones_like = ops.Minimum(), ops.OnesLike()
        self.two, self.log_two = ms.Tensor([2.0], ms.float32), ms.Tensor([0.6931471805599453], ms.float32)

    def of(self, top_N: Tensor) -> Tensor:
        """(N,) -> (N,)."""
        is_good_N = self.both(self.is_finite(top_N), top_N > 0)
        top_N = self.select(is_good_N, top_N, self.ones_like(top_N) * self.room)
        ratio_N = self.minimum(self.room / top_N, self.most)
        return self.power(self.two, self.floor(self.log(ratio_N) / self.log_two))


class _ScaledSum(nn.Cell):
    """x -> what `call` makes of it, whose contributions and sum are in fp16. They are multiplied by a power of two that
    brings the largest magnitude of all ranks near the largest that a sum of n of them can have; with one that is not
    finite they stay as they are, and so does the sum."""

    def __init__(self, collectives: Collectives, group: Group, call: Operator) -> None:
        super().__init__()
        self.call, self.largest = call, collectives.all_reduce(group, "max")
        self.factors = PowerOfTwo(LARGEST / group.size)
        self.reshape, self.max, self.abs = ops.Reshape(), ops.ReduceMax(), ops.Abs()

    def construct(self, x: Tensor) -> Tensor:
        top = self.largest(self.reshape(self.max(self.abs(x)), (1,)))
        factor = self.factors.of(top)
        return self.call(x * factor) / factor


def summing(collectives: Collectives, group: Group, call: Operator, wire: Wire | None) -> Any:
    """What sums with `call`, a sum over the group in the dtype `wire`; in fp16 with an all_reduce of 4 bytes before."""
    return _ScaledSum(collectives, group, call) if wire == "fp16" and group.size > 1 else call
