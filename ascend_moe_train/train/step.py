"""One optimizer step as compiled graphs: forward, backward, clip, update.

Shape letters: see model/kernels/protocol.py. What a graph hands out as `figures` (5,): see optim/reduction.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from numpy.typing import NDArray

from ascend_moe_train.data.loader import Batch
from ascend_moe_train.model.chunk import Chunk, chunk_gradient
from ascend_moe_train.model.each import for_each
from ascend_moe_train.model.graph import Graph
from ascend_moe_train.model.layers import empty
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.adamw import AdamW
from ascend_moe_train.optim.balance import BalanceBiases
from ascend_moe_train.optim.host_adamw import HostAdamW
from ascend_moe_train.optim.onebit import OneBitAdam
from ascend_moe_train.optim.reduction import LocalReduction, Reduction

Tensor = Any
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""tokens, targets, segments and positions of a micro-batch, loss weights, noise seed."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step measured. `loss` is the cross entropy, `mtp_loss` that of multi-token prediction, `total_loss` has
    the router's terms too; all are means over the step. `squares` are squared gradient norms by name."""

    loss: float
    mtp_loss: float
    total_loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    applied: bool
    num_dropped: int
    counts_LE: NDArray[np.int64]
    squares: dict[str, float]


class _Gradients(nn.Cell):
    """Model inputs -> (figures, counts_LE, gradients); the gradients carry the loss scale.

    Inputs are separate arguments: MindSpore takes a tuple of tensors for a constant and compiles anew at every call.
    """

    def __init__(self, model: Transformer, weights: Sequence[Any]) -> None:
        super().__init__()
        chunk = Chunk(model, (0, len(model.layers)), is_first=True, is_last=True)
        self.run = chunk_gradient(chunk, weights, of_input=False)
        self.nothing = ms.Tensor(np.zeros(1, np.float32))

    def construct(self, scale: Tensor, *inputs: Tensor) -> Any:
        return self.run(self.nothing, self.nothing, scale, *inputs)[1:]


class _Update(nn.Cell):
    """Summed gradients and figures -> (figures of the step, total loss, gradient norm, applied, square_P), and for an
    optimizer on the host the gradients that it is given."""

    def __init__(self, model: Transformer, optimizer: AdamW | HostAdamW | OneBitAdam, reduction: Reduction) -> None:
        super().__init__()
        self.model, self.optimizer, self.reduction = model, optimizer, reduction
        self.is_on_host = isinstance(optimizer, HostAdamW)

    def construct(self, grads: tuple[Tensor, ...], figures: Tensor, control: Tensor) -> Any:
        grads = self.reduction.of_step(grads)
        square_P = ops.concat(for_each(self.optimizer.kernels.square_sum, self.reduction.counted(grads)))
        figures, square_P = self.reduction.across(figures, square_P, grads)
        total = self.model.total_loss(figures[0:1], figures[1:2], figures[2:3], figures[3:4])
        norm, applied = self.optimizer(grads, ops.sum(square_P).reshape((1,)), total, control)
        square_P = square_P / (control[3] * control[3])
        if self.is_on_host:
            return figures, total, norm, applied, square_P, *grads
        return figures, total, self.reduction.publish(norm), applied, square_P


class _WholeStep(nn.Cell):
    """A step of one micro-batch, in one graph."""

    def __init__(self, gradients: _Gradients, update: _Update) -> None:
        super().__init__()
        self.gradients, self.update = gradients, update

    def construct(self, control: Tensor, *inputs: Tensor) -> Any:
        figures, counts_LE, grads = self.gradients(control[3], *inputs)
        return counts_LE, self.update(self.update.reduction.of_micro(grads), figures, control)


class _Accumulate(nn.Cell):
    """Adds a micro-batch's gradients to the sums."""

    def __init__(self, gradients: _Gradients, reduction: Reduction, sums: Any) -> None:
        super().__init__()
        self.gradients, self.reduction, self.sums = gradients, reduction, sums

    def construct(self, scale: Tensor, *inputs: Tensor) -> Any:
        figures, counts_LE, grads = self.gradients(scale, *inputs)
        grads = self.reduction.of_micro(grads)
        done = for_each(ops.assign_add, self.sums, grads)
        return ops.depend(figures, done), counts_LE


class _Clear(nn.Cell):
    """Makes the sums zero, once `after` is there, and returns that."""

    def __init__(self, sums: Any) -> None:
        super().__init__()
        self.sums, self.zero = sums, ms.Tensor(np.zeros(1, np.float32))

    def construct(self, after: Tensor) -> Tensor:
        return ops.depend(after, for_each(ops.partial(self.one, after), self.sums))

    def one(self, after: Tensor, summed: Tensor) -> Tensor:
        """Of one tensor; zeros of its shape would be constants, which wait for nothing."""
        return ops.assign(summed, ops.broadcast_to(ops.depend(self.zero, after), summed.shape))


class _UpdateFromSums(nn.Cell):
    """The update from summed gradients. The sums are zero afterwards, but not for an optimizer on the host: what it is
    given may be the sums themselves."""

    def __init__(self, update: _Update, sums: Any, clear: _Clear) -> None:
        super().__init__()
        self.update, self.sums, self.clear = update, sums, clear

    def construct(self, figures: Tensor, control: Tensor) -> Any:
        result = self.update(self.sums, figures, control)
        if self.update.is_on_host:
            return result
        return self.clear(ops.depend(result[0], result)), *result[1:]


class Passes(Protocol):
    """Forward and backward passes of a step, which leave the sums of its gradients."""

    def __call__(self, micros: Sequence[Inputs], scale: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """-> figures (5,) and counts_LE, summed over the micro-batches."""

    def graphs(self, inputs: Inputs, scale: Tensor) -> list[Graph]:
        """What is compiled for it, for a micro-batch like this one."""


class _OneByOne:
    """One micro-batch after the other."""

    def __init__(self, gradients: _Gradients, reduction: Reduction, sums: Any, num_micro: int) -> None:
        self._accumulate, self._num_micro = _Accumulate(gradients, reduction, sums), num_micro

    def graphs(self, inputs: Inputs, scale: Tensor) -> list[Graph]:
        """See Passes."""
        return [Graph("micro-batch", self._accumulate, (scale, *inputs), self._num_micro)]

    def __call__(self, micros: Sequence[Inputs], scale: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See Passes."""
        found = [tuple(x.asnumpy() for x in self._accumulate(scale, *inputs)) for inputs in micros]
        figures = np.sum([each for each, _ in found], axis=0, dtype=np.float32)
        return figures, np.sum([counts for _, counts in found], axis=0, dtype=np.int64)


class TrainStep:
    """Runs one optimizer step over `num_micro` micro-batches.

    `differentiated` are what gradients are taken of, `summed` what the sums of several micro-batches look like, `names`
    whose squares there are; all are the optimizer's weights unless a reduction says otherwise. `total_of` adds a count
    up over all that train. `own` is what of a batch is this process's. `refill` brings the weights of an optimizer on
    the host to the model. `make_passes` makes other passes than one micro-batch after the other through the whole
    model, from the sums; `moe_rows` are then the layers of experts that are here. The attribute `phase` is what each
    part of a step is done in.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: AdamW | HostAdamW,
        num_micro: int,
        *,
        reduction: Reduction | None = None,
        differentiated: Sequence[Any] | None = None,
        summed: Sequence[Any] | None = None,
        names: Sequence[str] | None = None,
        total_of: Callable[[int], int] = int,
        own: Callable[[Batch], Batch] | None = None,
        refill: Callable[[], None] | None = None,
        later: tuple[OneBitAdam, Reduction] | None = None,
        make_passes: Callable[[Any], Passes] | None = None,
        moe_rows: Sequence[int] | None = None,
    ) -> None:
        self._optimizer, self._refill, self._own = optimizer, refill, own
        self.phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
        self._names = names or optimizer.names
        self.num_micro, self._total_of = num_micro, total_of
        self._num_moe_layers = model.num_moe_layers
        self._moe_rows = list(range(model.num_moe_layers)) if moe_rows is None else list(moe_rows)
        rate = model.balance_bias_rate if model.buffers() else None
        self._balance = None if rate is None else BalanceBiases(model.buffers(), rate)
        reduction = LocalReduction() if reduction is None else reduction
        update = _Update(model, optimizer, reduction)
        later_update = None if later is None else _Update(model, *later)
        self._whole: _WholeStep | None = None
        self._later: _WholeStep | _UpdateFromSums | None = None
        if make_passes is None:  # a pipeline stage may lack the ends of the model
            gradients = _Gradients(model, list(differentiated or optimizer.weights))
            if num_micro == 1:
                self._whole = _WholeStep(gradients, update)
                self._later = None if later_update is None else _WholeStep(gradients, later_update)
                return
            make_passes = partial(_OneByOne, gradients, reduction, num_micro=num_micro)
        self.sums = ms.ParameterTuple(
            [empty(*p.shape, is_trained=False, name=f"sum.{i}") for i, p in enumerate(summed or optimizer.weights)]
        )
        self._passes = make_passes(self.sums)
        self._clear = _Clear(self.sums)
        self._update = _UpdateFromSums(update, self.sums, self._clear)
        if later_update is not None:
            self._later = _UpdateFromSums(later_update, self.sums, self._clear)

    def change_over(self) -> None:
        """From now on the later optimizer updates, if there is one."""
        if isinstance(self._later, _WholeStep):
            self._whole = self._later
        elif self._later is not None:
            self._update = self._later

    def __call__(self, batch: Batch, noise_seed: int, control: NDArray[np.float64]) -> StepResult:
        """`control`: see `AdamW`. The batch holds all sequences of the step that are this process's."""
        counted = max(1, self._total_of(int((batch.targets_BS >= 0).sum())))
        weight = ms.Tensor(np.array([1.0 / counted, 1.0 / self.num_micro], np.float32))
        control_5 = ms.Tensor(control.astype(np.float32))
        batch = batch if self._own is None else self._own(batch)
        size = batch.tokens_BS.shape[0] // self.num_micro
        micros: list[Inputs] = [
            (*batch_tensors(batch, slice(i * size, (i + 1) * size)), weight, _seed(noise_seed, i))
            for i in range(self.num_micro)
        ]
        if self._whole is not None:
            with self.phase("forward, backward, update"):
                counts_LE, update = self._whole(control_5, *micros[0])
                return self._result(counts_LE.asnumpy(), update, control)
        with self.phase("forward, backward"):
            figures, counts_sum = self._passes(micros, ms.Tensor(control[3:4].astype(np.float32)))
        with self.phase("update"):
            return self._result(counts_sum, self._update(ms.Tensor(figures), control_5), control)

    def graphs(self, inputs: Inputs) -> list[Graph]:
        """What is compiled for a step of micro-batches like this one, in the order of their first use."""
        control_5 = ms.Tensor(np.ones(5, np.float32))
        if self._whole is not None:
            return [Graph("step", self._whole, (control_5, *inputs), 1)]
        scale, figures = ms.Tensor(np.ones(1, np.float32)), ms.Tensor(np.zeros(5, np.float32))
        return [*self._passes.graphs(inputs, scale), Graph("update", self._update, (figures, control_5), 1)]

    def _result(self, counts_LE: NDArray[Any], update: tuple[Tensor, ...], control: NDArray[np.float64]) -> StepResult:
        figures, total, norm, applied, square_P = (x.asnumpy() for x in update[:5])
        if isinstance(self._optimizer, HostAdamW):
            self._update_on_host(self._optimizer, update[5:], norm, applied, control)
        if self._balance is not None:
            self._balance(ms.Tensor(counts_LE[self._moe_rows].astype(np.int32)), update[3])
        return StepResult(
            loss=float(figures[0]),
            mtp_loss=float(figures[1]),
            total_loss=float(total[0]),
            aux_loss=float(figures[2]),
            z_loss=float(figures[3]),
            grad_norm=float(norm[0]),
            applied=bool(applied[0]),
            num_dropped=int(figures[4]),
            # a graph has no empty tensors: a dense model hands out one row that means nothing
            counts_LE=counts_LE.astype(np.int64)[: self._num_moe_layers],
            squares={name: float(square) for name, square in zip(self._names, square_P, strict=True)},
        )

    def _update_on_host(
        self, optimizer: HostAdamW, grads: tuple[Tensor, ...], norm: Any, applied: Any, control: Any
    ) -> None:
        if applied[0]:
            optimizer.update([grad.asnumpy() for grad in grads], float(norm[0]), control)
            if self._refill is not None:
                self._refill()
        if self.num_micro > 1:
            self._clear(ms.Tensor(applied)).asnumpy()


def batch_tensors(batch: Batch, rows: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens, targets, segments and positions of some sequences, for the graph."""
    tokens, targets, segment, position = (
        ms.Tensor(np.ascontiguousarray(part[rows]))
        for part in (batch.tokens_BS, batch.targets_BS, batch.segment_BS, batch.position_BS)
    )
    return tokens, targets, segment, position


def _seed(noise_seed: int, micro: int) -> Tensor:
    return ms.Tensor(np.array([(noise_seed * 65537 + micro) % 2**31], np.int32))
