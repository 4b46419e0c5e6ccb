"""Dims that change places where context parallelism exchanges heads for places, against NumPy."""

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from ascend_moe_train.parallel.context import Swapped

Tensor = Any


class _Weighed(nn.Cell):
    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.swapped = Swapped(*dims)

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.sum(self.swapped(x) * weight)


@pytest.mark.parametrize("dims", [(1, 0), (2, 0, 1), (1, 2, 0)])
def test_rows_go_where_a_transpose_puts_them_and_gradients_back(dims: tuple[int, ...]) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    random = np.random.default_rng(0)
    x = random.standard_normal((*(3, 2, 5)[: len(dims)], 4)).astype(np.float32)
    moved = x.transpose(*dims, len(dims))
    weight = random.standard_normal(moved.shape).astype(np.float32)
    cell = _Weighed(dims)
    gradient = ms.grad(cell, grad_position=0)(ms.Tensor(x), ms.Tensor(weight))
    back = np.argsort(dims)
    np.testing.assert_array_equal(gradient.asnumpy(), weight.transpose(*back, len(dims)))
    np.testing.assert_allclose(cell(ms.Tensor(x), ms.Tensor(weight)).asnumpy(), (moved * weight).sum(), rtol=1e-5)
