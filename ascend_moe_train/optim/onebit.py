"""1-bit Adam once its second moments are fixed (Tang et al., 2021, algorithm 1): it sends momenta, not gradients."""

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.model.each import for_each, picked
from ascend_moe_train.optim.adamw import AdamW, verdict

Tensor = Any


class OneBitAdam(nn.Cell):
    """Goes on from the weights and moments of `adam`, and is called as that is.

    Of the tensors in `buckets`, by their places, the gradients are those of this rank alone; `means` bring the momenta
    together, each those of a bucket, flat: (x_L, after) -> (mean over ranks, what was lost ...), and remember what was
    lost of a step that is applied. Their second moments stay as they are. The other tensors are updated by Adam.

    Gradients are clipped before they come to the momenta, and all by one norm, for which `square` is near that of the
    sum. What the ranks have instead is longer the less they agree, and would clip by up to the root of their number
    too much.
    """

    def __init__(self, adam: AdamW, buckets: Sequence[tuple[int, ...]], means: Sequence[Any], num_ranks: int) -> None:
        super().__init__()
        self.adam, self.kernels, self.names = adam, adam.kernels, adam.names
        self.first, self.second, self.weights = adam.first, adam.second, adam.weights
        self.buckets, self.means = tuple(buckets), nn.CellList(list(means))
        sent = set(chain.from_iterable(buckets))
        self.others = tuple(i for i in range(len(adam.names)) if i not in sent)
        self.num_ranks = float(num_ranks)
        self.sizes = tuple(tuple(prod(self.weights[i].shape) for i in bucket) for bucket in buckets)
        self.shapes = tuple(tuple(tuple(self.weights[i].shape) for i in bucket) for bucket in buckets)
        # of an update that takes momenta over, and leaves second moments alone: beta1 0, beta2 1
        self.fixed = ms.Tensor(np.array([0, 1, 1, 0], np.float32))
        self.one = ms.Tensor(np.ones(1, np.float32))

    def construct(
        self, grads: tuple[Tensor, ...], square: Tensor, loss: Tensor, control: Tensor
    ) -> tuple[Tensor, Tensor]:
        norm, applied = verdict(square, loss, control)
        scalars = self.adam.scalars(norm, applied, control)
        tokens: tuple[Tensor, ...] = ()
        if len(self.others) > 0:
            tokens = tokens + self.updated(self.others, scalars, picked(grads, self.others))
        live = ops.concat((control[0:1], self.fixed, control[1:3], self.one))
        taken = ops.select(ops.broadcast_to(applied, live.shape), live, self.adam.keep)
        after: Any = grads
        for i in range(len(self.buckets)):
            places = self.buckets[i]
            momenta = ops.partial(self.momentum, scalars)
            flat = for_each(momenta, picked(self.first, places), picked(grads, places))
            mean_L, *lost = self.means[i](ops.concat(flat) if len(flat) > 1 else flat[0], after)
            after = self.means[i].remember(applied, *lost)
            pieces = ops.split(mean_L, self.sizes[i], 0) if len(places) > 1 else (mean_L,)
            shaped: tuple[Tensor, ...] = ()
            for j in range(len(places)):
                shaped = (*shaped, ops.reshape(pieces[j], self.shapes[i][j]))
            tokens = (*tokens, *self.updated(places, taken, shaped), after)
        return ops.depend(norm, tokens), ops.cast(applied, ms.float32)

    def momentum(self, scalars: Tensor, first: Tensor, grad: Tensor) -> Tensor:
        """This rank's of one tensor, flat; the mean over the ranks is that of the summed gradient."""
        own = scalars[1] * first + scalars[3] * (grad * (scalars[7] * self.num_ranks))
        return ops.reshape(own, (-1,))

    def updated(self, places: tuple[int, ...], scalars: Tensor, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tokens of the updates of the tensors at these places."""
        adam = self.adam
        chosen = [picked(each, places) for each in (adam.decays, adam.weights, adam.first, adam.second)]
        return for_each(ops.partial(adam.update, scalars), chosen[0], chosen[1], chosen[2], chosen[3], grads)
