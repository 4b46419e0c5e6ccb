"""This machine's fp32 matrix product on all cores, by NumPy and by MindSpore's oneDNN: one JSON line.

oneDNN's `dnnl_sgemm`, which our kernels call too, works on the thread that calls it: blocks of rows are given to a
thread of each core as it gets free.
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

SIZE, BLOCK_ROWS, ROUNDS = 2048, 128, 8


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

    def block(first: int) -> None:
        a, out = x[first:].ctypes.data, y[first:].ctypes.data
        sgemm(b"N", b"N", BLOCK_ROWS, SIZE, SIZE, 1.0, a, SIZE, x.ctypes.data, SIZE, 0.0, out, SIZE)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        onednn = best_rate(lambda: list(pool.map(block, range(0, SIZE, BLOCK_ROWS))))
    print(json.dumps({"NumPy": best_rate(lambda: x @ x), "oneDNN": onednn}))


if __name__ == "__main__":
    main()
