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
from ascend_moe_train.model.transformer import Transformer
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
    """Which of embedding, each block's output, last norm and logits are finite: (L + 3,) fp32, 1 = finite."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def construct(self, tokens_BS: Tensor, segment_BS: Tensor, position_BS: Tensor, noise_seed: Tensor) -> Tensor:
        x_TD, _, trail = self.model.hidden_states(tokens_BS, segment_BS, position_BS, noise_seed)
        seen = (*trail, x_TD, self.model.logits(self.model.before_head(x_TD)))
        return ops.concat([ops.reshape(ops.cast(ops.isfinite(x).all(), ms.float32), (1,)) for x in seen])


def find_origin(
    model: Transformer, ranks: Ranks, batch: Batch, result: StepResult, noise_seed: int, num_passes: int
) -> str:
    """Names the first tensor that is not finite: a weight, an activation of the forward pass, or a gradient.

    Runs the forward pass once more, with the weights that the failed step left as they were, in `num_passes` parts of
    the batch, as many on all ranks.
    """
    weight = next((name for name, p in model.weights() if not np.isfinite(p.asnumpy()).all()), None)
    if (found := ranks.first_of(weight)) is not None:
        return f"weight {found}"
    places = [
        "output of embed",
        *(f"output of layers.{i}" for i in range(len(model.layers))),
        "output of norm",
        "logits",
    ]
    probe = _Probe(model)
    size = batch.tokens_BS.shape[0] // num_passes
    for first in range(0, size * num_passes, size):
        tokens, _, segment, position = batch_tensors(batch, slice(first, first + size))
        flags = probe(tokens, segment, position, ms.Tensor(np.array([noise_seed], np.int32))).asnumpy()
        rows = f"sequence {first}" if size == 1 else f"sequences {first} to {first + size - 1}"
        place = None if flags.all() else f"{places[int(np.argmin(flags))]} ({rows} of the batch)"
        if (found := ranks.first_of(place)) is not None:
            return found
    # the backward pass runs from the last tensor to the first, and carries what is not finite along
    broken = [name for name, square in result.squares.items() if not math.isfinite(square)]
    return f"gradient of {broken[-1]}" if broken else "loss"
