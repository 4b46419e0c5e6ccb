"""What operators of every backend do inside a graph for shapes that a backend cannot take."""

from mindspore import ops

from ascend_moe_train.parallel.comm import Operator, Tensor


def identity(x: Tensor) -> Tensor:
    """x."""
    return x


def zeros_after(x: Tensor, rows: int) -> Tensor:
    """Zeros like rows of x, which still come after x: a constant would let what follows run before what led to x."""
    return ops.depend(ops.zeros((rows, *x.shape[1:]), x.dtype), x)


def of_any_shape(call: Operator) -> Operator:
    """For an operator of one shape: 0-dim tensors too; without elements there is nothing to do, on any rank."""

    def op(x: Tensor) -> Tensor:
        if 0 in x.shape:
            return x
        return call(x.reshape((1,))).reshape(()) if x.ndim == 0 else call(x)

    return op


def of_any_rows(call: Operator, grow: int = 1, shrink: int = 1) -> Operator:
    """For an operator that makes `grow / shrink` times as many rows: without elements there is nothing to do, on any
    rank."""

    def op(x: Tensor) -> Tensor:
        return zeros_after(x, x.shape[0] * grow // shrink) if 0 in x.shape else call(x)

    return op
