"""One optimizer step as compiled graphs: forward, backward, clip, update.

Shape letters: see model/kernels/protocol.py.
"""

from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from numpy.typing import NDArray

from ascend_moe_train.data.loader import Batch
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.adamw import AdamW
from ascend_moe_train.optim.balance import BalanceBiases

Tensor = Any


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step measured. `loss` is the cross entropy, `total_loss` adds the router's terms; both
    are means over the step. `square_P` are squared gradient norms per parameter."""

    loss: float
    total_loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    applied: bool
    num_dropped: int
    counts_LE: NDArray[np.int64]
    square_P: NDArray[np.float64]


class _Gradients(nn.Cell):
    """Model inputs -> (figures, gradients); the gradients carry the loss scale.

    Inputs are separate arguments: MindSpore takes a tuple of tensors for a constant and compiles anew at every call.
    """

    def __init__(self, model: Transformer, parameters: Any) -> None:
        super().__init__()
        self.model = model
        self.run = ops.value_and_grad(self.scaled, None, parameters, has_aux=True)

    def scaled(self, scale: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        total, ce, aux, z, counts_LE, dropped = self.model(*inputs)
        return total * scale, total, ce, aux, z, counts_LE, dropped

    def construct(self, scale: Tensor, *inputs: Tensor) -> Any:
        figures, grads = self.run(scale, *inputs)
        return figures[1:], grads


class _WholeStep(nn.Cell):
    """A step of one micro-batch, in one graph."""

    def __init__(self, gradients: _Gradients, optimizer: AdamW) -> None:
        super().__init__()
        self.gradients = gradients
        self.optimizer = optimizer

    def construct(self, control: Tensor, *inputs: Tensor) -> Any:
        figures, grads = self.gradients(control[3], *inputs)
        return figures, self.optimizer(grads, figures[0], control)


class _Accumulate(nn.Cell):
    """Adds a micro-batch's gradients to the sums."""

    def __init__(self, gradients: _Gradients, sums: Any) -> None:
        super().__init__()
        self.gradients = gradients
        self.sums = sums

    def construct(self, control: Tensor, *inputs: Tensor) -> Any:
        figures, grads = self.gradients(control[3], *inputs)
        done = [ops.assign_add(self.sums[i], grads[i]) for i in range(len(grads))]
        return ops.depend(figures[0], done), figures[1:]


class _UpdateFromSums(nn.Cell):
    """The update from summed gradients; the sums are zero afterwards."""

    def __init__(self, optimizer: AdamW, sums: Any) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.sums = sums

    def construct(self, loss: Tensor, control: Tensor) -> Any:
        result = self.optimizer(self.sums, loss, control)
        zeroed = [ops.assign(s, ops.zeros_like(ops.depend(s, result))) for s in self.sums]
        return ops.depend(result[0], zeroed), result[1], result[2]


class TrainStep:
    """Runs one optimizer step over `num_micro` micro-batches."""

    def __init__(self, model: Transformer, optimizer: AdamW, num_micro: int) -> None:
        self.num_micro = num_micro
        self._num_moe_layers = model.num_moe_layers
        rate = model.balance_bias_rate if model.buffers() else None
        self._balance = None if rate is None else BalanceBiases(model.buffers(), rate)
        gradients = _Gradients(model, optimizer.weights)
        if num_micro == 1:
            self._whole = _WholeStep(gradients, optimizer)
            return
        sums = ms.ParameterTuple(
            [
                ms.Parameter(ms.Tensor(np.zeros(p.shape, np.float32)), name=f"sum.{name}", requires_grad=False)
                for name, p in zip(optimizer.names, optimizer.weights, strict=True)
            ]
        )
        self._accumulate = _Accumulate(gradients, sums)
        self._update = _UpdateFromSums(optimizer, sums)

    def __call__(self, batch: Batch, noise_seed: int, control: NDArray[np.float64]) -> StepResult:
        """`control`: see `AdamW`. The batch holds all sequences of the step."""
        counted = max(1, int((batch.targets_BS >= 0).sum()))
        weight = ms.Tensor(np.array([1.0 / counted, 1.0 / self.num_micro], np.float32))
        control_5 = ms.Tensor(control.astype(np.float32))
        if self.num_micro == 1:
            figures, update = self._whole(control_5, *batch_tensors(batch), weight, _seed(noise_seed, 0))
            return self._result([figures], update)
        per_micro = []
        size = batch.tokens_BS.shape[0] // self.num_micro
        for i in range(self.num_micro):
            micro = batch_tensors(batch, slice(i * size, (i + 1) * size))
            total, rest = self._accumulate(control_5, *micro, weight, _seed(noise_seed, i))
            per_micro.append((total, *rest))
        loss = ms.Tensor(np.sum([f[0].asnumpy() for f in per_micro], axis=0, dtype=np.float32))
        return self._result(per_micro, self._update(loss, control_5))

    def _result(self, per_micro: list[tuple[Tensor, ...]], update: tuple[Tensor, Tensor, Tensor]) -> StepResult:
        sums = [np.sum([f[i].asnumpy() for f in per_micro], axis=0) for i in range(6)]
        norm, applied, square_P = (x.asnumpy() for x in update)
        if self._balance is not None:
            self._balance(ms.Tensor(sums[4].astype(np.int32)), update[1])
        return StepResult(
            loss=float(sums[1][0]),
            total_loss=float(sums[0][0]),
            aux_loss=float(sums[2][0]),
            z_loss=float(sums[3][0]),
            grad_norm=float(norm[0]),
            applied=bool(applied[0]),
            num_dropped=int(sums[5][0]),
            # a graph has no empty tensors: a dense model hands out one row that means nothing
            counts_LE=sums[4].astype(np.int64)[: self._num_moe_layers],
            square_P=square_P.astype(np.float64),
        )


def batch_tensors(batch: Batch, rows: slice = slice(None)) -> tuple[Tensor, ...]:
    """tokens, targets, segments and positions of some sequences, for the graph."""
    parts = (batch.tokens_BS, batch.targets_BS, batch.segment_BS, batch.position_BS)
    return tuple(ms.Tensor(np.ascontiguousarray(part[rows])) for part in parts)


def _seed(noise_seed: int, micro: int) -> Tensor:
    return ms.Tensor(np.array([(noise_seed * 65537 + micro) % 2**31], np.int32))
