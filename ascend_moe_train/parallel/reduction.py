"""`optim.reduction.Reduction` for many ranks: gradients summed in buckets, weights put together from their parts.

n ranks of a bucket's group, P trained tensors of the model. Inside a graph all collectives here are in series: the
first waits for all gradients, each other one for the one before.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.model.each import for_each, picked
from ascend_moe_train.parallel.buckets import Bucket, Share
from ascend_moe_train.parallel.comm import Collectives, Tensor, Wire
from ascend_moe_train.parallel.compressed import LowRankBucket, TwoStageBucket
from ascend_moe_train.parallel.contents import gradients_in
from ascend_moe_train.parallel.early import AwaitedBucket, EarlySums
from ascend_moe_train.parallel.flat import Apart, joined
from ascend_moe_train.parallel.scaled import summing
from ascend_moe_train.parallel.sketch import Sketch
from ascend_moe_train.parallel.zero_costs import SKETCH_COLUMNS, ZeroPlan

TINY = 1e-30


class Late:
    """What a parameter holds once something else is there.

    `ops.depend` on a parameter itself is not that: MindSpore may take the values of two such for one, whatever they
    depend on (2.10). A product with a one that depends is exact, and reads the parameter when the one is there.
    """

    def __init__(self) -> None:
        self.one = ms.Tensor(np.ones(1, np.float32))

    def value(self, after: Any, parameter: Tensor) -> Tensor:
        """Its bits."""
        return parameter * ops.depend(self.one, after)


class _ReduceBucket(nn.Cell):
    """Gradients of P tensors -> of those in the bucket the sums over the group: whole, or this rank's flat parts.

    For parts, each gradient is filled up with zeros and laid out as (n, part); the bucket is all of them side by side.
    """

    def __init__(self, bucket: Bucket, shares: Sequence[Share], collectives: Collectives, wire: Wire | None) -> None:
        super().__init__()
        first = shares[bucket[0]]
        is_whole = first.form == "whole"
        make = collectives.all_reduce if is_whole else collectives.reduce_scatter
        group = first.group.carrying(gradients_in(wire))
        self.sum_over_group = summing(collectives, group, make(group, wire=wire), wire)
        self.places, self.num_rows = bucket, 1 if is_whole else first.group.size
        shapes = [shares[i].updated_shape for i in bucket]
        self.num_zeros = tuple(
            self.num_rows * prod(shape) - shares[i].size for i, shape in zip(bucket, shapes, strict=True)
        )
        self.apart = Apart(shapes)

    def construct(self, grads: tuple[Tensor, ...], after: Any) -> tuple[Tensor, ...]:
        rows = for_each(self.row, self.num_zeros, picked(grads, self.places))
        x = ops.reshape(_columns_side_by_side(rows), (-1,))
        return self.apart(self.sum_over_group(ops.depend(x, after)))

    def row(self, num_zeros: int, grad: Tensor) -> Tensor:
        """One gradient as (n, part)."""
        flat = ops.reshape(grad, (-1,))
        if num_zeros > 0:
            flat = ops.concat((flat, ops.zeros((num_zeros,), flat.dtype)))
        return ops.reshape(flat, (self.num_rows, -1))


class _RepeatedBucket(nn.Cell):
    """Gradients of P tensors -> those in the bucket, with the last rows summed over neighbours."""

    def __init__(self, bucket: Bucket, shares: Sequence[Share], collectives: Collectives, wire: Wire | None) -> None:
        super().__init__()
        neighbours: Any = shares[bucket[0]].neighbours
        neighbours = neighbours.carrying(gradients_in(wire))
        self.sum_over_neighbours = summing(collectives, neighbours, collectives.all_reduce(neighbours, wire=wire), wire)
        self.places, self.starts = bucket, tuple(shares[i].size - shares[i].num_repeated for i in bucket)
        self.apart = Apart([(shares[i].num_repeated,) for i in bucket])

    def construct(self, grads: tuple[Tensor, ...], after: Any) -> tuple[Tensor, ...]:
        grads = picked(grads, self.places)
        x = joined(for_each(self.repeated, self.starts, grads))
        sums = self.apart(self.sum_over_neighbours(ops.depend(x, after)))
        return for_each(self.with_sum, self.starts, grads, sums)

    def repeated(self, start: int, grad: Tensor) -> Tensor:
        """What of one gradient neighbours have too: flat."""
        return ops.reshape(grad, (-1,))[start:]

    def with_sum(self, start: int, grad: Tensor, summed: Tensor) -> Tensor:
        """One gradient with that."""
        return ops.reshape(ops.concat((ops.reshape(grad, (-1,))[:start], summed)), grad.shape)


class _GatherBucket(nn.Cell):
    """Flat parts of some tensors, by their places among those in parts -> of those in the bucket the whole tensors."""

    def __init__(self, bucket: Bucket, places: Mapping[int, int], shares: Sequence[Share], collectives: Collectives):
        super().__init__()
        group = shares[bucket[0]].group
        self.gather, self.num_rows, self.late = collectives.all_gather(group.carrying("weights")), group.size, Late()
        self.places = tuple(places[i] for i in bucket)
        self.parts = tuple(shares[i].part for i in bucket)
        self.shapes = tuple(shares[i].shape for i in bucket)
        # a cut that takes everything costs more than all the rest
        self.cuts = tuple(s.size if s.part * group.size > s.size else 0 for s in (shares[i] for i in bucket))
        self.numbers = tuple(range(len(bucket)))

    def construct(self, parts: tuple[Tensor, ...], after: Any) -> tuple[Tensor, ...]:
        late = for_each(ops.partial(self.late.value, after), picked(parts, self.places))
        x = ops.reshape(self.gather(joined(late)), (self.num_rows, -1))
        columns = ops.split(x, self.parts, 1) if len(self.parts) > 1 else (x,)
        return for_each(self.whole, self.numbers, self.cuts, columns)

    def whole(self, number: int, cut: int, column: Tensor) -> Tensor:
        """One tensor, without the zeros at its end."""
        flat = ops.reshape(column, (-1,))
        if cut > 0:
            flat = flat[:cut]
        return ops.reshape(flat, self.shapes[number])


class ShardedReduction(nn.Cell):
    """See `optim.reduction.Reduction`. Gradients are those of the plan's trained tensors, in their order; what `across`
    returns is of the plan's `names`."""

    def __init__(
        self,
        plan: ZeroPlan,
        collectives: Collectives,
        *,
        parts: Sequence[Any],
        weights: Mapping[int, Any],
        figure_weights: Sequence[float],
        leaves_momenta: bool = False,
        early: EarlySums | None = None,
    ) -> None:
        """`parts` are what the optimizer updates of the tensors in parts, in their order, if that is on the device;
        `weights` what the model reads of them, by their place among the trained. `leaves_momenta`: gradients whose
        momenta are sent stay as they are, and the norm of their sum is that of a `Sketch`. `early` has the sums of the
        plan's early buckets."""
        super().__init__()
        shares, buckets, wire = plan.trained, plan.buckets, plan.wire
        self.in_micro, self.num_figures = plan.stage > 1, len(figure_weights)
        self.repeated = nn.CellList([_RepeatedBucket(b, shares, collectives, wire) for b in buckets.repeated])
        left = [bucket for bucket in buckets.reduced if leaves_momenta and plan.sends_momenta(bucket)]
        reduced = [bucket for bucket in buckets.reduced if bucket not in left]
        self.reduced = nn.CellList([_reducer(plan, bucket, collectives, early) for bucket in reduced])
        self.repeated_order = _order(buckets.repeated, len(shares))
        self.reduced_order = _order(reduced, len(shares))
        self.cuts = tuple(
            share.num_counted if 0 < share.num_counted < prod(share.updated_shape) else 0 for share in shares
        )
        places = {share.name: i for i, share in enumerate(shares)}
        counts = {share.name: share.weight if share.num_counted else 0.0 for share in shares}
        self.place_P = ms.Tensor(np.array([places.get(name, len(shares)) for name in plan.names], np.int32))
        self.weight_P = ms.Tensor(np.array([counts.get(name, 0.0) for name in plan.names], np.float32))
        of_left = {shares[i].name for i in chain.from_iterable(left)}
        self.is_left_P = ms.Tensor(np.array([name in of_left for name in plan.names], np.float32))
        self.sketch = Sketch(left, shares) if left else None
        self.figure_weights = ms.Tensor(np.array(figure_weights, np.float32))
        self.nothing = ms.Tensor(np.zeros(1, np.float32))
        self.sum_over_world = collectives.all_reduce(collectives.world.carrying("figures"))
        among_parts = {i: place for place, i in enumerate(weights)}
        self.published = nn.CellList([_GatherBucket(b, among_parts, shares, collectives) for b in buckets.published])
        self.parts = ms.ParameterTuple(list(parts))
        self.weights = ms.ParameterTuple([weights[i] for i in chain.from_iterable(buckets.published)])

    def of_micro(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Summed over ranks, or as they are."""
        return self.summed(grads) if self.in_micro else grads

    def of_step(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Summed over ranks, if they are not yet."""
        return grads if self.in_micro else self.summed(grads)

    def summed(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Over neighbours, then over the groups, bucket after bucket."""
        after = grads
        found: tuple[Tensor, ...] = ()
        for bucket in self.repeated:
            after = bucket(grads, after)
            found = found + after
        found = found + grads
        grads = picked(found, self.repeated_order)
        found = ()
        for bucket in self.reduced:
            after = bucket(grads, after)
            found = found + after
        found = found + grads
        return picked(found, self.reduced_order)

    def counted(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Without what a neighbour counts."""
        return for_each(_first, self.cuts, grads)

    def across(self, figures: Tensor, squares: Tensor, grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """One all_reduce over the world, in fp32. Of gradients that are not summed, tensors have their shares of the
        sketch's square by the squares of what the ranks have."""
        square_P = ops.gather(ops.concat((squares, self.nothing)), self.place_P, 0) * self.weight_P
        own = (figures * self.figure_weights, square_P)
        if self.sketch is None:
            sums = self.sum_over_world(ops.concat(own))
            return sums[: self.num_figures], sums[self.num_figures :]
        sums = self.sum_over_world(ops.concat((*own, self.sketch(grads))))
        figures, square_P, sketch = ops.split(sums, (self.num_figures, len(self.is_left_P), SKETCH_COLUMNS))
        left_P = square_P * self.is_left_P
        share_P = left_P / ops.maximum(ops.sum(left_P), TINY)
        return figures, square_P - left_P + share_P * ops.sum(sketch * sketch)

    def publish(self, done: Tensor) -> Tensor:
        """Puts weights together from the parts that were updated, and gives them to the model."""
        return self.bring(self.parts, done)

    def bring(self, parts: tuple[Tensor, ...], done: Tensor) -> Tensor:
        """The same, from given parts."""
        after: Any = done
        place = 0
        for bucket in self.published:
            values = bucket(parts, after)
            after = for_each(ops.assign, self.weights[place : place + len(values)], values)
            place = place + len(values)
        return ops.depend(done, after)


def _reducer(plan: ZeroPlan, bucket: Bucket, collectives: Collectives, early: EarlySums | None) -> nn.Cell:
    shares = plan.trained
    if early is not None and plan.is_early(bucket):
        return AwaitedBucket(bucket, shares, early)
    if plan.is_compressed(bucket):
        match plan.compress.method:
            case "int8":
                return TwoStageBucket(bucket, shares, collectives, plan.compress)
            case "powersgd":
                return LowRankBucket(bucket, shares, collectives, plan.compress)
    return _ReduceBucket(bucket, shares, collectives, plan.wire)


def _order(buckets: Sequence[Bucket], count: int) -> tuple[int, ...]:
    """Where each of `count` tensors is among the results of all buckets followed by the tensors as they were."""
    results = list(chain.from_iterable(buckets))
    found = {place: position for position, place in enumerate(results)}
    return tuple(found.get(place, len(results) + place) for place in range(count))


def _first(count: int, grad: Tensor) -> Tensor:
    return ops.reshape(grad, (-1,))[:count] if count > 0 else grad


def _columns_side_by_side(rows: tuple[Tensor, ...]) -> Tensor:
    return ops.concat(rows, 1) if len(rows) > 1 else rows[0]
