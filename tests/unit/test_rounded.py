"""Half-precision activations: errors of the size of fp16 rounding, and gradients that leave its range as on a device.

Shape letters: see model/kernels/protocol.py.
"""

from dataclasses import dataclass
from functools import cache

import mindspore as ms
import numpy as np
import pytest

from ascend_moe_train.model.config import ModelConfig, MoEConfig
from ascend_moe_train.model.kernels.rounded import RoundedKernels
from tests.model_run import Array, CompiledModel, Result, errors, kernels
from tests.oracle.transformer import Inputs, Output, inputs, transformer_grads
from tests.oracle.weights import random_params

LENGTH = 12
CONFIG = ModelConfig(
    vocab_size=37,
    hidden=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn=20,
    qk_norm="head",
    moe=MoEConfig(
        num_experts=5,
        top_k=2,
        ffn=12,
        shared_ffn=8,
        dense_layers=(0,),
        capacity_factor=0.9,
        drop_policy="probability",
        aux_loss_coef=0.1,
        z_loss_coef=0.2,
    ),
)
PARAMS = random_params(CONFIG, seed=0)
GOOD_SCALE, TOO_SMALL, TOO_LARGE = 2.0**10, 2.0**-12, 2.0**40
LOSSES = ("cross_entropy", "balance", "z", "total")

# rounding is the same code around both
EACH = pytest.mark.parametrize("kernel_set", [pytest.param("portable", marks=pytest.mark.slow), "native"])

# Rounding the weights is one of several roundings of about the same size.
FEW = 4.0


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The oracle's answer, and how far it moves when the weights that meet activations are rounded to fp16."""

    batch: Inputs
    output: Output
    grads: dict[str, Array]
    rounding: dict[str, float]


@cache
def expected() -> Expected:
    generator = np.random.default_rng(0)
    batch = inputs(generator.integers(0, 37, (2, LENGTH)), generator.integers(-1, 37, (2, LENGTH)))
    rounded = {
        name: w if "norm" in name or "router" in name else w.astype(np.float16).astype(np.float64)
        for name, w in PARAMS.items()
    }
    output, grads = transformer_grads(PARAMS, CONFIG, batch)
    near, near_grads = transformer_grads(rounded, CONFIG, batch)
    as_result = Result(
        logits_BSV=near.logits_BSV,
        total=near.total,
        cross_entropy=near.cross_entropy,
        balance=near.balance,
        z=near.z,
        counts_LE=np.zeros(0),
        dropped=0,
        grads=near_grads,
    )
    return Expected(batch=batch, output=output, grads=grads, rounding=errors(as_result, output, grads))


@cache
def model(kernel_set: str) -> CompiledModel:
    return CompiledModel(CONFIG, RoundedKernels(kernels(kernel_set), ms.float16), PARAMS, LENGTH)


def found_errors(kernel_set: str, loss_scale: float) -> dict[str, float]:
    found = model(kernel_set).run(expected().batch, loss_scale=loss_scale)
    return errors(found, expected().output, expected().grads)


@EACH
def test_errors_are_of_the_size_of_rounding(kernel_set: str) -> None:
    found, rounding = found_errors(kernel_set, GOOD_SCALE), expected().rounding
    ratios = {name: found[name] / rounding[name] for name in found if name not in LOSSES}
    assert {name: ratio for name, ratio in ratios.items() if not 0.25 < ratio < FEW} == {}
    # the errors of a scalar may cancel: hold them to the largest
    assert max(found[name] for name in LOSSES) < max(rounding.values())


@EACH
def test_routing_and_drops_are_those_of_full_precision(kernel_set: str) -> None:
    found, layer = model(kernel_set).run(expected().batch), expected().output.moe_layers[1]
    chosen = np.bincount(layer.routing.expert_TK.reshape(-1), minlength=5)
    np.testing.assert_array_equal(found.counts_LE, chosen[None])
    assert found.dropped == layer.dispatch.dropped > 0


@EACH
def test_a_huge_loss_scale_overflows_every_gradient_but_not_the_loss(kernel_set: str) -> None:
    found = model(kernel_set).run(expected().batch, loss_scale=TOO_LARGE)
    assert [name for name, grad in found.grads.items() if np.isfinite(grad).all()] == []
    assert found.total == pytest.approx(expected().output.total, rel=1e-3)


@EACH
def test_a_tiny_loss_scale_loses_gradients(kernel_set: str) -> None:
    found, rounding = found_errors(kernel_set, TOO_SMALL), expected().rounding
    lost = [name for name in expected().grads if found[f"d {name}"] > FEW * rounding[f"d {name}"]]
    assert {"head.weight", "layers.0.attn.qkv.weight", "layers.1.moe.experts.w13", "embed.weight"} <= set(lost)


@EACH
def test_gradients_are_fp32(kernel_set: str) -> None:
    found = model(kernel_set).run(expected().batch)
    assert {grad.dtype for grad in found.grads.values()} == {np.dtype(np.float32)}
