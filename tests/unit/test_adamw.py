"""The compiled AdamW against the fp64 oracle: updates, clipping, and steps that must change nothing."""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from numpy.typing import NDArray

from ascend_moe_train.optim.adamw import AdamW, step_factors
from ascend_moe_train.optim.config import OptimConfig
from tests.model_run import KERNEL_SETS, kernels
from tests.oracle.adamw import Moments, adamw, clip_by_global_norm
from tests.oracle.differences import relative_error

Array = NDArray[Any]

TOLERANCE = 1e-5
SHAPES = {"norm.weight": (7,), "ffn.weight": (5, 3), "experts.w2": (2, 3, 4)}
CLIP_NORM = 1.0
OPTIM = OptimConfig(clip_norm=CLIP_NORM, weight_decay=0.1, eps=1e-6)
NO_LIMIT = math.inf


def arrays(seed: int, scale: float = 1.0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}


class _Update(nn.Cell):
    def __init__(self, optimizer: AdamW) -> None:
        super().__init__()
        self.optimizer = optimizer

    def construct(self, grads: Any, loss: Any, control: Any) -> Any:
        square_P = ops.concat([self.optimizer.kernels.square_sum(g) for g in grads])
        norm, applied = self.optimizer(grads, ops.sum(square_P).reshape((1,)), loss, control)
        return norm, applied, square_P / (control[3] * control[3])


class Updated:
    """Parameters and their optimizer, set back to where they started before each test."""

    def __init__(self, kernel_set: Any, config: OptimConfig) -> None:
        self.config = config
        self.start = arrays(seed=0, scale=0.3)
        self.parameters = [(name, ms.Parameter(ms.Tensor(value))) for name, value in self.start.items()]
        self.optimizer = AdamW(self.parameters, config, kernel_set)
        self.update = _Update(self.optimizer)

    def reset(self) -> None:
        for name, parameter in self.parameters:
            parameter.set_data(ms.Tensor(self.start[name]))
        for moment in (*self.optimizer.first, *self.optimizer.second):
            moment.set_data(ms.Tensor(np.zeros(moment.shape, np.float32)))

    def state(self) -> dict[str, Array]:
        parts = {"": [p for _, p in self.parameters], "first.": self.optimizer.first, "second.": self.optimizer.second}
        return {
            kind + name: tensor.asnumpy().copy()
            for kind, tensors in parts.items()
            for name, tensor in zip(SHAPES, tensors, strict=True)
        }

    def step(
        self,
        grads: Mapping[str, Array],
        *,
        lr: float = 1e-2,
        update: int = 1,
        loss: float = 1.0,
        scale: float = 1.0,
        limit: float = NO_LIMIT,
    ) -> tuple[float, bool, Array]:
        control = ms.Tensor(np.array([*step_factors(self.config, lr, update), scale, limit], np.float32))
        tensors = tuple(ms.Tensor(grads[name] * np.float32(scale)) for name in SHAPES)
        norm, applied, square_P = self.update(ms.mutable(tensors), ms.Tensor(np.array([loss], np.float32)), control)
        return float(norm.asnumpy()[0]), bool(applied.asnumpy()[0]), square_P.asnumpy().copy()


@pytest.fixture(scope="module", params=KERNEL_SETS)
def compiled(request: pytest.FixtureRequest) -> Updated:
    return Updated(kernels(request.param), OPTIM)


@pytest.fixture
def updated(compiled: Updated) -> Iterator[Updated]:
    compiled.reset()
    yield compiled


def assert_five_steps_equal_the_oracle(updated: Updated, scale: float = 1.0) -> list[float]:
    """Five updates, gradients from far below to far above the clipping norm; returns the norms."""
    weights = {name: value.astype(np.float64) for name, value in updated.start.items()}
    moments = {name: Moments(first=np.zeros(shape), second=np.zeros(shape)) for name, shape in SHAPES.items()}
    norms = []
    for update, size in enumerate((1e-3, 5.0, 0.05, 1e3, 0.0), 1):
        grads, lr = arrays(seed=update, scale=size), 1e-2 * update
        norm, applied, square_P = updated.step(grads, lr=lr, update=update, scale=scale)
        clipped, expected_norm = clip_by_global_norm(grads, updated.config.clip_norm)
        assert applied
        assert norm == pytest.approx(expected_norm, rel=TOLERANCE)
        squares = [float((grad.astype(np.float64) ** 2).sum()) for grad in grads.values()]
        np.testing.assert_allclose(square_P, squares, rtol=TOLERANCE)
        norms.append(norm)
        found = updated.state()
        for name, grad in clipped.items():
            weights[name], moments[name] = adamw(
                weights[name], grad, moments[name], update, lr, updated.config, decay=len(grad.shape) > 1
            )
            moved, expected = found[name] - updated.start[name], weights[name] - updated.start[name]
            assert relative_error(moved, expected) < TOLERANCE, (update, name)
            assert relative_error(found["first." + name], moments[name].first) < TOLERANCE, (update, name)
            assert relative_error(found["second." + name], moments[name].second) < TOLERANCE, (update, name)
    return norms


def test_five_steps_equal_the_oracle(updated: Updated) -> None:
    norms = assert_five_steps_equal_the_oracle(updated)
    assert min(norms[:4]) < CLIP_NORM < max(norms)


def test_gradients_that_carry_a_loss_scale(updated: Updated) -> None:
    assert_five_steps_equal_the_oracle(updated, scale=65536.0)


@pytest.mark.parametrize("kernel_set", KERNEL_SETS)
def test_without_clipping(kernel_set: str) -> None:
    updated = Updated(kernels(kernel_set), OPTIM.model_copy(update={"clip_norm": None}))
    assert max(assert_five_steps_equal_the_oracle(updated)) > 100


def spoilt(value: float) -> dict[str, Array]:
    grads = arrays(seed=2)
    grads["ffn.weight"][1, 2] = value
    return grads


SKIPPED: dict[str, tuple[dict[str, Array], dict[str, float]]] = {
    "infinite gradient": (spoilt(math.inf), {}),
    "gradient that is no number": (spoilt(math.nan), {}),
    "norm that overflows": (spoilt(3e38), {}),
    "loss that is no number": (arrays(seed=2), {"loss": math.nan}),
    "infinite loss": (arrays(seed=2), {"loss": math.inf}),
    "loss of minus infinity": (arrays(seed=2), {"loss": -math.inf}),
    "spike": (arrays(seed=2), {"loss": 2.5, "limit": 2.4999}),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_a_skipped_step_changes_no_bit(case: str, updated: Updated) -> None:
    grads, options = SKIPPED[case]
    updated.step(arrays(seed=1))
    before = updated.state()
    norm, applied, _ = updated.step(grads, update=2, **options)
    assert not applied
    assert math.isfinite(norm) == ("loss" in options)
    after = updated.state()
    assert {name: value.tobytes() for name, value in after.items()} == {
        name: value.tobytes() for name, value in before.items()
    }


def test_a_good_step_after_a_skipped_one_is_as_if_nothing_had_been(updated: Updated) -> None:
    updated.step(arrays(seed=1))
    updated.step(arrays(seed=3), update=2)
    expected = updated.state()
    updated.reset()
    updated.step(arrays(seed=1))
    updated.step(spoilt(math.nan), update=2)
    updated.step(arrays(seed=3), update=2)
    found = updated.state()
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


def test_a_loss_at_the_limit_is_no_spike(updated: Updated) -> None:
    assert updated.step(arrays(seed=1), loss=2.5, limit=2.5)[1]
    assert not updated.step(arrays(seed=1), update=2, loss=2.5, limit=2.0)[1]
