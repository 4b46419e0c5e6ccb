"""Dtypes by name, and constants that are made while a graph is compiled."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore.ops import constexpr

Tensor = Any
DTYPES = {"fp32": ms.float32, "fp16": ms.float16, "bf16": ms.bfloat16}


@constexpr
def numbers(size: int) -> Tensor:
    """0 .. size - 1 as int32, made while the graph is compiled (ops.arange does not always infer its type there)."""
    return ms.Tensor(np.arange(size, dtype=np.int32))
