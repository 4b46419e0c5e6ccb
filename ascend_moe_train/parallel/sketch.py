"""The norm of a sum of gradients that no rank has, from few numbers of each rank's own.

L elements of a bucket in rows of k columns (m of them, the last filled up with zeros).
"""

import zlib
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.model.each import picked
from ascend_moe_train.parallel.buckets import Bucket, Share
from ascend_moe_train.parallel.comm import Tensor
from ascend_moe_train.parallel.flat import side_by_side
from ascend_moe_train.parallel.zero_costs import SKETCH_COLUMNS


class Sketch(nn.Cell):
    """grads -> (k,): the rows of all buckets, each times 1 or -1, added up.

    It is linear, so that the sum over ranks is the sketch of the summed gradient; and its squared norm is that of the
    gradient plus products of elements of one column with signs as random as theirs, which add up to nothing on average
    and to a share of about sqrt(2 / k) otherwise (Alon, Matias and Szegedy, 1996, section 2.2, for each column).
    """

    def __init__(self, buckets: Sequence[Bucket], shares: Sequence[Share]) -> None:
        super().__init__()
        self.buckets = tuple(buckets)
        sizes = [sum(shares[i].size for i in bucket) for bucket in buckets]
        self.num_zeros = tuple(-size % SKETCH_COLUMNS for size in sizes)
        self.signs = tuple(
            ms.Tensor(signs_of(shares[bucket[0]].name, -(-size // SKETCH_COLUMNS))[None])
            for bucket, size in zip(buckets, sizes, strict=True)
        )

    def construct(self, grads: tuple[Tensor, ...]) -> Tensor:
        found: Any = ops.zeros((1, SKETCH_COLUMNS), ms.float32)
        for i in range(len(self.buckets)):
            flat = side_by_side(picked(grads, self.buckets[i]))
            if self.num_zeros[i] > 0:
                flat = ops.concat((flat, ops.zeros((self.num_zeros[i],), ms.float32)))
            found = found + ops.matmul(self.signs[i], ops.reshape(flat, (-1, SKETCH_COLUMNS)))
        return ops.reshape(found, (-1,))


def signs_of(name: str, count: int) -> Any:
    """(m,) fp32, each 1 or -1: the same on every rank and in every run."""
    generator = np.random.default_rng(zlib.crc32(f"sketch of {name}".encode()))
    return generator.choice(np.array([-1, 1], np.float32), count)
