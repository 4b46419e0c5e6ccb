"""What is left of rows of numbers that travel in fewer bits. M rows, D numbers of each."""

import ml_dtypes
import numpy as np

from tests.oracle.arrays import F64, in_float64
from tests.oracle.compression import int8_blocks
from tests.oracle.moe import RowsWire, as_they_are


@in_float64
def in_bf16(x_MD: F64) -> F64:
    """8 bits of each number's mantissa."""
    return x_MD.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


@in_float64
def in_scaled_fp16(x_MD: F64) -> F64:
    """11 bits of the mantissa, fewer below 2^-29 of the row's largest magnitude: fp16 of x 2^e, where 2^e brings
    that to within 2^14 and 2^15, and is 2^100 at most. A row without a finite largest magnitude above zero has e 0."""
    top_M1 = np.abs(x_MD).max(axis=1, keepdims=True)
    is_good_M1 = np.isfinite(top_M1) & (top_M1 > 0)
    exponent_M1 = np.floor(np.log2(2.0**15 / np.where(is_good_M1, top_M1, 2.0**15)))
    factor_M1 = 2.0 ** np.minimum(exponent_M1, 100.0)
    return (x_MD * factor_M1).astype(np.float16).astype(np.float64) / factor_M1


WIRES: dict[str | None, RowsWire] = {None: as_they_are, "bf16": in_bf16, "fp16": in_scaled_fp16, "int8": int8_blocks}
