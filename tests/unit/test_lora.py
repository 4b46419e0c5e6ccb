"""Adapters in the compiled model against the fp64 oracle with merged weights: outputs, and gradients by the chain rule.

Shape letters: see model/kernels/protocol.py.
"""

import dataclasses

import mindspore as ms
import numpy as np
import pytest

from ascend_moe_train.model.adapters import adapters
from ascend_moe_train.model.config import LoraConfig, ModelConfig, MoEConfig
from ascend_moe_train.model.lora import apply_lora
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.presets import PRESETS
from tests.model_run import KERNEL_SETS, CompiledModel, Result, kernels
from tests.oracle.arrays import F64
from tests.oracle.differences import relative_error
from tests.oracle.transformer import Inputs, inputs, transformer_grads
from tests.oracle.weights import random_params

TOLERANCE = 1e-4
LORA = LoraConfig(
    r=3,
    alpha=5.0,
    targets=("attn.qkv", "attn.out", "ffn.w13", "ffn.w2", "experts.w13", "experts.w2", "shared.w13"),
)
MODEL = ModelConfig(
    vocab_size=31,
    hidden=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn=20,
    qk_norm="head",
    moe=MoEConfig(num_experts=5, top_k=2, ffn=12, shared_ffn=8, dense_layers=(0,), z_loss_coef=0.1),
)


def batch() -> Inputs:
    rng = np.random.default_rng(1)
    tokens_BS = rng.integers(0, 31, (2, 12))
    targets_BS = np.where(rng.random((2, 12)) < 0.3, -1, rng.integers(0, 31, (2, 12)))
    return inputs(tokens_BS, targets_BS)


def random_adapters(seed: int, *, zero_b: bool) -> dict[str, F64]:
    rng = np.random.default_rng(seed)
    values: dict[str, F64] = {}
    for adapter in adapters(MODEL, LORA):
        values[adapter.a] = rng.standard_normal(adapter.a_shape) * 0.3
        values[adapter.b] = rng.standard_normal(adapter.b_shape) * (0.0 if zero_b else 0.3)
    return values


def merged(params: dict[str, F64], values: dict[str, F64]) -> dict[str, F64]:
    whole = dict(params)
    for adapter in adapters(MODEL, LORA):
        a, b = values[adapter.a], values[adapter.b]
        whole[adapter.weight] = params[adapter.weight] + LORA.alpha / LORA.r * (b @ a if a.ndim == 2 else a @ b)
    return whole


@pytest.fixture(scope="module", params=KERNEL_SETS)
def compiled(request: pytest.FixtureRequest) -> tuple[Result, dict[str, F64], dict[str, F64]]:
    params, values = random_params(MODEL, 2), random_adapters(3, zero_b=False)
    model = CompiledModel(MODEL, kernels(request.param), params | values, num_positions=12, lora=LORA)
    return model.run(batch()), params, values


def test_outputs_are_those_of_merged_weights(compiled: tuple[Result, dict[str, F64], dict[str, F64]]) -> None:
    found, params, values = compiled
    expected, _ = transformer_grads(merged(params, values), MODEL, batch())
    base, _ = transformer_grads(params, MODEL, batch())
    assert relative_error(found.logits_BSV, expected.logits_BSV) < TOLERANCE
    assert found.total == pytest.approx(expected.total, rel=TOLERANCE)
    assert relative_error(base.logits_BSV, expected.logits_BSV) > 0.1


def test_gradients_of_adapters_and_of_nothing_else(compiled: tuple[Result, dict[str, F64], dict[str, F64]]) -> None:
    """With W' = W + c B A: dA = c B^T dW', dB = c dW' A^T; experts' factors are the other way round."""
    found, params, values = compiled
    _, grads = transformer_grads(merged(params, values), MODEL, batch())
    assert found.grads.keys() == values.keys()
    scale = LORA.alpha / LORA.r
    for adapter in adapters(MODEL, LORA):
        a, b, dw = values[adapter.a], values[adapter.b], grads[adapter.weight]
        left, right = (b, a) if a.ndim == 2 else (a, b)
        d_left, d_right = scale * dw @ right.swapaxes(-1, -2), scale * left.swapaxes(-1, -2) @ dw
        d_b, d_a = (d_left, d_right) if a.ndim == 2 else (d_right, d_left)
        assert relative_error(found.grads[adapter.a], d_a) < TOLERANCE, adapter.a
        assert relative_error(found.grads[adapter.b], d_b) < TOLERANCE, adapter.b


def test_nothing_counted_is_nothing_learned() -> None:
    """What users say is context. Without experts, whose balance is trained on every token, no gradient is left."""
    dense = MODEL.model_copy(update={"moe": None})
    params = random_params(dense, 2)
    silent = dataclasses.replace(batch(), targets_BS=np.full((2, 12), -1))
    found = CompiledModel(dense, kernels("portable"), params, num_positions=12).run(silent)
    assert found.cross_entropy == 0.0
    assert all(not grad.any() for grad in found.grads.values())


def test_a_fresh_adapter_changes_no_output() -> None:
    """B is zero, A is not, and both are functions of the seed and their names."""
    chosen = kernels("native")
    params = random_params(MODEL, 2)
    plain = CompiledModel(MODEL, chosen, params, num_positions=12).run(batch())
    fresh = CompiledModel(MODEL, chosen, params | random_adapters(3, zero_b=True), num_positions=12, lora=LORA)
    np.testing.assert_array_equal(fresh.run(batch()).logits_BSV, plain.logits_BSV)
    first, again, other = (fresh_adapters(seed) for seed in (1, 1, 2))
    for adapter in adapters(MODEL, LORA):
        assert not first[adapter.b].any()
        inner = adapter.a_shape[-1] if len(adapter.a_shape) == 2 else adapter.a_shape[-2]
        assert 0.8 < np.abs(first[adapter.a]).max() * np.sqrt(inner) <= 1.0
        np.testing.assert_array_equal(first[adapter.a], again[adapter.a])
        assert not np.array_equal(first[adapter.a], other[adapter.a])


def fresh_adapters(seed: int) -> dict[str, F64]:
    model = Transformer(MODEL, kernels("portable"), 12)
    apply_lora(model, MODEL, LORA, seed)
    return {name: parameter.asnumpy().copy() for name, parameter in model.weights() if parameter.requires_grad}


@pytest.mark.parametrize("preset", ["tiny", "deepseek_v2_lite", "gpt_oss_20b"])
def test_weights_keep_their_names_and_are_frozen(preset: str) -> None:
    small = {"hidden": 16, "num_layers": 2, "vocab_size": 20, "ffn": 8, "num_heads": 4, "num_kv_heads": 4}
    config = PRESETS[preset]()
    assert config.moe is not None
    moe = config.moe.model_copy(update={"num_experts": 4, "top_k": 2, "ffn": 8, "dense_layers": ()})
    attention = config.attention.model_copy(update={"window_layers": (0,) if config.attention.window else ()})
    config = config.model_copy(update={**small, "moe": moe, "attention": attention})
    targets = ("out", "experts.w13", "experts.w2")
    before = [name for name, _ in Transformer(config, kernels("portable"), 8).weights()]
    model = Transformer(config, kernels("portable"), 8)
    model.initialize(1)
    values = {name: parameter.asnumpy().copy() for name, parameter in model.weights()}
    apply_lora(model, config, LoraConfig(r=2, targets=targets), seed=1)
    after = dict(model.weights())
    assert sorted(name for name in after if "lora" not in name) == sorted(before)
    assert [name for name, parameter in after.items() if parameter.requires_grad] == [n for n in after if "lora" in n]
    assert len({parameter.name for parameter in after.values()}) == len(after)
    for name, value in values.items():
        np.testing.assert_array_equal(after[name].asnumpy(), value)
    assert isinstance(after[before[0]], ms.Parameter)


def test_frozen_balance_biases_do_not_move() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, ffn=8, score="sigmoid", balance_bias_rate=0.1)
    config = MODEL.model_copy(update={"moe": moe})
    model = Transformer(config, kernels("portable"), 8)
    apply_lora(model, config, LoraConfig(r=2), seed=1)
    assert model.buffers()
    assert model.balance_bias_rate == 0.0
