"""Token rows on their way to experts and back in fewer bits.

N rows of D elements. All of it is called in backward passes too: primitives only, see tests/unit/test_bprops.py.
"""

from typing import Protocol

import mindspore as ms
import ml_dtypes
import numpy as np
from mindspore import ops

from ascend_moe_train.optim.codecs import Codec, Int8Blocks
from ascend_moe_train.parallel.callback import host_operator
from ascend_moe_train.parallel.comm import Array, Operator, Tensor
from ascend_moe_train.parallel.config import ExpertWire
from ascend_moe_train.parallel.contents import Content, rows_in
from ascend_moe_train.parallel.scaled import LARGEST, PowerOfTwo
from ascend_moe_train.parallel.shaping import identity

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class RowsWire(Protocol):
    """How rows move."""

    content: Content
    """What they are on their way."""

    def moved(self, call: Operator, x_ND: Tensor, send_n: Tensor, recv_n: Tensor) -> Tensor:
        """What `call`, an all_to_all_v, makes of rows, in the dtype of x."""


class AsTheyAre:
    """In their own dtype: D elements."""

    content: Content = "expert rows"

    def moved(self, call: Operator, x_ND: Tensor, send_n: Tensor, recv_n: Tensor) -> Tensor:
        """See RowsWire."""
        return call(x_ND, send_n, recv_n)


class InBf16:
    """Rounded to bf16: 2 D bytes. To the host, which graphs give no bf16, as the 16 bits of it."""

    content: Content = "expert rows bf16"

    def __init__(self, *, on_host: bool) -> None:
        self.narrowed: Operator = _as_bf16
        self.widened: Operator = identity
        if on_host:
            self.narrowed = host_operator(_bits_of, _shape_of, ms.int16)
            self.widened = host_operator(_numbers_of, _shape_of, ms.float32)

    def moved(self, call: Operator, x_ND: Tensor, send_n: Tensor, recv_n: Tensor) -> Tensor:
        """See RowsWire."""
        bits_ND = self.narrowed(ops.cast(x_ND, ms.float32))
        return ops.cast(self.widened(call(bits_ND, send_n, recv_n)), x_ND.dtype)


class InCodes:
    """As codes, and after them 4 bytes for each row's scale."""

    def __init__(self, codec: Codec, content: Content) -> None:
        self.codec, self.content = codec, content

    def moved(self, call: Operator, x_ND: Tensor, send_n: Tensor, recv_n: Tensor) -> Tensor:
        """See RowsWire."""
        codes_ND, scale_N = self.codec.encode(ops.cast(x_ND, ms.float32))
        codes_ND = call(codes_ND, send_n, recv_n)
        scale_N1 = call(ops.depend(ops.reshape(scale_N, (-1, 1)), codes_ND), send_n, recv_n)
        return ops.cast(self.codec.decode(codes_ND, ops.reshape(scale_N1, (-1,))), x_ND.dtype)


class ScaledFp16:
    """A `Codec` of fp16 numbers, times a power of two for each row that brings its largest magnitude near the top of
    what fp16 holds: none overflows, and what is lost is small beside the row's largest. A number that is not finite
    stays so."""

    def __init__(self) -> None:
        self.max, self.abs, self.factors = ops.ReduceMax(), ops.Abs(), PowerOfTwo(LARGEST)

    def encode(self, x_KB: Tensor) -> tuple[Tensor, Tensor]:
        """See Codec."""
        factor_K = self.factors.of(self.max(self.abs(x_KB), 1))
        return ops.cast(x_KB * ops.reshape(factor_K, (-1, 1)), ms.float16), 1.0 / factor_K

    def decode(self, codes: Tensor, scale_K: Tensor) -> Tensor:
        """See Codec."""
        return ops.cast(codes, ms.float32) * ops.reshape(scale_K, (-1, 1))


def rows_wire(name: ExpertWire | None, *, on_host: bool) -> RowsWire:
    """That of `parallel.expert_wire`."""
    match name:
        case "bf16":
            return InBf16(on_host=on_host)
        case "fp16":
            return InCodes(ScaledFp16(), rows_in("fp16"))
        case "int8":
            return InCodes(Int8Blocks(), rows_in("int8"))
    return AsTheyAre()


def _shape_of(shape: list[int]) -> list[int]:
    return shape


def _bits_of(x_ND: Array, out_ND: Array) -> None:
    out_ND[...] = x_ND.astype(BFLOAT16).view(np.int16)


def _numbers_of(bits_ND: Array, out_ND: Array) -> None:
    out_ND[...] = bits_ND.view(BFLOAT16)


def _as_bf16(x_ND: Tensor) -> Tensor:
    return ops.cast(x_ND, ms.bfloat16)
