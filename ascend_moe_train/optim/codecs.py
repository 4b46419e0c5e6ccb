"""Codes of few bits for fp32 numbers, inside graphs.

K blocks of B elements, each with a scale of its own.
"""

from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import ops

Tensor = Any
BYTE_BITS = 8
LARGEST = 127.0


class Codec(Protocol):
    """Blocks <-> codes and scales."""

    def encode(self, x_KB: Tensor) -> tuple[Tensor, Tensor]:
        """-> codes (K, bytes of a block), scales (K,) fp32."""

    def decode(self, codes: Tensor, scale_K: Tensor) -> Tensor:
        """-> (K, B)."""


class Int8Blocks:
    """Each element as the nearest of 255 multiples of a step, which is the block's largest magnitude / 127. A block
    with a number that is not finite has none that is."""

    def __init__(self) -> None:
        # primitives, which backward passes may call
        self.max, self.abs, self.sum = ops.ReduceMax(), ops.Abs(), ops.ReduceSum()
        self.select, self.ones_like = ops.Select(), ops.OnesLike()

    def encode(self, x_KB: Tensor) -> tuple[Tensor, Tensor]:
        """See Codec."""
        # a maximum on CPUs passes NaN over, and a code has none
        scale_K = self.max(self.abs(x_KB), 1) / LARGEST + self.sum(x_KB * 0.0, 1)
        # of a block of zeros
        step_K = self.select(scale_K > 0, scale_K, self.ones_like(scale_K))
        return ops.cast(ops.round(x_KB / ops.reshape(step_K, (-1, 1))), ms.int8), scale_K

    def decode(self, codes: Tensor, scale_K: Tensor) -> Tensor:
        """See Codec."""
        return ops.cast(codes, ms.float32) * ops.reshape(scale_K, (-1, 1))


class SignBits:
    """Each element as its sign, 8 of them in a byte, times the block's mean magnitude (Tang et al., 2021, section 4).
    B is a multiple of 8."""

    def __init__(self) -> None:
        self.places = ms.Tensor(2 ** np.arange(BYTE_BITS).reshape(1, 1, BYTE_BITS), ms.float32)

    def encode(self, x_KB: Tensor) -> tuple[Tensor, Tensor]:
        """See Codec."""
        bits = ops.cast(ops.reshape(x_KB, (x_KB.shape[0], -1, BYTE_BITS)) >= 0, ms.float32)
        return ops.cast(ops.sum(bits * self.places, -1), ms.uint8), ops.mean(ops.abs(x_KB), 1)

    def decode(self, codes: Tensor, scale_K: Tensor) -> Tensor:
        """See Codec."""
        # in fp32, which holds all bytes exactly
        shifted = ops.floor(ops.expand_dims(ops.cast(codes, ms.float32), -1) / self.places)
        bits = shifted - 2.0 * ops.floor(shifted / 2.0)
        return (2.0 * ops.reshape(bits, (codes.shape[0], -1)) - 1.0) * ops.reshape(scale_K, (-1, 1))
