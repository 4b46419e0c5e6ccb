"""Some layers of the model with their losses, and the gradients of these. Shape letters: see kernels/protocol.py.

A micro-batch's inputs are tokens, targets, segments and positions (B, S), loss_weight (2,) and noise_seed (1,): see
`Transformer.construct`.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.model.each import for_each
from ascend_moe_train.model.transformer import Block, Transformer

Tensor = Any


class Chunk(nn.Cell):
    """Layers [first, stop) with what comes before the first and after the last of the model: (x_TD, inputs) -> (x_TD,
    total loss (1,), figures (5,), counts_LE); see `Transformer.losses`. The first chunk takes no notice of x_TD."""

    def __init__(self, model: Transformer, layers: tuple[int, int], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.model, self.is_first, self.is_last = model, is_first, is_last
        self.first, self.stop = layers

    def enter(self, x_TD: Tensor, tokens_BS: Tensor) -> Tensor:
        """What the first of the layers gets."""
        return self.model.embedded(tokens_BS) if self.is_first else x_TD

    def leave(self, x_TD: Tensor, routed: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        """What `construct` returns, from the output of the last of the layers and the router figures of all."""
        if self.is_last:
            losses = self.model.losses(self.model.norm(x_TD), routed, *inputs)
        else:
            nothing = ops.zeros((1,), ms.float32)
            losses = self.model.with_router_losses(nothing, nothing, routed, inputs[4])
        total, ce, further, aux, z, counts_LE, dropped = losses
        return x_TD, total, ops.concat((ce, further, aux, z, ops.cast(dropped, ms.float32))), counts_LE

    def through(
        self, x_TD: Tensor, tokens_BS: Tensor, segment_BS: Tensor, position_BS: Tensor, noise_seed: Tensor
    ) -> Any:
        """The layers alone: see `Transformer.through`."""
        x_TD = self.enter(x_TD, tokens_BS)
        return self.model.through(x_TD, self.first, self.stop, segment_BS, position_BS, noise_seed)

    def construct(self, x_TD: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        x_TD, routed, _ = self.through(x_TD, inputs[0], inputs[2], inputs[3], inputs[5])
        return self.leave(x_TD, routed, *inputs)


class _Objective:
    """What has the gradients of a chunk's own loss, times the loss scale, and of what lies behind the chunk."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk

    def of_input(self, x_TD: Tensor, dy_TD: Tensor, scale: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> (objective, figures, counts_LE), from what the chunk gets."""
        return self.of_results(self.chunk(x_TD, *inputs), dy_TD, scale)

    def of_results(self, results: tuple[Tensor, ...], dy_TD: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same, from what the chunk returns."""
        y_TD, total, figures, counts_LE = results
        value = total * scale
        if not self.chunk.is_last:
            value = value + ops.sum(ops.cast(y_TD, ms.float32) * ops.cast(dy_TD, ms.float32))
        return value, figures, counts_LE


class ChunkGradient(nn.Cell):
    """(x_TD, gradient of the output, loss scale, inputs) -> (gradient of x_TD or a zero, figures, counts_LE, gradients
    of `weights`) of a chunk: of its loss times the scale, and of what lies behind it."""

    def __init__(self, chunk: Chunk, weights: Sequence[Any], *, of_input: bool) -> None:
        super().__init__()
        self.chunk, self.of_input, self.of_weights = chunk, of_input and not chunk.is_first, len(weights) > 0
        self.nothing = ms.Tensor(np.zeros(1, np.float32))
        position = 0 if self.of_input else None
        self.run = ops.value_and_grad(_Objective(chunk).of_input, position, _listed(weights), has_aux=True)

    def construct(self, x_TD: Tensor, dy_TD: Tensor, scale: Tensor, *inputs: Tensor) -> tuple[Any, ...]:
        results, found = self.run(x_TD, dy_TD, scale, *inputs)
        # what happens to gradients waits for what only the figures need
        found = ops.depend(found, results)
        dx_TD = found if self.of_input else self.nothing
        grads = found if self.of_weights else ()
        if self.of_input and self.of_weights:
            dx_TD, grads = found
        return dx_TD, results[1], results[2], grads


class _Again(nn.Cell):
    """(gradients of a block's results, its inputs) -> (gradient of x_TD, those of `weights`). The block runs again."""

    def __init__(self, block: Block, weights: Sequence[Any]) -> None:
        super().__init__()
        self.held = [block]  # as a cell of this one its parameters would get other names
        self.of_weights, self.weights = len(weights) > 0, [_listed(weights)]
        self.gradient = ops.GradOperation(get_all=True, get_by_list=self.of_weights, sens_param=True)

    def run(self, x_TD: Tensor, segment_BS: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor, noise_seed: Tensor) -> Any:
        """Those of the block's results that have gradients."""
        x_TD, figures = self.held[0](x_TD, segment_BS, cos_BSZ, sin_BSZ, noise_seed)
        return (x_TD, figures[0], figures[1]) if len(figures) > 0 else x_TD

    def construct(self, sens: Any, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.of_weights:
            found, own = self.gradient(self.run, self.weights[0])(*inputs, sens)
            return found[0], own
        return self.gradient(self.run)(*inputs, sens)[0], ()


class KeepingForward(nn.Cell):
    """(x_TD, inputs) -> x_TD of a chunk, and all that `RecomputedGradient` needs of its first `count` blocks: the last
    one's output, inputs of all, and of those with experts the router figures that have gradients, and the others."""

    def __init__(self, chunk: Chunk, count: int) -> None:
        super().__init__()
        self.chunk, self.count = chunk, count
        self.is_moe = [chunk.model.layers[chunk.first + i].is_moe for i in range(count)]

    def through(self, x_TD: Tensor, *inputs: Tensor) -> tuple[Tensor, Any, Any, Any]:
        """-> output of the last of the blocks, inputs of all, and figures of both kinds, in pairs."""
        context = (inputs[2], *self.chunk.model.turns(inputs[3]), inputs[5])
        y_TD = self.chunk.enter(x_TD, inputs[0])
        kept: tuple[Tensor, ...] = ()
        graded: tuple[Tensor, ...] = ()
        counted: tuple[Tensor, ...] = ()
        for i in range(self.count):
            kept = (*kept, y_TD)
            y_TD, figures = self.chunk.model.layers[self.chunk.first + i](y_TD, *context)
            if self.is_moe[i]:
                graded, counted = (*graded, figures[0], figures[1]), (*counted, figures[2], figures[3])
        return y_TD, kept, graded, counted

    def construct(self, x_TD: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        y_TD, kept, graded, counted = self.through(x_TD, *inputs)
        first, stop = self.chunk.first + self.count, self.chunk.stop
        x_TD, _, _ = self.chunk.model.through(y_TD, first, stop, inputs[2], inputs[3], inputs[5])
        return x_TD, y_TD, *kept, *graded, *counted

    def given(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Any, Any, Any]:
        """What `through` returns, from what `construct` returns behind x_TD."""
        after_kept = 1 + self.count
        after_graded = after_kept + 2 * sum(self.is_moe)
        return tensors[0], tensors[1:after_kept], tensors[after_kept:after_graded], tensors[after_graded:]


class RecomputedGradient(nn.Cell):
    """The same as `ChunkGradient`, bit for bit. Of the first `count` blocks it keeps the input alone, and each of these
    runs again before its backward pass (Chen et al., 2016, section 4). `is_given`: what `KeepingForward` kept comes
    behind the inputs, else the backward pass begins with a forward pass."""

    def __init__(
        self, chunk: Chunk, weights: Sequence[Any], *, of_input: bool, count: int, is_given: bool = False
    ) -> None:
        super().__init__()
        # types that are inferred while functions are still being read (MindSpore's default, 2.10) lose sight of weights
        # where gradients of several functions are taken in one graph: now and then, or after certain other graphs
        os.environ["MS_DEV_BOOST_INFER"] = "0"
        self.chunk, self.of_input, self.count = chunk, of_input and not chunk.is_first, count
        self.nothing = ms.Tensor(np.zeros(1, np.float32))
        blocks = [chunk.model.layers[i] for i in range(chunk.first, chunk.first + count)]
        self.forward, self.is_given = KeepingForward(chunk, count), is_given
        self.is_moe = self.forward.is_moe
        own = [_among(weights, block.get_parameters()) for block in blocks]
        self.again = [_Again(block, each) for block, each in zip(blocks, own, strict=True)]
        embedding = _among(weights, [chunk.model.embed.weight]) if chunk.is_first else []
        is_used_behind = chunk.is_last and (chunk.model.tie_embeddings or chunk.model.has_mtp)
        apart = [*chain.from_iterable(own), *([] if is_used_behind else embedding)]
        behind = [p for p in weights if not _among([p], apart)]
        self.of_weights, self.of_embedding = len(behind) > 0, len(embedding) > 0
        # where the gradient of each weight is among those of all parts; an embedding may have two
        found = [*behind, *chain.from_iterable(own), *embedding]
        places = [[i for i, each in enumerate(found) if each is p] for p in weights]
        self.firsts, self.seconds = tuple(at[0] for at in places), tuple(at[-1] for at in places)
        self.objective = _Objective(chunk)
        positions = (0, 1) if any(self.is_moe) else 0
        self.run = ops.value_and_grad(self.behind, positions, _listed(behind), has_aux=True)
        self.embedding = [_listed(embedding)]
        self.gradient = ops.GradOperation(get_by_list=True, sens_param=True)

    def behind(
        self, x_TD: Tensor, graded: tuple[Tensor, ...], counted: tuple[Tensor, ...], *others: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The objective, from what the recomputed blocks return; their router figures are in pairs."""
        dy_TD, scale, inputs = others[0], others[1], others[2:]
        places = range(0, len(graded), 2)
        routed = [(graded[i], graded[i + 1], counted[i], counted[i + 1]) for i in places]
        first, stop = self.chunk.first + self.count, self.chunk.stop
        x_TD, more, _ = self.chunk.model.through(x_TD, first, stop, inputs[2], inputs[3], inputs[5])
        return self.objective.of_results(self.chunk.leave(x_TD, routed + more, *inputs), dy_TD, scale)

    def construct(self, x_TD: Tensor, dy_TD: Tensor, scale: Tensor, *inputs: Tensor) -> tuple[Any, ...]:
        found = self.forward.given(inputs[6:]) if self.is_given else self.forward.through(x_TD, *inputs)
        y_TD, kept, graded, counted = found
        inputs = inputs[:6]
        context = (inputs[2], *self.chunk.model.turns(inputs[3]), inputs[5])
        results, found = self.run(y_TD, graded, counted, dy_TD, scale, *inputs)
        found, behind = found if self.of_weights else (found, ())
        found, dgraded = found if len(graded) > 0 else (found, ())
        dx_TD, own = self.through_again(ops.depend(found, results), dgraded, kept, context)
        grads = behind + own
        if self.of_embedding:
            # of `after_embed` the gradient alone: that of the whole would do it forward once more
            dx_rows_TD = self.chunk.model.after_embed_back(dx_TD)
            grads = grads + self.gradient(self.chunk.model.rows, self.embedding[0])(inputs[0], dx_rows_TD)
        if len(self.firsts) > 0:
            grads = for_each(ops.partial(_added, grads), self.firsts, self.seconds)
        return dx_TD if self.of_input else self.nothing, results[1], results[2], ops.depend(grads, results)

    def through_again(
        self, dx_TD: Tensor, dgraded: tuple[Tensor, ...], kept: tuple[Tensor, ...], context: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """From the gradient of the last recomputed block's output to that of the first one's input, and those of the
        weights between, block by block."""
        own: tuple[Tensor, ...] = ()
        place = len(dgraded)
        for j in range(self.count):
            i = self.count - 1 - j
            # nothing of the block runs before: what was computed early would have to be kept
            inputs = [ops.depend(x, dx_TD) for x in (kept[i], *context)]
            sens = dx_TD
            if self.is_moe[i]:
                place = place - 2
                sens = (dx_TD, dgraded[place], dgraded[place + 1])
            dx_TD, grads = self.again[i](sens, *inputs)
            own = grads + own
        return dx_TD, own


def chunk_gradient(
    chunk: Chunk, weights: Sequence[Any], *, of_input: bool, is_given: bool = False
) -> ChunkGradient | RecomputedGradient:
    """The gradient of a chunk that does what its blocks' `is_recomputed` says; `is_given` for `RecomputedGradient`.

    Raises ValueError unless the blocks that are recomputed come before the others.
    """
    count = num_recomputed(chunk)
    if count == 0:
        return ChunkGradient(chunk, weights, of_input=of_input)
    return RecomputedGradient(chunk, weights, of_input=of_input, count=count, is_given=is_given)


def num_recomputed(chunk: Chunk) -> int:
    """How many of its blocks run again: the first ones. Raises ValueError if others do."""
    is_recomputed = [chunk.model.layers[i].is_recomputed for i in range(chunk.first, chunk.stop)]
    count = sum(is_recomputed)
    if not all(is_recomputed[:count]):
        raise ValueError(f"layers {chunk.first} to {chunk.stop - 1}: those that are recomputed come before the others")
    return count


def _added(grads: tuple[Tensor, ...], first: int, second: int) -> Tensor:
    return grads[first] if first == second else grads[first] + grads[second]


def _listed(weights: Sequence[Any]) -> Any:
    return ms.ParameterTuple(list(weights)) if weights else None


def _among(weights: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Those that are among the others, as objects."""
    known = {id(each) for each in others}
    return [each for each in weights if id(each) in known]
