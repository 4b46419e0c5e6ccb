"""SwiGLU experts over rows sorted by expert.

M rows, D hidden, F ffn, E experts; expert e owns the next count_E[e] rows, which may be none. The weights are stored
for row-vector products, the transpose of a dense layer's: w13 (E, D, 2F) with gate columns then up, w2 (E, F, D).
"""

from collections.abc import Iterator

import numpy as np

from tests.oracle.arrays import F64, I64, in_float64
from tests.oracle.ffn import swiglu, swiglu_vjp


@in_float64
def grouped_swiglu(x_MD: F64, count_E: I64, w13: F64, w2: F64) -> F64:
    """Return y_MD: each row through its own expert."""
    y_MD = np.zeros_like(x_MD)
    for e, rows in _rows_by_expert(count_E):
        y_MD[rows] = swiglu(x_MD[rows], w13[e].T, w2[e].T)
    return y_MD


@in_float64
def grouped_swiglu_vjp(d_y_MD: F64, x_MD: F64, count_E: I64, w13: F64, w2: F64) -> tuple[F64, F64, F64]:
    """Return (d_x_MD, d_w13, d_w2); an expert without rows gets zeros."""
    d_x_MD, d_w13, d_w2 = np.zeros_like(x_MD), np.zeros_like(w13), np.zeros_like(w2)
    for e, rows in _rows_by_expert(count_E):
        d_x_MD[rows], d_w13_e, d_w2_e = swiglu_vjp(d_y_MD[rows], x_MD[rows], w13[e].T, w2[e].T)
        d_w13[e], d_w2[e] = d_w13_e.T, d_w2_e.T
    return d_x_MD, d_w13, d_w2


def _rows_by_expert(count_E: I64) -> Iterator[tuple[int, slice]]:
    start = 0
    for e, count in enumerate(count_E.tolist()):
        yield e, slice(start, start + count)
        start += count
