"""Oracles of what surrounds the layers: the whole model's gradient, the loss, AdamW, schedules, the loss scale."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.model.counts import parameter_shapes
from ascend_moe_train.optim.config import LossScaleConfig, OptimConfig
from tests.oracle.adamw import Moments, adamw, clip_by_global_norm
from tests.oracle.arrays import F64
from tests.oracle.differences import numeric_slope, numeric_vjp, relative_error
from tests.oracle.loss import cross_entropy, cross_entropy_vjp
from tests.oracle.loss_scale import LossScale, after_step
from tests.oracle.lr import learning_rate
from tests.oracle.mtp import further_depths
from tests.oracle.transformer import Inputs, inputs, transformer, transformer_grads
from tests.oracle.weights import random_params

TOLERANCE = 1e-6

MOE: dict[str, object] = {"num_experts": 4, "top_k": 2, "ffn": 5, "aux_loss_coef": 0.3, "z_loss_coef": 0.2}

MLA: dict[str, object] = {"kv_latent": 6, "nope_dim": 3, "rope_dim": 2, "value_dim": 5}
YARN: dict[str, object] = {"scaling": "yarn", "factor": 2.0, "original_positions": 16, "mscale_all_dim": 0.8}
BIASED_EXPERTS: dict[str, object] = {"expert_bias": True, "clamped_swiglu": {"alpha": 1.3, "limit": 1.1}}
GROUPS: dict[str, object] = {"num_groups": 2, "top_groups": 1, "groups_by": "best_two", "balance_bias_rate": 0.1}

MODELS: dict[str, dict[str, object]] = {
    "dense": {},
    "dense_tied": {"tie_embeddings": True},
    "moe_batch": {"moe": MOE},
    "moe_sequence_tied_qk_norm": {
        "moe": {**MOE, "aux_loss_scope": "sequence"},
        "tie_embeddings": True,
        "qk_norm": "head",
    },
    "moe_model_dense_first": {"moe": {**MOE, "aux_loss_scope": "model", "dense_layers": (0,), "shared_ffn": 3}},
    "moe_drops_wide_heads": {"moe": {**MOE, "capacity_factor": 0.75}, "head_dim": 6, "num_kv_heads": 1},
    "moe_sigmoid_rope_scaled": {
        "moe": {**MOE, "score": "sigmoid", "routed_scale": 2.0},
        "rope": {"theta": 100.0, "scaling": "linear", "factor": 2.0},
    },
    "latent": {"attention": {"mla": MLA}, "moe": MOE},
    "latent_queries_yarn": {"attention": {"mla": {**MLA, "q_latent": 5}}, "rope": YARN},
    "windows_sinks_biases": {
        "attention": {"bias": "all", "sinks": True, "window": 2, "window_layers": (1,)},
        "moe": {**MOE, "score_order": "after_topk", "router_bias": True, **BIASED_EXPERTS},
    },
    "bias_partial_rope": {"attention": {"bias": "qkv"}, "rope": {"fraction": 0.5}, "qk_norm": "full"},
    "groups_balance_bias_mtp": {
        "moe": {**MOE, "score": "sigmoid", **GROUPS, "aux_loss_scope": "sequence"},
        "mtp": {"depth": 2, "loss_coef": 0.7},
    },
    "dense_mtp_tied": {"mtp": {"depth": 1}, "tie_embeddings": True},
}


def model_config(name: str) -> ModelConfig:
    """Two layers, hidden 8: small enough for finite differences."""
    base = {"vocab_size": 11, "hidden": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "ffn": 6}
    return ModelConfig.model_validate(base | MODELS[name])


def batch_of(config: ModelConfig, sequences: int, length: int) -> Inputs:
    """Random tokens in two documents per sequence, one target not counted, jitter in each MoE layer."""
    rng = np.random.default_rng(3)
    tokens, targets = rng.integers(0, config.vocab_size, (2, sequences, length))
    targets[0, 0] = -1
    second = np.broadcast_to(np.arange(length) >= length // 2, tokens.shape).astype(np.int64)
    position = np.arange(length) - second * (length // 2)
    noise = {i: rng.uniform(0.9, 1.1, (tokens.size, config.hidden)) for i in range(2) if config.is_moe(i)}
    return inputs(tokens, targets, segment_BS=second, position_BS=position, noise_TD=noise)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("sequences", "length"), [(2, 5), (1, 2)])
def test_transformer_gradients(name: str, sequences: int, length: int) -> None:
    config = model_config(name)
    params, batch = random_params(config, seed=1), batch_of(config, sequences, length)
    out, grads = transformer_grads(params, config, batch)
    assert grads.keys() == parameter_shapes(config).keys()
    rng = np.random.default_rng(2)
    for weight, grad in grads.items():
        assert grad.shape == params[weight].shape
        direction = rng.standard_normal(grad.shape)
        slope = numeric_slope(_total(weight, params, config, batch), params[weight], direction)
        # The slope is a sum of signed terms: compare on the scale of their root sum of squares.
        scale = float(np.sqrt((grad**2).sum()))
        assert abs(float((grad * direction).sum()) - slope) < TOLERANCE * scale + 1e-10, weight
    assert out.total == transformer(params, config, batch).total


def _total(weight: str, params: dict[str, F64], config: ModelConfig, batch: Inputs) -> Callable[[F64], float]:
    return lambda value: transformer({**params, weight: value}, config, batch).total


def test_transformer_router_gradients_entry_by_entry() -> None:
    config = model_config("moe_sequence_tied_qk_norm")
    params, batch = random_params(config, seed=1), batch_of(config, 2, 5)
    _, grads = transformer_grads(params, config, batch)
    for weight in ("layers.0.moe.router.weight", "layers.1.attn.q_norm.weight", "layers.0.attn_norm.weight"):
        expected = numeric_vjp(_total(weight, params, config, batch), params[weight], 1.0)
        assert relative_error(grads[weight], expected) < TOLERANCE, weight


def test_transformer_total_adds_multi_token_prediction() -> None:
    config = model_config("dense_mtp_tied")
    params, batch = random_params(config, seed=1), batch_of(config, 2, 5)
    out = transformer(params, config, batch)
    assert out.total == pytest.approx(out.cross_entropy + 0.3 * out.further, rel=1e-15)
    # two documents of 2 and 3 tokens: in each, the last token has no target two places on
    assert config.mtp is not None
    counted = [
        (depth.targets_BS >= 0).tolist()
        for depth in further_depths(out.logits_BSV[..., :8].reshape(-1, 8), params, config, batch)
    ]
    assert counted == [[[True, False, True, True, False]] * 2]


def test_transformer_total_adds_the_router_losses() -> None:
    config = model_config("moe_batch")
    out = transformer(random_params(config, seed=1), config, batch_of(config, 2, 5))
    assert out.total == pytest.approx(out.cross_entropy + 0.3 * out.balance + 0.2 * out.z, rel=1e-15)
    assert out.balance > 1.0
    assert out.z > 0.0


def test_cross_entropy() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 3, 5))
    targets = np.array([[1, -1, 4], [0, 0, -1]])
    found, expected = cross_entropy_vjp(logits, targets), numeric_vjp(lambda x: cross_entropy(x, targets), logits, 1.0)
    assert relative_error(found, expected) < TOLERANCE
    assert cross_entropy(np.zeros((3, 5)), np.array([0, -1, 2])) == pytest.approx(np.log(5.0))
    assert cross_entropy(logits, np.full((2, 3), -1)) == 0.0
    assert not cross_entropy_vjp(logits, np.full((2, 3), -1)).any()


def test_adamw_first_step_moves_by_lr_and_decay() -> None:
    optim = OptimConfig(weight_decay=0.1, eps=1e-12)
    start = Moments(first=np.zeros(2), second=np.zeros(2))
    weight, grad = np.array([2.0, -2.0]), np.array([3.0, -0.5])
    decayed, moments = adamw(weight, grad, start, update=1, lr=0.01, optim=optim, decay=True)
    np.testing.assert_allclose(decayed, [2.0 - 0.01 - 0.002, -2.0 + 0.01 + 0.002])
    plain, _ = adamw(weight, grad, start, update=1, lr=0.01, optim=optim, decay=False)
    np.testing.assert_allclose(plain, [1.99, -1.99])
    np.testing.assert_allclose(moments.first, 0.1 * grad)
    np.testing.assert_allclose(moments.second, 0.05 * grad**2)


def test_adamw_second_step_by_hand() -> None:
    optim = OptimConfig(beta1=0.5, beta2=0.5, eps=1.0, weight_decay=0.0)
    weight, moments = np.array([0.0]), Moments(first=np.zeros(1), second=np.zeros(1))
    weight, moments = adamw(weight, np.array([2.0]), moments, update=1, lr=1.0, optim=optim, decay=True)
    np.testing.assert_allclose(weight, -2.0 / 3.0)
    weight, moments = adamw(weight, np.array([0.0]), moments, update=2, lr=1.0, optim=optim, decay=True)
    np.testing.assert_allclose(weight, -2.0 / 3.0 - (0.5 / 0.75) / (np.sqrt(1.0 / 0.75) + 1.0))


def test_clip_by_global_norm() -> None:
    grads = {"a": np.array([3.0]), "b": np.array([[0.0, 4.0]])}
    clipped, norm = clip_by_global_norm(grads, 1.0)
    assert norm == 5.0
    np.testing.assert_allclose(clipped["b"], [[0.0, 4.0 / (5.0 + 1e-6)]], rtol=1e-12)
    for limit in (6.0, None):
        kept, _ = clip_by_global_norm(grads, limit)
        np.testing.assert_array_equal(kept["a"], grads["a"])


def _rates(total_steps: int, **options: object) -> list[float]:
    optim = OptimConfig.model_validate({"lr": 1.0, "min_lr_ratio": 0.1, "warmup_steps": 4} | options)
    return [learning_rate(step, total_steps, optim) for step in range(total_steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_learning_rate_warms_up_and_ends_at_the_floor(schedule: str) -> None:
    rates = _rates(20, schedule=schedule)
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[-1] == pytest.approx(0.1)
    assert all(later <= sooner for sooner, later in pairwise(rates[3:]))


def test_learning_rate_by_hand() -> None:
    assert _rates(9, schedule="linear")[4:] == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1])
    assert _rates(7, schedule="cosine")[4:] == pytest.approx([1.0, 0.55, 0.1])
    assert _rates(10, schedule="wsd", decay_fraction=0.3)[4:] == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.55, 0.1])
    assert _rates(10, schedule="wsd", decay_fraction=0.1)[4:] == pytest.approx([1.0, 1.0, 1.0, 1.0, 1.0, 0.1])
    assert _rates(7, schedule="wsd", decay_fraction=1.0)[3:] == pytest.approx([1.0, 1.0, 0.55, 0.1])
    assert _rates(6, schedule="wsd", decay_fraction=0.0)[3:] == [1.0, 1.0, 1.0]
    assert _rates(3, schedule="linear", warmup_steps=0) == pytest.approx([1.0, 0.55, 0.1])
    assert _rates(4) == [0.25, 0.5, 0.75, 1.0]


def test_loss_scale() -> None:
    config = LossScaleConfig(init=8.0, factor=2.0, window=2, min=2.0)
    state, seen = LossScale(scale=config.init), []
    for finite in (True, True, True, False, True, True, False, False, False, False):
        state = after_step(state, finite, config)
        seen.append(state.scale)
    assert seen == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0, 8.0, 4.0, 2.0, 2.0]
    assert state.skipped == 5
