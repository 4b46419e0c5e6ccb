"""Spike limits by hand, and where numbers went wrong by name."""

import math
from collections.abc import Iterator

import mindspore as ms
import numpy as np
import pytest

from ascend_moe_train.cluster.rank import Unwatched
from ascend_moe_train.data.loader import Batch
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.parallel.comm import LocalComm
from ascend_moe_train.parallel.mesh import Mesh
from ascend_moe_train.presets import tiny
from ascend_moe_train.train.config import GuardConfig
from ascend_moe_train.train.guard import find_origin, remember_loss, spike_limit
from ascend_moe_train.train.ranks import Ranks
from ascend_moe_train.train.state import TrainingState
from ascend_moe_train.train.step import StepResult
from tests.model_run import kernels

GUARD = GuardConfig(spike_window=8, spike_sigma=3.0)


def state(*losses: float) -> TrainingState:
    return TrainingState(recent_losses=losses)


def test_limit_is_mean_and_deviations() -> None:
    losses = (2.0, 4.0, 2.0, 4.0, 2.0, 4.0, 2.0, 4.0)
    assert spike_limit(GUARD, state(*losses)) == pytest.approx(3.0 + 3.0 * 1.0)
    assert spike_limit(GUARD.model_copy(update={"spike_sigma": 0.5}), state(*losses)) == pytest.approx(3.5)


def test_no_limit_before_the_window_is_full_or_when_off() -> None:
    assert spike_limit(GUARD, state(*[2.0] * 7)) == math.inf
    assert spike_limit(GUARD.model_copy(update={"spike_action": "off"}), state(*[2.0] * 8)) == math.inf


@pytest.mark.parametrize("level", [2.0, -2.0])
def test_a_settled_run_may_still_rise_by_a_hundredth(level: float) -> None:
    assert spike_limit(GUARD, state(*[level] * 8)) == pytest.approx(level + 0.02)


def test_the_oldest_loss_is_forgotten() -> None:
    losses: tuple[float, ...] = ()
    for number in range(11):
        losses = remember_loss(GUARD, state(*losses), float(number))
    assert losses == (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0)


@pytest.fixture(scope="module")
def built() -> Transformer:
    return Transformer(tiny(), kernels("auto"), num_positions=8)


@pytest.fixture
def model(built: Transformer) -> Iterator[Transformer]:
    built.initialize(seed=1)
    yield built


def batch() -> Batch:
    tokens_BS = np.random.default_rng(0).integers(0, 64, (2, 8)).astype(np.int32)
    position_BS = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    return Batch(
        tokens_BS=tokens_BS, targets_BS=tokens_BS, segment_BS=np.zeros_like(tokens_BS), position_BS=position_BS
    )


def result(model: Transformer, **squares: float) -> StepResult:
    """Of a step whose gradients have squared norm 1, or what is given by the weight's name with _ for dots."""
    by_name = {name: squares.get(name.replace(".", "_"), 1.0) for name, _ in model.weights()}
    return StepResult(
        loss=2.0,
        mtp_loss=0.0,
        total_loss=2.0,
        aux_loss=0.0,
        z_loss=0.0,
        grad_norm=math.nan,
        applied=False,
        num_dropped=0,
        counts_LE=np.ones((2, 4), np.int64),
        squares=by_name,
    )


def change(model: Transformer, weight: str, place: tuple[int, ...] | slice, value: float) -> None:
    parameter = dict(model.weights())[weight]
    changed = parameter.asnumpy().copy()
    changed[place] = value
    parameter.set_data(ms.Tensor(changed))


HERE = LocalComm.world
ALONE = Ranks(comm=LocalComm(), device=None, mesh=Mesh.make(1), data=HERE, counting=HERE, progress=Unwatched())


def origin(model: Transformer, broken: StepResult) -> str:
    return find_origin(model, ALONE, batch(), broken, noise_seed=5, num_passes=2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_is_named_before_what_it_spoils(model: Transformer, value: float) -> None:
    change(model, "layers.1.moe.experts.w13", (2, 3, 4), value)
    assert origin(model, result(model, head_weight=math.nan)) == "weight layers.1.moe.experts.w13"


@pytest.mark.parametrize(
    ("weight", "place"),
    [
        ("layers.1.attn.out.weight", "output of layers.1 (sequence 0 of the batch)"),
        ("head.weight", "logits (sequence 0 of the batch)"),
    ],
)
def test_the_first_broken_activation_is_named(model: Transformer, weight: str, place: str) -> None:
    change(model, weight, slice(None), 3e38)
    assert origin(model, result(model, head_weight=math.nan)) == place


def test_the_gradient_that_broke_first_is_named(model: Transformer) -> None:
    """The way back runs from the head to the embedding, so the last weight that is broken broke first."""
    broken = result(model, embed_weight=math.nan, layers_0_attn_qkv_weight=math.inf, layers_0_attn_norm_weight=math.nan)
    assert origin(model, broken) == "gradient of layers.0.attn.qkv.weight"


def test_what_is_left_is_the_loss(model: Transformer) -> None:
    assert origin(model, result(model)) == "loss"
