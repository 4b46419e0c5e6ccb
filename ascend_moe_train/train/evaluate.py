"""Validation loss. Shape letters: see model/kernels/protocol.py."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from ascend_moe_train.data.loader import EvalLoader
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.train.metrics import EvalRecord
from ascend_moe_train.train.step import batch_tensors

Tensor = Any


class _LossSum(nn.Cell):
    """Summed cross entropy of a micro-batch: (1,)."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def construct(self, tokens: Tensor, targets: Tensor, segment: Tensor, position: Tensor, seed: Tensor) -> Tensor:
        x_TD, _, _ = self.model.hidden_states(tokens, segment, position, seed)
        return self.model.cross_entropy(x_TD, targets)


class Evaluator:
    """Evaluates a model on the same validation sequences each time."""

    def __init__(self, model: Transformer, loader: EvalLoader) -> None:
        self._loss_sum = _LossSum(model)
        self._loader = loader
        self._no_noise = ms.Tensor(np.array([-1], np.int32))

    def __call__(self, step: int) -> EvalRecord:
        """The record after `step` finished steps."""
        total, tokens = 0.0, 0
        for batch in self._loader:
            total += float(self._loss_sum(*batch_tensors(batch), self._no_noise).asnumpy()[0])
            tokens += int((batch.targets_BS >= 0).sum())
        bytes_per_token = self._loader.bytes_per_token
        return EvalRecord.from_loss(step=step, loss=total / tokens, tokens=tokens, bytes_per_token=bytes_per_token)
