"""Collectives with their gradients, written once above `comm.Collectives`.

Each function makes a port for graphs, x -> y, whose gradient is the adjoint map: for sums over all ranks of <y, w>, the
gradient of this rank's x is what the backward collective brings. The pairs that keep an activation replicated (`copy`,
`reduce`, `split`, `gather`) follow the convention that gradients of replicated tensors are full and equal on all ranks
(f and g of Shoeybi et al., 2019, section 3; split and gather of Korthikanti et al., 2022, section 4.2.2).

A group of one rank gives the identity function, without an operator. All cut and join dim 0.
"""

from typing import Any

from mindspore import nn, ops

from ascend_moe_train.parallel.comm import Collectives, Group, Operator, Tensor
from ascend_moe_train.parallel.rows_wire import AsTheyAre, RowsWire
from ascend_moe_train.parallel.shaping import identity

# the primitive: ops.zeros_like is a graph of its own, which MindSpore loses where a gradient is taken inside another
zeros_like = ops.ZerosLike()


class _Pair(nn.Cell):
    """One operator forward and its adjoint backward."""

    def __init__(self, forward: Operator, backward: Operator, moves_back: bool) -> None:
        super().__init__()
        self.forward = forward
        self.backward = backward
        self.moves_back = moves_back

    def construct(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        # dout may be a constant: without the forward result, its collective could run before those of the forward pass
        return (self.backward(ops.depend(dout, out) if self.moves_back else dout),)


class _ExchangeRows(nn.Cell):
    def __init__(self, collectives: Collectives, group: Group, rows: int, rows_back: int, wire: RowsWire) -> None:
        super().__init__()
        self.wire = wire
        self.forward = collectives.all_to_all_v(group, rows)
        self.backward = collectives.all_to_all_v(group, rows_back)

    def construct(self, x: Tensor, send_n: Tensor, recv_n: Tensor) -> Tensor:
        return self.wire.moved(self.forward, x, send_n, recv_n)

    def bprop(self, x: Tensor, send_n: Tensor, recv_n: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        dx = self.wire.moved(self.backward, ops.depend(dout, out), recv_n, send_n)
        return dx, zeros_like(send_n), zeros_like(recv_n)


class InOrder(nn.Cell):
    """(first, second) -> the same, where collectives that lead to `first` run before those that use `second`, and in
    the backward pass those of the gradient of `second` before those of `first`. The parts need not have one shape."""

    def construct(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first, ops.depend(second, first)

    def bprop(self, first: Tensor, second: Tensor, out: Any, dout: Any) -> tuple[Tensor, Tensor]:
        return ops.depend(dout[0], dout[1]), dout[1]


def copy(collectives: Collectives, group: Group) -> Operator:
    """Identity | all_reduce: before what each rank does with its own part of a weight."""
    return _pair(group, identity, collectives.all_reduce(group))


def reduce(collectives: Collectives, group: Group) -> Operator:
    """all_reduce | identity: after it. The sum is replicated, so its gradient is already full."""
    return _pair(group, collectives.all_reduce(group), identity, moves_back=False)


def split(collectives: Collectives, group: Group) -> Operator:
    """Own part | all_gather: (n * N, ...) -> (N, ...), of what all ranks have."""
    return _pair(group, _own_part(group), collectives.all_gather(group))


def gather(collectives: Collectives, group: Group) -> Operator:
    """all_gather | own part: (N, ...) -> (n * N, ...), for what all ranks use in the same way."""
    return _pair(group, collectives.all_gather(group), _own_part(group), moves_back=False)


def gather_sum(collectives: Collectives, group: Group) -> Operator:
    """all_gather | reduce_scatter: (N, ...) -> (n * N, ...), for what each rank uses in its own way."""
    return _pair(group, collectives.all_gather(group), collectives.reduce_scatter(group))


def scatter_sum(collectives: Collectives, group: Group) -> Operator:
    """reduce_scatter | all_gather: (n * N, ...) -> (N, ...)."""
    return _pair(group, collectives.reduce_scatter(group), collectives.all_gather(group))


def exchange(collectives: Collectives, group: Group) -> Operator:
    """all_to_all | all_to_all: (n * N, ...) -> (n * N, ...)."""
    return _pair(group, collectives.all_to_all(group), collectives.all_to_all(group))


def exchange_rows(
    collectives: Collectives, group: Group, rows: int, rows_back: int, wire: RowsWire | None = None
) -> Operator:
    """all_to_all_v | all_to_all_v with counts swapped: op(x, send_n, recv_n), (rows_back, ...) -> (rows, ...).

    Rows of x after the first sum(send_n) go nowhere and get a gradient of zero. Never the identity: rows after those
    that are received are zero in a group of one rank too. Rows and their gradients move as `wire` says; of its rounding
    the gradient knows nothing."""
    return _ExchangeRows(collectives, group, rows, rows_back, wire or AsTheyAre())


def _pair(group: Group, forward: Operator, backward: Operator, moves_back: bool = True) -> Operator:
    return identity if group.size == 1 else _Pair(forward, backward, moves_back)


def _own_part(group: Group) -> Operator:
    index, size = group.index, group.size

    def part(x: Tensor) -> Tensor:
        rows = x.shape[0] // size
        return x[index * rows : (index + 1) * rows]

    return part
