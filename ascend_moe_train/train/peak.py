"""What the device could do at best, to judge model FLOP/s by."""

import time

import mindspore as ms
import numpy as np
from mindspore import ops

_SIZE = 1024
_ROUNDS = 6


def measured_cpu_peak_flops_per_s() -> float:
    """The best of a few fp32 matrix products of 1024 x 1024 with MindSpore's own library, on all cores."""
    x = ms.Tensor(np.full((_SIZE, _SIZE), 0.5, np.float32))
    best_s = float("inf")
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        ops.matmul(x, x).asnumpy()
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * _SIZE**3 / best_s
