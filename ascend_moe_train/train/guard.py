"""Watching for numbers that go wrong: non-finite steps, loss spikes, and where they began.

Shape letters: see model/kernels/protocol.py; P parameters.
"""

import math
import statistics
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.data.loader import Batch
from ascend_moe_train.model.chunk import Chunk
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.parallel.pipeline import StageSite, chunks_of, through_stages
from ascend_moe_train.train.config import GuardConfig
from ascend_moe_train.train.ranks import Ranks
from ascend_moe_train.train.state import TrainingState
from ascend_moe_train.train.step import StepResult, batch_tensors

Tensor = Any

# A run that has settled has almost no deviation left; what is less than this share above the mean is no spike.
LEAST_RISE = 0.01


def spike_limit(config: GuardConfig, state: TrainingState) -> float:
    """The highest loss that is no spike: infinite until `spike_window` good losses are known, or when switched off."""
    recent = state.recent_losses
    if config.spike_action == "off" or len(recent) < config.spike_window:
        return math.inf
    mean = statistics.fmean(recent)
    return mean + max(config.spike_sigma * statistics.pstdev(recent), LEAST_RISE * abs(mean))


def remember_loss(config: GuardConfig, state: TrainingState, loss: float) -> tuple[float, ...]:
    """`recent_losses` with one more good loss."""
    return (*state.recent_losses, loss)[-config.spike_window :]


class _Probe(nn.Cell):
    """(x_TD, inputs) -> (x_TD, which of a chunk's input or embedding, each block's output, and in the last chunk norm
    and logits, are finite: fp32, 1 = finite)."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self.chunk, self.model = chunk, chunk.model
        entrance = "output of embed" if chunk.is_first else "input of the stage"
        exits = ("output of norm", "logits") if chunk.is_last else ()
        self.places = (entrance, *(f"output of layers.{i}" for i in range(chunk.first, chunk.stop)), *exits)

    def construct(
        self, x_TD: Tensor, tokens_BS: Tensor, segment_BS: Tensor, position_BS: Tensor, noise_seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        x_TD, _, trail = self.chunk.through(x_TD, tokens_BS, segment_BS, position_BS, noise_seed)
        if self.chunk.is_last:
            y_TD = self.model.norm(x_TD)
            trail = (*trail, y_TD, self.model.logits(self.model.before_head(y_TD)))
        return x_TD, ops.concat([ops.reshape(ops.cast(ops.isfinite(x).all(), ms.float32), (1,)) for x in trail])


def find_origin(
    model: Transformer,
    ranks: Ranks,
    batch: Batch,
    result: StepResult,
    noise_seed: int,
    num_passes: int,
    site: StageSite | None = None,
) -> str:
    """Names the first tensor that is not finite: a weight, an activation of the forward pass, or a gradient.

    Runs the forward pass once more, with the weights that the failed step left as they were, in `num_passes` parts of
    the batch, as many on all ranks; `site` is this rank's place in a pipeline.
    """
    where = f" on rank {ranks.comm.rank}" if ranks.mesh.world_size > 1 else ""
    weight = next((f"{name}{where}" for name, p in model.weights() if not np.isfinite(p.asnumpy()).all()), None)
    if (found := ranks.first_of(weight)) is not None:
        return f"weight {found}"
    probes = [_Probe(chunk) for chunk in chunks_of(model, site)]
    size = batch.tokens_BS.shape[0] // num_passes
    for first in range(0, size * num_passes, size):
        tokens, _, segment, position = batch_tensors(batch, slice(first, first + size))
        inputs = (tokens, segment, position, ms.Tensor(np.array([noise_seed], np.int32)))
        rows = f"sequence {first}" if size == 1 else f"sequences {first} to {first + size - 1}"
        by_depth = [
            (virtual_stage, f"{probe.places[int(np.argmin(flags))]} ({rows} of the batch){where}")
            for probe, (virtual_stage, flags) in zip(probes, through_stages(probes, site, inputs), strict=True)
            if not flags.all()
        ]
        if (first_place := ranks.least_of(by_depth)) is not None:
            return first_place[1]
    # the backward pass runs from the last tensor to the first, and carries what is not finite along
    broken = [name for name, square in result.squares.items() if not math.isfinite(square)]
    return f"gradient of {broken[-1]}" if broken else "loss"
