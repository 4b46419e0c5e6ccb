"""This machine's fp32 matrix product on all cores, by NumPy and by MindSpore's oneDNN: one JSON line.

oneDNN's `dnnl_sgemm`, which our kernels call too, works on the thread that calls it: each core has a thread with its
share of the rows, in one piece, with which it is fastest.
"""

import ctypes
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ascend_moe_train.model.kernels.build import dnnl_library

SIZE, ROUNDS = 2048, 8


def best_rate(product: Callable[[], object]) -> float:
    """FLOP/s of the fastest of some products."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        product()
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * SIZE**3 / best_s


def main() -> None:
    """Prints the best rate of each for products of 2048 x 2048."""
    x = np.random.default_rng(0).random((SIZE, SIZE), np.float32)
    y = np.empty_like(x)
    sgemm = ctypes.CDLL(str(dnnl_library())).dnnl_sgemm
    matrix: list[Any] = [ctypes.c_void_p, ctypes.c_int64]
    sizes: list[Any] = [ctypes.c_int64] * 3
    sgemm.argtypes = [ctypes.c_char, ctypes.c_char, *sizes, ctypes.c_float, *matrix, *matrix, ctypes.c_float, *matrix]

    cores = len(os.sched_getaffinity(0))
    share_rows = -(-SIZE // cores)

    def share(first: int) -> None:
        a, out, rows = x[first:].ctypes.data, y[first:].ctypes.data, min(share_rows, SIZE - first)
        sgemm(b"N", b"N", rows, SIZE, SIZE, 1.0, a, SIZE, x.ctypes.data, SIZE, 0.0, out, SIZE)

    with ThreadPoolExecutor(cores) as pool:
        onednn = best_rate(lambda: list(pool.map(share, range(0, SIZE, share_rows))))
    print(json.dumps({"NumPy": best_rate(lambda: x @ x), "oneDNN": onednn}))


if __name__ == "__main__":
    main()
