"""Balance biases: their rule, their place in a step, in checkpoints and in what they are for."""

import math
from typing import Any

import mindspore as ms
import numpy as np
import pytest

from ascend_moe_train.data.loader import Batch
from ascend_moe_train.model.config import ModelConfig, MTPConfig
from ascend_moe_train.model.counts import buffer_shapes
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.adamw import AdamW, step_factors
from ascend_moe_train.optim.balance import BalanceBiases
from ascend_moe_train.optim.config import OptimConfig
from ascend_moe_train.presets import tiny
from ascend_moe_train.train.metrics import load_cv
from ascend_moe_train.train.step import TrainStep
from tests.model_run import kernels

RATE, STEPS = 0.02, 40
OPTIM = OptimConfig(lr=1e-6, weight_decay=0.0)


def config() -> ModelConfig:
    """One layer of experts, and one more block that predicts the token after the next."""
    whole = tiny()
    assert whole.moe is not None
    moe = whole.moe.model_copy(update={"balance_bias_rate": RATE, "score": "sigmoid", "aux_loss_coef": 0.0})
    return whole.model_copy(update={"num_layers": 1, "moe": moe, "mtp": MTPConfig()})


def batch(seed: int) -> Batch:
    tokens = np.random.default_rng(seed).integers(0, 64, (4, 17)).astype(np.int32)
    zeros = np.zeros((4, 16), np.int32)
    return Batch(
        tokens_BS=tokens[:, :-1],
        targets_BS=tokens[:, 1:],
        segment_BS=zeros,
        position_BS=zeros + np.arange(16, dtype=np.int32),
    )


def moved(bias: Any, counts: Any) -> Any:
    """DeepSeek-V3, section 2.1.2: down by the rate where there was more than the mean, up where less."""
    return bias + RATE * np.sign(counts.mean(axis=1, keepdims=True) - counts)


def test_rule() -> None:
    kernels("portable")
    starts = [np.array([0.5, -0.25, 0.0, 1.0], np.float32), np.zeros(4, np.float32)]
    biases = [(f"b{i}", ms.Parameter(ms.Tensor(start), name=f"b{i}")) for i, start in enumerate(starts)]
    update = BalanceBiases(biases, RATE)
    counts = np.array([[5, 3, 0, 8], [2, 2, 2, 2]], np.int32)
    update(ms.Tensor(counts), ms.Tensor(np.zeros(1, np.float32)))
    assert all(np.array_equal(p.asnumpy(), start) for (_, p), start in zip(biases, starts, strict=True))
    expected = np.stack(starts)
    for _ in range(2):
        expected = moved(expected, counts)
        found = update(ms.Tensor(counts), ms.Tensor(np.ones(1, np.float32))).asnumpy()
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(biases[1][1].asnumpy(), starts[1])
    np.testing.assert_allclose(biases[0][1].asnumpy(), expected[0], rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def stepped() -> tuple[Transformer, list[Any], list[Any]]:
    """A model whose router prefers experts 0 and 1, the counts of every step, and the biases after it."""
    kernel_set, made_of = kernels("native"), config()
    model = Transformer(made_of, kernel_set, 16)
    model.initialize(1)
    weights = dict(model.weights())
    embed, router = weights["embed.weight"], weights["layers.0.moe.router.weight"]
    embed.set_data(ms.Tensor(embed.asnumpy() + np.float32(0.02)))  # what all tokens have in common
    router.set_data(ms.Tensor(router.asnumpy() + np.array([[0.05], [0.05], [0.0], [0.0]], np.float32)))
    optimizer = AdamW(model.weights(), OPTIM, kernel_set)
    step, counts, biases = TrainStep(model, optimizer, num_micro=2), [], []
    for number in range(STEPS):
        highest = -1.0 if number == 3 else math.inf  # a step that is not applied
        control = np.array([*step_factors(OPTIM, OPTIM.lr, number + 1), 1.0, highest])
        counts.append(step(batch(number % 4), 0, control).counts_LE)
        biases.append(np.stack([parameter.asnumpy().copy() for _, parameter in model.buffers()]))
    return model, counts, biases


def test_a_step_moves_the_biases_by_the_counts_of_all_its_micro_batches(stepped: Any) -> None:
    _, counts, biases = stepped
    assert biases[0].shape == (2, 4)  # the block of multi-token prediction has a router of its own
    expected = np.zeros((2, 4))
    for number in range(STEPS):
        assert (counts[number].sum(axis=1) == 4 * 16 * 2).all()
        expected = expected if number == 3 else moved(expected, counts[number])
        np.testing.assert_allclose(biases[number], expected, rtol=1e-5, atol=1e-6)


def test_loads_become_even(stepped: Any) -> None:
    _, counts, _ = stepped
    first, last = (np.mean([load_cv(c[:1])[0] for c in part]) for part in (counts[:4], counts[-4:]))
    assert last < 0.5 * first


def test_biases_are_no_weights(stepped: Any) -> None:
    model, _, _ = stepped
    assert [name for name, _ in model.buffers()] == list(buffer_shapes(config()))
    assert not {name for name, _ in model.weights()} & set(buffer_shapes(config()))
    assert not any(parameter.requires_grad for _, parameter in model.buffers())
