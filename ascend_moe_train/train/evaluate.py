"""Validation loss. Shape letters: see model/kernels/protocol.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from ascend_moe_train.data.loader import NOT_COUNTED, Batch, EvalLoader
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.train.metrics import EvalRecord
from ascend_moe_train.train.ranks import Ranks
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
    """Evaluates a model on the same validation sequences each time, shared out to the ranks by micro-batches."""

    def __init__(self, model: Transformer, loader: EvalLoader, ranks: Ranks) -> None:
        self._loss_sum = _LossSum(model)
        self._loader, self._ranks = loader, ranks
        self._no_noise = ms.Tensor(np.array([-1], np.int32))

    def __call__(self, step: int) -> EvalRecord:
        """The record after `step` finished steps."""
        loss, tokens = 0.0, 0
        for batch in self._own_batches():
            loss += float(self._loss_sum(*batch_tensors(batch), self._no_noise).asnumpy()[0])
            tokens += int((batch.targets_BS >= 0).sum())
        total_loss, total_tokens = self._ranks.total([loss, tokens])
        bytes_per_token = self._loader.bytes_per_token
        return EvalRecord.from_loss(
            step=step, loss=total_loss / total_tokens, tokens=int(total_tokens), bytes_per_token=bytes_per_token
        )

    def _own_batches(self) -> Iterator[Batch]:
        """Every n-th batch; all ranks have equally many, since they compute together: a missing one counts nothing."""
        index, n = self._ranks.data.index, self._ranks.data.size
        for number, batch in enumerate(self._loader):
            if number % n == index:
                yield batch
        if number % n < index:
            yield replace(batch, targets_BS=np.full_like(batch.targets_BS, NOT_COUNTED))
