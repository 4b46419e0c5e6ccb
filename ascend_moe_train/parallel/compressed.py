"""Sums over ranks of less than all bits; what is lost is added to the next sum (error feedback).

n ranks; L elements of a flat tensor, of which each rank brings together p (the last ranks' end with zeros), in blocks:
k of them on a rank and K = n k in all, of B elements each.
"""

import zlib
from collections.abc import Sequence
from math import prod
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.model.each import for_each, picked
from ascend_moe_train.model.layers import empty
from ascend_moe_train.optim.codecs import Codec, Int8Blocks
from ascend_moe_train.parallel.buckets import Bucket, Share
from ascend_moe_train.parallel.comm import Collectives, Group, Tensor
from ascend_moe_train.parallel.compress_costs import TwoStageSizes, is_low_rank
from ascend_moe_train.parallel.config import CompressConfig
from ascend_moe_train.parallel.contents import COMPRESSED, Content
from ascend_moe_train.parallel.flat import Apart, joined, side_by_side


class TwoStage(nn.Cell):
    """(x_L, after) -> (mean of x_L over the ranks, what is lost here of x_L and of the own part, for `remember`).

    Every rank sends each other one its part of x as codes, puts its own part together, and sends that to all as codes;
    what a code does not say is added to what is coded next in its place (Tang et al., 2021, algorithm 1).
    """

    def __init__(self, collectives: Collectives, group: Group, size: int, codec: Codec, block: int, name: str) -> None:
        super().__init__()
        sizes = TwoStageSizes(size=size, ranks=group.size, block=block)
        self.codec, self.block, self.num_ranks, self.size = codec, block, group.size, size
        self.exchange, self.gather = collectives.all_to_all(group), collectives.all_gather(group)
        self.of_name = name
        self.lost = empty(size, is_trained=False, name=f"lost.{name}")
        self.lost_of_part = empty(sizes.part, is_trained=False, name=f"lost_of_part.{name}")
        self.num_zeros = sizes.part * group.size - size
        self.counted = max(0, min(sizes.part, size - group.index * sizes.part))
        self.is_counted = self.counted == sizes.part
        self.first_k1 = ms.Tensor(np.arange(sizes.part // block, dtype=np.int32)[:, None] * block)
        self.place_1B = ms.Tensor(np.arange(block, dtype=np.int32)[None])

    def construct(self, x_L: Tensor, after: Any) -> tuple[Tensor, Tensor, Tensor]:
        sent_L = x_L + self.lost
        filled = ops.concat((sent_L, ops.zeros((self.num_zeros,), ms.float32))) if self.num_zeros > 0 else sent_L
        codes, scale_K = self.codec.encode(ops.reshape(filled, (-1, self.block)))
        lost_L = sent_L - self.flat(codes, scale_K)
        codes = self.exchange(ops.depend(codes, after))
        scale_K = self.exchange(ops.depend(scale_K, codes))
        parts = ops.reshape(self.codec.decode(codes, scale_K), (self.num_ranks, -1, self.block))
        part_kB = self.of_elements(ops.mean(parts, 0) + ops.reshape(self.lost_of_part, (-1, self.block)))
        codes, scale_k = self.codec.encode(part_kB)
        lost_kB = self.of_elements(part_kB - self.codec.decode(codes, scale_k))
        codes = self.gather(codes)
        scale_K = self.gather(ops.depend(scale_k, codes))
        return self.flat(codes, scale_K), lost_L, ops.reshape(lost_kB, (-1,))

    def flat(self, codes: Tensor, scale_K: Tensor) -> Tensor:
        """All blocks -> (L,)."""
        return ops.reshape(self.codec.decode(codes, scale_K), (-1,))[: self.size]

    def of_elements(self, x_kB: Tensor) -> Tensor:
        """Zero beyond the last element: a code of signs has no zero."""
        if self.is_counted:
            return x_kB
        return x_kB * ops.cast(self.first_k1 + self.place_1B < self.counted, ms.float32)

    @property
    def remembered(self) -> dict[str, Any]:
        """What is lost until now, under names of its own."""
        return {f"lost.{self.of_name}": self.lost, f"lost_of_part.{self.of_name}": self.lost_of_part}

    def remember(self, is_good: Tensor, lost_L: Tensor, lost_p: Tensor) -> Tensor:
        """Keeps what was lost if `is_good` (1,), the same on all ranks. -> a token."""
        return _kept_if(is_good, (self.lost, self.lost_of_part), (lost_L, lost_p))


class TwoStageBucket(nn.Cell):
    """Gradients of all tensors, and after what -> of those in the bucket the sums over the group, as int8 blocks. A sum
    that is not finite leaves what was lost before."""

    def __init__(self, bucket: Bucket, shares: Sequence[Share], collectives: Collectives, config: CompressConfig):
        super().__init__()
        self.places, first = bucket, shares[bucket[0]]
        size = sum(shares[i].size for i in bucket)
        group = first.group.carrying(COMPRESSED[config.method])
        self.mean = TwoStage(collectives, group, size, Int8Blocks(), config.block, first.name)
        self.num_ranks, self.apart = float(first.group.size), Apart([shares[i].shape for i in bucket])

    @property
    def remembered(self) -> dict[str, Any]:
        """See TwoStage."""
        return self.mean.remembered

    def construct(self, grads: tuple[Tensor, ...], after: Any) -> tuple[Tensor, ...]:
        mean_L, lost_L, lost_p = self.mean(side_by_side(picked(grads, self.places)), after)
        done = self.mean.remember(_is_finite(mean_L), lost_L, lost_p)
        return self.apart(ops.depend(mean_L, done) * self.num_ranks)


class LowRankBucket(nn.Cell):
    """Gradients of all tensors, and after what -> of those in the bucket the sums over the group; matrices as products
    of two of r columns (Vogels et al., 2019, algorithms 1 and 2), with the last step's second factor to begin with. A
    sum that is not finite leaves factors and what was lost as before."""

    def __init__(self, bucket: Bucket, shares: Sequence[Share], collectives: Collectives, config: CompressConfig):
        super().__init__()
        group, self.rank = shares[bucket[0]].group, config.rank
        own = [shares[i] for i in bucket]
        low = [share for share in own if is_low_rank(share.shape, config.rank)]
        self.matrices = tuple(i for i, share in zip(bucket, own, strict=True) if share in low)
        self.others = tuple(i for i in bucket if i not in self.matrices)
        content: Content = COMPRESSED[config.method] if low else "gradients"
        self.sum, self.share_of_sum = collectives.all_reduce(group.carrying(content)), 1.0 / group.size
        self.num_ranks = float(group.size)
        factors = [empty(prod(s.shape[1:]), config.rank, is_trained=False, name=f"factor.{s.name}") for s in low]
        for factor, share in zip(factors, low, strict=True):
            factor.set_data(ms.Tensor(first_factor(share.name, tuple(factor.shape))))
        self.factors = ms.ParameterTuple(factors)
        self.lost = ms.ParameterTuple([empty(*s.shape, is_trained=False, name=f"lost.{s.name}") for s in low])
        self.of_names = tuple(share.name for share in low)
        first = [(share.shape[0], config.rank) for share in low]
        self.apart_first = Apart([*first, *(shares[i].shape for i in self.others)])
        self.apart_second = Apart([tuple(factor.shape) for factor in factors])
        order = [*self.matrices, *self.others]
        self.order = tuple(order.index(i) for i in bucket)

    def construct(self, grads: tuple[Tensor, ...], after: Any) -> tuple[Tensor, ...]:
        if len(self.matrices) == 0:
            return self.apart_first(self.sum(ops.depend(side_by_side(picked(grads, self.others)), after)))
        x_AB = for_each(self.with_lost, picked(grads, self.matrices), self.lost)
        p_Ar = for_each(ops.matmul, x_AB, self.factors)
        sums = self.apart_first(self.sum(ops.depend(side_by_side(p_Ar + picked(grads, self.others)), after)))
        p_Ar = for_each(self.orthogonal, sums[: len(self.matrices)])
        q_Br = for_each(self.second, x_AB, p_Ar)
        q_Br = self.apart_second(self.sum(side_by_side(q_Br)) * self.share_of_sum)
        mean_AB = for_each(self.product, p_Ar, q_Br)
        is_good = _is_finite(side_by_side(q_Br))
        lost_AB = for_each(ops.sub, x_AB, mean_AB)
        done = _kept_if(is_good, self.factors + self.lost, q_Br + lost_AB)
        found = for_each(ops.partial(self.of_all, done), mean_AB) + sums[len(self.matrices) :]
        return picked(found, self.order)

    @property
    def remembered(self) -> dict[str, Any]:
        """Second factors, and what is lost until now, under names of their own."""
        lost = {f"lost.{name}": each for name, each in zip(self.of_names, self.lost, strict=True)}
        return lost | {f"factor.{name}": each for name, each in zip(self.of_names, self.factors, strict=True)}

    def with_lost(self, grad: Tensor, lost: Tensor) -> Tensor:
        """One gradient with what was lost before of it."""
        return grad + lost

    def orthogonal(self, p_Ar: Tensor) -> Tensor:
        """Its columns made orthonormal, one after the other (modified Gram-Schmidt)."""
        columns: tuple[Tensor, ...] = ()
        for j in range(self.rank):
            column = p_Ar[:, j : j + 1]
            for other in columns:
                column = column - other * ops.sum(other * column)
            columns = (*columns, column / (ops.sqrt(ops.sum(column * column)) + 1e-20))
        return ops.concat(columns, 1) if self.rank > 1 else columns[0]

    def second(self, x_AB: Tensor, p_Ar: Tensor) -> Tensor:
        """The other factor of this rank's matrix."""
        return ops.matmul(x_AB.T, p_Ar)

    def product(self, p_Ar: Tensor, q_Br: Tensor) -> Tensor:
        """What two factors say."""
        return ops.matmul(p_Ar, q_Br.T)

    def of_all(self, after: Tensor, mean_AB: Tensor) -> Tensor:
        """The sum over the ranks, from their mean."""
        return ops.depend(mean_AB, after) * self.num_ranks


def first_factor(name: str, shape: tuple[int, ...]) -> Any:
    """Normal numbers that are the same on every rank."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return generator.standard_normal(shape, np.float32)


def _is_finite(x: Tensor) -> Tensor:
    return ops.reshape(ops.isfinite(ops.sum(ops.abs(x))), (1,))


def _kept_if(is_good: Tensor, parameters: tuple[Any, ...], values: tuple[Tensor, ...]) -> Tensor:
    return joined(for_each(ops.partial(_keep_if, is_good), parameters, values))


def _keep_if(is_good: Tensor, parameter: Any, value: Tensor) -> Tensor:
    kept = ops.select(ops.broadcast_to(is_good, value.shape), value, parameter)
    return ops.reshape(ops.assign(parameter, kept), (-1,))[:1]
