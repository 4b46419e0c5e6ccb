"""Whole optimizer steps against the fp64 oracles: losses, gradients, updated weights, gradient accumulation."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import mindspore as ms
import numpy as np
import pytest

from ascend_moe_train.data.loader import Batch
from ascend_moe_train.model.config import ModelConfig, MoEConfig
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.adamw import AdamW, step_factors
from ascend_moe_train.optim.config import OptimConfig
from ascend_moe_train.presets import tiny
from ascend_moe_train.train.step import StepResult, TrainStep
from tests.model_run import Array, kernels, noise
from tests.oracle.adamw import Moments, adamw, clip_by_global_norm
from tests.oracle.arrays import F64
from tests.oracle.differences import relative_error
from tests.oracle.transformer import Inputs, inputs, transformer_grads
from tests.oracle.weights import random_params

TOLERANCE = 1e-4
SEQUENCES, LENGTH = 4, 12
NOISE_SEED = 3
# A large eps: with a small one the first update is the sign of the gradient, however small that is.
OPTIM = OptimConfig(eps=1e-3, clip_norm=0.5)
NO_LIMIT = math.inf

MOE = MoEConfig(num_experts=4, top_k=2, ffn=24, aux_loss_coef=0.0, z_loss_coef=0.1)
PLAIN = tiny().model_copy(update={"num_layers": 1, "moe": MOE})
BUSY = tiny().model_copy(update={"moe": MOE.model_copy(update={"aux_loss_coef": 0.3, "jitter": 0.2})})


def batch_of(vocab_size: int) -> Inputs:
    """Two documents in every sequence, and more targets that are not counted in the first than in the last."""
    rng = np.random.default_rng(4)
    tokens, targets = rng.integers(0, vocab_size, (2, SEQUENCES, LENGTH))
    targets[rng.random(targets.shape) < np.linspace(0.6, 0.0, SEQUENCES)[:, None]] = -1
    segment = np.zeros_like(tokens) + (np.arange(LENGTH) >= 5)
    return inputs(tokens, targets, segment, np.arange(LENGTH) - 5 * segment)


def rows(batch: Inputs, micro: slice) -> Inputs:
    return Inputs(
        tokens_BS=batch.tokens_BS[micro],
        targets_BS=batch.targets_BS[micro],
        segment_BS=batch.segment_BS[micro],
        position_BS=batch.position_BS[micro],
        noise_TD={},
    )


class Stepper:
    """A compiled step whose weights and moments can be set back."""

    def __init__(self, config: ModelConfig, num_micro: int) -> None:
        self.config, self.num_micro = config, num_micro
        self.params = random_params(config, seed=6)
        kernel_set = kernels("auto")
        self.model = Transformer(config, kernel_set, LENGTH)
        self.optimizer = AdamW(self.model.weights(), OPTIM, kernel_set)
        self._step = TrainStep(self.model, self.optimizer, num_micro)

    def reset(self, changes: Mapping[str, F64] | None = None) -> None:
        params = self.params | dict(changes or {})
        for name, parameter in self.model.weights():
            parameter.set_data(ms.Tensor(params[name].astype(np.float32)))
        for moment in (*self.optimizer.first, *self.optimizer.second):
            moment.set_data(ms.Tensor(np.zeros(moment.shape, np.float32)))

    def step(self, *, scale: float = 1.0, limit: float = NO_LIMIT) -> StepResult:
        batch = batch_of(self.config.vocab_size)
        fed = (batch.tokens_BS, batch.targets_BS, batch.segment_BS, batch.position_BS)
        tokens, targets, segment, position = (x.astype(np.int32) for x in fed)
        control = np.array([*step_factors(OPTIM, 1e-2, 1), scale, limit])
        of_step = Batch(tokens_BS=tokens, targets_BS=targets, segment_BS=segment, position_BS=position)
        return self._step(of_step, NOISE_SEED, control)

    def state(self) -> dict[str, Array]:
        names = [name for name, _ in self.model.weights()]
        kinds = {"": self.optimizer.weights, "first.": self.optimizer.first, "second.": self.optimizer.second}
        return {
            kind + name: tensor.asnumpy().copy()
            for kind, tensors in kinds.items()
            for name, tensor in zip(names, tensors, strict=True)
        }


@cache
def stepper(name: str, num_micro: int) -> Stepper:
    """Compiled once for all tests."""
    return Stepper({"plain": PLAIN, "busy": BUSY}[name], num_micro)


def expected_step(made: Stepper) -> tuple[float, dict[str, F64]]:
    """Cross entropy and gradients of a step: the cross entropy is a mean over the step's counted targets, the
    router's losses are means over its micro-batches, each with noise of its own."""
    config, batch = made.config, batch_of(made.config.vocab_size)
    assert config.moe is not None
    without = config.model_copy(
        update={"moe": config.moe.model_copy(update={"aux_loss_coef": 0.0, "z_loss_coef": 0.0})}
    )
    size, counted = SEQUENCES // made.num_micro, (batch.targets_BS >= 0).sum()
    loss, grads = 0.0, {name: np.zeros_like(value) for name, value in made.params.items()}
    for i in range(made.num_micro):
        micro = rows(batch, slice(i * size, (i + 1) * size))
        micro = replace(micro, noise_TD=noise(config, micro, (NOISE_SEED * 65537 + i) % 2**31))
        share = (micro.targets_BS >= 0).sum() / counted
        out, both = transformer_grads(made.params, config, micro)
        _, of_loss = transformer_grads(made.params, without, micro)
        loss += share * out.cross_entropy
        for name, total in grads.items():
            total += share * of_loss[name] + (both[name] - of_loss[name]) / made.num_micro
    return loss, grads


CASES = [("plain", 1), ("plain", 2), ("plain", 4), ("busy", 2)]


@pytest.mark.parametrize(("name", "num_micro"), CASES)
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_step_equals_the_oracles(name: str, num_micro: int, scale: float) -> None:
    made = stepper(name, num_micro)
    made.reset()
    result = made.step(scale=scale)
    loss, grads = expected_step(made)
    clipped, norm = clip_by_global_norm(grads, OPTIM.clip_norm)
    assert result.applied
    assert result.loss == pytest.approx(loss, rel=TOLERANCE)
    assert result.grad_norm == pytest.approx(norm, rel=TOLERANCE)
    squares = [float((grads[name] ** 2).sum()) for name, _ in made.model.weights()]
    np.testing.assert_allclose(list(result.squares.values()), squares, rtol=TOLERANCE)
    found = made.state()
    for weight, grad in clipped.items():
        start = Moments(first=np.zeros(grad.shape), second=np.zeros(grad.shape))
        before = made.params[weight].astype(np.float32).astype(np.float64)
        after, moments = adamw(before, grad, start, 1, 1e-2, OPTIM, decay=grad.ndim > 1)
        assert relative_error(found[weight] - before, after - before) < TOLERANCE, weight
        assert relative_error(found["first." + weight], moments.first) < TOLERANCE, weight
        assert relative_error(found["second." + weight], moments.second) < TOLERANCE, weight


def test_figures_of_a_step_are_those_of_its_micro_batches_together() -> None:
    """Without the balance loss it does not matter how the step is cut."""
    results = []
    for num_micro in (1, 2, 4):
        stepper("plain", num_micro).reset()
        results.append(stepper("plain", num_micro).step())
    assignments = SEQUENCES * LENGTH * MOE.top_k
    for result in results:
        assert (result.counts_LE.sum(axis=1) == assignments).all()
        np.testing.assert_array_equal(result.counts_LE, results[0].counts_LE)
        assert result.num_dropped == 0
        assert result.total_loss == pytest.approx(result.loss + MOE.z_loss_coef * result.z_loss, rel=1e-5)
        for figure in ("loss", "z_loss", "total_loss", "grad_norm"):
            assert getattr(result, figure) == pytest.approx(getattr(results[0], figure), rel=1e-5), figure


@pytest.mark.parametrize("num_micro", [1, 2])
def test_a_bad_step_leaves_no_trace(num_micro: int) -> None:
    made = stepper("plain", num_micro)
    made.reset()
    made.step()
    expected = made.state()
    poison = made.params["layers.0.attn.out.weight"].copy()
    poison[3, 4] = math.nan
    made.reset({"layers.0.attn.out.weight": poison})
    before = made.state()
    result = made.step()
    assert not result.applied and math.isnan(result.loss)
    assert_same_bits(made.state(), before)
    made.reset()
    assert made.step().applied
    assert_same_bits(made.state(), expected)


@pytest.mark.parametrize("num_micro", [1, 2])
def test_a_spike_changes_nothing(num_micro: int) -> None:
    made = stepper("plain", num_micro)
    made.reset()
    before = made.state()
    limit = made.step(limit=0.0).total_loss
    assert_same_bits(made.state(), before)
    assert not made.step(limit=limit * 0.999).applied
    assert_same_bits(made.state(), before)
    assert made.step(limit=limit * 1.001).applied


def assert_same_bits(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }
