"""Validation loss. Shape letters: see model/kernels/protocol.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.data.loader import NOT_COUNTED, Batch, EvalLoader
from ascend_moe_train.model.chunk import Chunk
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.parallel.pipeline import StageSite, chunks_of, through_stages
from ascend_moe_train.train.metrics import EvalRecord
from ascend_moe_train.train.ranks import Ranks
from ascend_moe_train.train.step import batch_tensors

Tensor = Any


class _LossSum(nn.Cell):
    """(x_TD, inputs) -> (x_TD, summed cross entropy of a micro-batch (1,)) of a chunk; 0 but of the last."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self.chunk, self.model = chunk, chunk.model

    def construct(
        self, x_TD: Tensor, tokens: Tensor, targets: Tensor, segment: Tensor, position: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        x_TD, _, _ = self.chunk.through(x_TD, tokens, segment, position, seed)
        if not self.chunk.is_last:
            return x_TD, ops.zeros((1,), ms.float32)
        return x_TD, self.model.cross_entropy(self.model.norm(x_TD), targets)


class Evaluator:
    """Evaluates a model on the same validation sequences each time, shared out to the ranks by micro-batches.

    `site` is this rank's place in a pipeline."""

    def __init__(
        self,
        model: Transformer,
        loader: EvalLoader,
        ranks: Ranks,
        *,
        site: StageSite | None = None,
    ) -> None:
        self._cells = [_LossSum(chunk) for chunk in chunks_of(model, site)]
        self._loader, self._ranks, self._site = loader, ranks, site
        self._no_noise = ms.Tensor(np.array([-1], np.int32))

    def __call__(self, step: int) -> EvalRecord:
        """The record after `step` finished steps."""
        loss, tokens = 0.0, 0
        for batch in map(self._ranks.own, self._own_batches()):
            results = through_stages(self._cells, self._site, (*batch_tensors(batch), self._no_noise))
            loss += sum(float(result[0]) for _, result in results)
            if self._cells[-1].chunk.is_last:
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
