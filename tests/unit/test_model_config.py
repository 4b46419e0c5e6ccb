"""Combinations of model options that cannot be: refused in one line that names the keys."""

import pytest
from pydantic import ValidationError

from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.presets import tiny

MLA: dict[str, object] = {"kv_latent": 8, "nope_dim": 4, "rope_dim": 4, "value_dim": 8}
OF_ALL_HEADS: dict[str, object] = {"num_kv_heads": 4}


def model(changes: dict[str, object], moe: dict[str, object] | None = None) -> ModelConfig:
    """`tiny` with some keys changed."""
    whole = tiny().model_dump()
    return ModelConfig.model_validate(whole | changes | {"moe": whole["moe"] | (moe or {})})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention": {"window": 4}}, "window 4 has no effect without window_layers: name some"),
        ({"attention": {"window_layers": (0,)}}, r"window_layers \[0\] have no effect without window: set it"),
        (
            {"attention": {"window": 4, "window_layers": (0, 2)}},
            r"attention.window_layers \[2\] beyond the last layer 1",
        ),
        ({"attention": {"mla": MLA}}, "num_kv_heads 2 is impossible with attention.mla, where each of num_heads 4"),
        ({**OF_ALL_HEADS, "attention": {"mla": MLA, "sinks": True}}, "sinks True is impossible with mla: leave it out"),
        ({**OF_ALL_HEADS, "attention": {"mla": MLA, "bias": "qkv"}}, "bias qkv is impossible with mla"),
        (
            {**OF_ALL_HEADS, "attention": {"mla": MLA, "window": 4, "window_layers": (0,)}},
            "window 4 is impossible with mla",
        ),
        ({**OF_ALL_HEADS, "attention": {"mla": MLA}, "head_dim": 8}, "head_dim 8 has no effect with attention.mla"),
        (
            {**OF_ALL_HEADS, "attention": {"mla": MLA}, "qk_norm": "head"},
            "qk_norm head has no effect with attention.mla",
        ),
        (
            {**OF_ALL_HEADS, "attention": {"mla": MLA}, "rope": {"fraction": 0.5}},
            r"rope.fraction 0\.5 has no effect with attention.mla",
        ),
        ({**OF_ALL_HEADS, "attention": {"mla": {**MLA, "rope_dim": 3}}}, "attention.mla.rope_dim 3 is odd"),
    ],
    ids=str,
)
def test_impossible_attention(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        model(changes)


@pytest.mark.parametrize(
    ("moe", "says"),
    [
        ({"top_groups": 2}, "top_groups 2, groups_by 'best' have no effect with num_groups 1: set it"),
        ({"groups_by": "best_two"}, "top_groups 1, groups_by 'best_two' have no effect with num_groups 1"),
        ({"num_groups": 3}, "num_experts 4 does not divide by num_groups 3"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups 3 is more than num_groups 2"),
        ({"num_groups": 4, "top_groups": 1}, "top_k 2 is more than top_groups 1 of 1 experts each hold"),
        (
            {"num_groups": 4, "top_groups": 2, "groups_by": "best_two"},
            "groups_by 'best_two' needs groups of two experts",
        ),
        (
            {"balance_bias_rate": 0.001, "score_order": "after_topk"},
            "balance_bias_rate is impossible with score_order 'after_topk'",
        ),
        ({"clamped_swiglu": {"limit": 0.0}}, "greater than 0"),
    ],
    ids=str,
)
def test_impossible_experts(moe: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        model({}, moe)


def test_what_is_possible_passes() -> None:
    latent = model({**OF_ALL_HEADS, "hidden": 30, "attention": {"mla": MLA}, "mtp": {"depth": 2}})
    assert (latent.head_size, latent.value_size, latent.rotary_size) == (8, 8, 4)
    assert model({"rope": {"fraction": 0.5}}).rotary_size == 4
