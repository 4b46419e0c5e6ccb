"""Which layers each pipeline stage holds. Pure.

With c chunks on each of n stages there are n * c virtual stages in the order of the model's depth, number v of which is
chunk v // n of stage v % n (Narayanan et al., 2021, section 2.2). The first has the embedding; the last has the final
norm, the head, and multi-token prediction.
"""

import re
from dataclasses import dataclass

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.model.counts import block_flops_per_token, forward_flops_per_token, moe_layers
from ascend_moe_train.parallel.config import ScheduleName

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Stages:
    """`bounds` are the layers [first, stop) of each virtual stage. `embeds_at_end`: the last one needs the embedding
    too, for a tied head or multi-token prediction."""

    num_stages: int
    bounds: tuple[tuple[int, int], ...]
    embeds_at_end: bool

    @property
    def chunks(self) -> int:
        """Parts of the model on each stage."""
        return len(self.bounds) // self.num_stages

    def layers(self, stage: int, chunk: int) -> tuple[int, int]:
        """[first, stop) of a chunk."""
        return self.bounds[chunk * self.num_stages + stage]

    def is_first(self, stage: int, chunk: int) -> bool:
        """Whether it starts from tokens."""
        return stage == 0 and chunk == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        """Whether it ends in the loss."""
        return chunk * self.num_stages + stage == len(self.bounds) - 1

    def holders(self, name: str) -> tuple[int, ...]:
        """The stages that hold a tensor of the model, ascending: one, or for an embedding that is needed at both ends
        the first and the last."""
        last = self.num_stages - 1
        if name.startswith("embed.") and self.embeds_at_end and last > 0:
            return 0, last
        return (self.virtual_stage(name) % self.num_stages,)

    def chunk_of(self, name: str, stage: int) -> int:
        """Which chunk of a stage that holds a tensor has it."""
        if name.startswith("embed.") and stage > 0:
            return self.chunks - 1
        return self.virtual_stage(name) // self.num_stages

    def virtual_stage(self, name: str) -> int:
        """The one that has a tensor or layer; of an embedding that is needed at both ends the first."""
        layer = _LAYER.match(name)
        if layer is None:
            return 0 if name.startswith("embed.") else len(self.bounds) - 1
        number = int(layer[1])
        return next(v for v, (first, stop) in enumerate(self.bounds) if first <= number < stop)

    def passes(self, virtual_stage: int, schedule: ScheduleName) -> tuple[int, int]:
        """How often a micro-batch goes through its layers forward and backward: a backward pass starts with a forward
        pass over again, unless it is that of the last, and in zero_bubble is done once for the input and once for the
        weights."""
        last = len(self.bounds) - 1
        backward = 2 if schedule == "zero_bubble" and virtual_stage > 0 else 1
        return backward + (virtual_stage < last), backward

    def moe_rows(self, model: ModelConfig, stage: int) -> tuple[tuple[int, ...], ...]:
        """Which of the model's layers of experts each chunk of a stage holds, counted from the first of them."""
        prefixes = enumerate(moe_layers(model))
        found = [(row, self.chunk_of(prefix, stage)) for row, prefix in prefixes if self.holders(prefix) == (stage,)]
        return tuple(tuple(row for row, place in found if place == chunk) for chunk in range(self.chunks))


def stages_of(config: RunConfig) -> Stages:
    """The stages of a run, whose `parallel.stage_layers` fit its model."""
    parallel, model = config.parallel, config.model
    count = parallel.pp * parallel.chunks
    if parallel.stage_layers == "even":
        sizes = [model.num_layers // count + (v < model.num_layers % count) for v in range(count)]
    elif parallel.stage_layers == "cost":
        sizes = _by_cost(*_costs(model, config.data.seq_len), count)
    else:
        sizes = list(parallel.stage_layers)
    stops = [sum(sizes[: v + 1]) for v in range(count)]
    return Stages(
        num_stages=parallel.pp,
        bounds=tuple((stop - size, stop) for size, stop in zip(sizes, stops, strict=True)),
        embeds_at_end=model.tie_embeddings or model.mtp is not None,
    )


def _costs(model: ModelConfig, seq_len: int) -> tuple[list[int], int]:
    """FLOPs per token of each layer, and of what comes after the last; the embedding has none."""
    layers = [block_flops_per_token(model, layer, seq_len) for layer in range(model.num_layers)]
    return layers, forward_flops_per_token(model, seq_len) - sum(layers)


def _by_cost(layers: list[int], after: int, count: int) -> list[int]:
    """Numbers of consecutive layers, at least one each, so that the dearest of `count` parts costs as little as it can,
    `after` included, which comes with the last; the others are then as even as they can be."""
    n = len(layers)
    sums = [sum(layers[:i]) for i in range(n + 1)]
    # for the first i layers as k parts: the dearest of them, the sum of squared costs, and the sizes
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for k in range(1, count + 1):
        extra = after if k == count else 0
        found = {}
        for i in range(k, n - (count - k) + 1):
            options = []
            for j, (dearest, squares, sizes) in best.items():
                if j < i:
                    cost = sums[i] - sums[j] + extra
                    options.append((max(dearest, cost), squares + cost * cost, [*sizes, i - j]))
            found[i] = min(options)
        best = found
    return best[n][2]
