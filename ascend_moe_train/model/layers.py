"""Linear, RMSNorm, Embedding, SwiGLU feed-forward. Shape letters: see kernels/protocol.py.

Every layer holds fp32 parameters and hands them to its kernels in the precision of the activations.
"""

import zlib
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.common.initializer import initializer
from numpy.typing import NDArray

from ascend_moe_train.model.kernels.protocol import Kernels

Tensor = Any


def empty(*shape: int, is_trained: bool = True, name: str | None = None) -> ms.Parameter:
    """A parameter of zeros, which takes no memory before it is filled."""
    return ms.Parameter(initializer("zeros", shape, ms.float32), name=name, requires_grad=is_trained)


def unchanged(x: Tensor) -> Tensor:
    """What stands at a port of a model until something else is put there from outside."""
    return x


def in_any_order(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Stands where two branches of the model meet that do not need each other, until they are put in order."""
    return first, second


class Linear(nn.Cell):
    """x W^T, plus a bias if there is one: (T, D) -> (T, F)."""

    def __init__(self, inner: int, outer: int, kernels: Kernels, has_bias: bool = False) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = empty(outer, inner)
        self.has_bias = has_bias
        if has_bias:
            self.bias = empty(outer)

    def construct(self, x_TD: Tensor) -> Tensor:
        y_TF = self.product(x_TD)
        return y_TF + ops.cast(self.bias, y_TF.dtype) if self.has_bias else y_TF

    def product(self, x_TD: Tensor) -> Tensor:
        """x W^T."""
        return self.kernels.matmul(x_TD, self.weight)

    def of_swiglu(self, h_TF: Tensor) -> Tensor:
        """swiglu(h) W^T, without a bias: (T, 2D) -> (T, F)."""
        return self.kernels.swiglu_matmul(h_TF, self.weight)


class RMSNorm(nn.Cell):
    """Root-mean-square norm over the last dim, with a weight."""

    def __init__(self, size: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.eps = eps
        self.weight = empty(size)

    def construct(self, x_TD: Tensor) -> Tensor:
        return self.kernels.rms_norm(x_TD, self.weight, self.eps)


class Embedding(nn.Cell):
    """Token numbers to vectors: (T,), the weight or what stands for it (V, D) -> (T, D)."""

    def __init__(self, vocab_size: int, hidden: int, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = empty(vocab_size, hidden)

    def construct(self, token_T: Tensor, weight_VD: Tensor) -> Tensor:
        return self.kernels.embed(token_T, weight_VD)


class FeedForward(nn.Cell):
    """SwiGLU (Shazeer, 2020): w2(silu(w1 x) * w3 x), with w1 and w3 as one matrix: (T, D) -> (T, D)."""

    def __init__(self, hidden: int, ffn: int, kernels: Kernels) -> None:
        super().__init__()
        self.w13 = Linear(hidden, 2 * ffn, kernels)
        self.w2 = Linear(ffn, hidden, kernels)

    def construct(self, x_TD: Tensor) -> Tensor:
        return self.w2.of_swiglu(self.w13(x_TD))


def initial_value(name: str, shape: tuple[int, ...], *, std: float, num_layers: int, seed: int) -> NDArray[np.float32]:
    """Weights to start from, a pure function of (seed, name), so that no layout or order changes them.

    Norms are 1, biases and sinks 0. Matrices are normal with `std`; those that write into the residual stream are
    smaller by sqrt(2 * num_layers) (Radford et al., 2019, section 2.3).
    """
    if "norm" in name:
        return np.ones(shape, np.float32)
    if name.endswith(("bias", "sinks")):
        return np.zeros(shape, np.float32)
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    into_residual = name.endswith((".out.weight", ".w2.weight", ".w2"))
    scale = std / np.sqrt(2 * num_layers) if into_residual else std
    values: NDArray[np.float32] = generator.standard_normal(shape, np.float32) * np.float32(scale)
    return values
