"""Tensors side by side in one flat one, and apart again, inside graphs."""

from collections.abc import Sequence
from math import prod

from mindspore import nn, ops

from ascend_moe_train.model.each import for_each
from ascend_moe_train.parallel.comm import Tensor


class Apart(nn.Cell):
    """A flat tensor -> pieces of these shapes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.sizes = tuple(shapes), tuple(prod(shape) for shape in shapes)
        self.numbers = tuple(range(len(shapes)))

    def construct(self, x: Tensor) -> tuple[Tensor, ...]:
        pieces = ops.split(x, self.sizes, 0) if len(self.sizes) > 1 else (x,)
        return for_each(self.shaped, self.numbers, pieces)

    def shaped(self, number: int, piece: Tensor) -> Tensor:
        """One of them."""
        return ops.reshape(piece, self.shapes[number])


def joined(flat: tuple[Tensor, ...]) -> Tensor:
    """Flat tensors as one."""
    return ops.concat(flat) if len(flat) > 1 else flat[0]


def side_by_side(tensors: tuple[Tensor, ...]) -> Tensor:
    """Tensors of any shapes as one flat one."""
    return joined(for_each(_flat, tensors))


def _flat(x: Tensor) -> Tensor:
    return ops.reshape(x, (-1,))
