"""Rotary tables against the oracle's angles: every kind of scaling."""

import numpy as np
import pytest
from pydantic import ValidationError

from ascend_moe_train.model.config import ModelConfig, RopeConfig
from ascend_moe_train.model.rope import rope_tables, softmax_factor
from tests.oracle.differences import numeric_vjp, relative_error
from tests.oracle.rope import apply_rope, apply_rope_vjp, rope_angles, rope_magnitude, score_factor

ROPES = {
    "plain": RopeConfig(),
    "linear": RopeConfig(theta=500.0, scaling="linear", factor=4.0),
    "Llama 3.1": RopeConfig(theta=500000.0, scaling="llama3", factor=8.0, original_positions=8192),
    "DeepSeek-V2": RopeConfig(scaling="yarn", factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707),
    "YaRN, fractional borders": RopeConfig(
        theta=150000.0, scaling="yarn", factor=32.0, original_positions=4096, truncate=False
    ),
    "YaRN, uneven": RopeConfig(
        scaling="yarn", factor=3.0, original_positions=64, beta_fast=8.0, beta_slow=0.5, mscale=0.5, mscale_all_dim=2.0
    ),
    "YaRN, one border": RopeConfig(scaling="yarn", factor=4.0, original_positions=2, beta_fast=8.0, beta_slow=7.0),
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("size", [2, 64])
def test_tables_equal_the_oracle(rope: RopeConfig, size: int) -> None:
    cos, sin = rope_tables(rope, size, 3000)
    angle = rope_angles(np.arange(3000)[None], size, rope)[0]
    assert relative_error(cos.astype(np.float64), rope_magnitude(rope) * np.cos(angle)) < 1e-6
    assert relative_error(sin.astype(np.float64), rope_magnitude(rope) * np.sin(angle)) < 1e-6
    assert softmax_factor(rope) == pytest.approx(score_factor(rope), rel=1e-12)


def test_the_published_factors() -> None:
    # DeepSeek-V2's code: 0.1 * 0.707 * ln 40 + 1 = 1.2608038, squared; gpt-oss: 0.1 ln 32 + 1
    assert softmax_factor(ROPES["DeepSeek-V2"]) == pytest.approx(1.2608038**2, rel=1e-6)
    assert rope_magnitude(ROPES["DeepSeek-V2"]) == 1.0
    assert rope_magnitude(ROPES["YaRN, fractional borders"]) == pytest.approx(1.346574, rel=1e-6)


def test_scaling_changes_the_slow_pairs_only() -> None:
    plain, scaled = (rope_tables(ROPES[name], 128, 9)[1] for name in ("plain", "DeepSeek-V2"))
    assert np.array_equal(plain[:, :10], scaled[:, :10])
    np.testing.assert_allclose(scaled[1:, -10:] * 40, plain[1:, -10:], rtol=1e-4)


def test_oracle_of_a_partial_rotation_has_the_gradient_of_differences() -> None:
    random = np.random.default_rng(3)
    x, d_y = random.standard_normal((2, 1, 3, 2, 10))
    angle = random.standard_normal((1, 3, 3))
    expected = numeric_vjp(lambda z: apply_rope(z, angle, 1.3), x, d_y)
    assert relative_error(apply_rope_vjp(d_y, angle, 1.3), expected) < 1e-8
    assert np.array_equal(apply_rope(x, angle, 1.3)[..., 6:], x[..., 6:])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"factor": 2.0},
            "factor 2.0 has no effect with scaling 'none': set scaling to 'linear' or 'llama3' or 'yarn'",
        ),
        ({"scaling": "linear", "factor": 2.0, "beta_fast": 16.0}, "beta_fast 16.0 has no effect with scaling 'linear'"),
        ({"scaling": "llama3", "factor": 2.0}, "original_positions is missing: scaling 'llama3' needs it"),
        (
            {"scaling": "llama3", "factor": 2.0, "original_positions": 8, "low_freq_factor": 4.0},
            "low_freq_factor 4.0 is not below high_freq_factor 4.0",
        ),
        (
            {"scaling": "yarn", "factor": 2.0, "original_positions": 8, "beta_slow": 33.0},
            "beta_slow 33.0 is not below beta_fast 32.0",
        ),
    ],
    ids=str,
)
def test_impossible_combinations(keys: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        RopeConfig.model_validate(keys)


def test_part_of_a_head_that_is_no_pair() -> None:
    keys = {"vocab_size": 8, "hidden": 12, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "ffn": 8}
    with pytest.raises(ValidationError, match=r"head size 6 times rope\.fraction 0\.5 is 3, which is not a"):
        ModelConfig.model_validate(keys | {"rope": {"fraction": 0.5}})
