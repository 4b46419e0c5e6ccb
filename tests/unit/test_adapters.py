"""Adapters by name and shape; what they add; what training them costs."""

import numpy as np
import pytest

from ascend_moe_train.model.adapters import (
    adapter_shapes,
    adapters,
    delta,
    num_adapter_parameters,
    run_flops_per_token,
)
from ascend_moe_train.model.config import LoraConfig, ModelConfig, MoEConfig
from ascend_moe_train.model.counts import (
    forward_flops_per_token,
    num_parameters,
    parameter_shapes,
    training_flops_per_token,
)
from ascend_moe_train.presets import PRESETS

MODEL = ModelConfig(
    vocab_size=40,
    hidden=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn=24,
    moe=MoEConfig(num_experts=4, top_k=2, ffn=12, shared_ffn=20, dense_layers=(0,)),
)


def places(*targets: str, model: ModelConfig = MODEL) -> list[str]:
    return [adapter.weight for adapter in adapters(model, LoraConfig(targets=targets))]


def test_targets_are_ends_of_places() -> None:
    assert places("attn.qkv") == ["layers.0.attn.qkv.weight", "layers.1.attn.qkv.weight"]
    assert places("experts.w13") == places("moe.experts.w13") == ["layers.1.moe.experts.w13"]
    assert places("w2") == ["layers.0.ffn.w2.weight", "layers.1.moe.experts.w2", "layers.1.moe.shared.w2.weight"]
    assert places("shared.w13", "out") == [
        "layers.0.attn.out.weight",
        "layers.1.attn.out.weight",
        "layers.1.moe.shared.w13.weight",
    ]


@pytest.mark.parametrize("target", ["qk", "attn", "router", "moe.router", "embed", "norm", "layers.0.attn.qkv", ""])
def test_what_no_target_may_be(target: str) -> None:
    with pytest.raises(ValueError, match=r"lora.targets: .* names no weight of this model: there are attn.qkv, attn.o"):
        places(target)


def test_latent_attention_has_its_own_places() -> None:
    model = PRESETS["deepseek_v2_lite"]()
    assert len(places("attn.kv_down", model=model)) == model.num_layers
    with pytest.raises(ValueError, match=r"'attn.qkv' names no weight of this model: there are attn.q, attn.kv_down"):
        places("attn.qkv", model=model)


def test_biases_are_not_adapted() -> None:
    model = PRESETS["gpt_oss_20b"]()
    assert set(places("w13", "w2", "qkv", "out", model=model)) <= set(parameter_shapes(model))
    assert not any("bias" in place for place in places("w13", "w2", "qkv", "out", model=model))


def test_shapes_fit_their_weights() -> None:
    lora = LoraConfig(r=3, targets=("attn.qkv", "attn.out", "ffn.w13", "experts.w13", "experts.w2", "shared.w2"))
    shapes, weights = adapter_shapes(MODEL, lora), parameter_shapes(MODEL)
    for adapter in adapters(MODEL, lora):
        a, b = np.ones(shapes[adapter.a]), np.ones(shapes[adapter.b])
        added = delta(adapter, {adapter.a: a, adapter.b: b}, lora)
        assert added.shape == weights[adapter.weight]
        assert not set(shapes) & set(weights)
    assert num_adapter_parameters(MODEL, lora) == sum(int(np.prod(shape)) for shape in shapes.values())


@pytest.mark.parametrize("target", ["attn.qkv", "experts.w13"])
def test_what_an_adapter_adds(target: str) -> None:
    """(x A^T) B^T alpha / r for dense weights, (x A) B alpha / r for those of each expert."""
    lora = LoraConfig(r=2, alpha=3.0, targets=(target,))
    adapter = adapters(MODEL, lora)[-1]
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(adapter.a_shape), rng.standard_normal(adapter.b_shape)
    added = delta(adapter, {adapter.a: a, adapter.b: b}, lora)
    x_TD = rng.standard_normal((5, 16))
    if target == "attn.qkv":
        np.testing.assert_allclose(x_TD @ added.T, x_TD @ a.T @ b.T * 1.5, rtol=1e-4)
        return
    for expert in range(4):
        np.testing.assert_allclose(x_TD @ added[expert], x_TD @ a[expert] @ b[expert] * 1.5, rtol=1e-4)


def test_frozen_weights_have_no_gradient_to_count() -> None:
    model, seq_len = PRESETS["mixtral_8x7b"](), 512
    lora = LoraConfig(r=16, targets=("attn.qkv", "attn.out", "experts.w13", "experts.w2"))
    assert run_flops_per_token(model, None, seq_len) == training_flops_per_token(model, seq_len)
    attention = model.num_layers * 2 * seq_len * model.hidden  # 2 S D a layer where half of the keys are seen
    products = forward_flops_per_token(model, seq_len) - attention
    hidden, ffn, top_k = 4096, 14336, 2
    adapted = (hidden + 6144) + (hidden + hidden) + top_k * ((hidden + 2 * ffn) + (ffn + hidden))
    assert run_flops_per_token(model, lora, seq_len) == 2 * products + 3 * (attention + model.num_layers * 32 * adapted)


def test_a_usual_share_of_a_large_model() -> None:
    model = PRESETS["mixtral_8x7b"]()
    share = num_adapter_parameters(model, LoraConfig(r=16)) / num_parameters(model)
    assert 2e-4 < share < 4e-4
