"""The whole-model oracle against Hugging Face transformers: golden files always, live where torch is installed."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.oracle.differences import relative_error
from tests.oracle.golden import FAMILY_CASES, Array, Golden, golden, read_tensors
from tests.oracle.transformer import inputs, transformer, transformer_grads

TOLERANCE = 1e-4


def check(reference: Golden) -> None:
    """Logits, losses and every gradient."""
    config = reference.config
    out, grads = transformer_grads(reference.weights, config, inputs(reference.tokens_BS, reference.targets_BS))
    assert relative_error(out.logits_BSV, reference.logits_BSV) < TOLERANCE
    assert out.cross_entropy == pytest.approx(reference.cross_entropy, rel=TOLERANCE)
    if reference.balance is not None:
        assert out.balance == pytest.approx(reference.balance, rel=TOLERANCE)
    assert out.total == pytest.approx(reference.total, rel=TOLERANCE)
    assert grads.keys() == reference.grads.keys()
    errors = {name: relative_error(grads[name], grad) for name, grad in reference.grads.items()}
    assert {name: error for name, error in errors.items() if error >= TOLERANCE} == {}


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_oracle_matches_golden_file(case: str) -> None:
    check(golden(*read_tensors(case)))


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_every_weight_bears_on_the_golden_outputs(case: str) -> None:
    reference = golden(*read_tensors(case))
    batch, random = inputs(reference.tokens_BS, reference.targets_BS), np.random.default_rng(0)
    for name in reference.grads:
        if name.startswith("mtp."):
            continue  # these bear on the loss alone, which the gradients show
        weight = reference.weights[name]
        changed = {**reference.weights, name: weight * (1.0 + 0.2 * random.standard_normal(weight.shape))}
        logits = transformer(changed, reference.config, batch).logits_BSV
        assert relative_error(logits, reference.logits_BSV) > 10 * TOLERANCE, name


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_golden_routing_is_far_from_a_tie(case: str) -> None:
    reference = golden(*read_tensors(case))
    batch, random = inputs(reference.tokens_BS, reference.targets_BS), np.random.default_rng(0)
    nudged = {
        name: weight * (1.0 + 1e-5 * random.standard_normal(weight.shape)) for name, weight in reference.weights.items()
    }
    layers = transformer(reference.weights, reference.config, batch).moe_layers
    again = transformer(nudged, reference.config, batch).moe_layers
    assert bool(layers) == (reference.config.moe is not None)
    for layer, out in layers.items():
        before, after = (np.sort(each.routing.expert_TK, axis=1) for each in (out, again[layer]))
        np.testing.assert_array_equal(before, after)


def _live() -> Any:
    pytest.importorskip("torch", reason="torch is not installed: no live comparison")
    pytest.importorskip("transformers", reason="transformers is not installed: no live comparison")
    from scripts import make_golden

    return make_golden


def _as_numpy(tensors: Mapping[str, Any]) -> dict[str, Array]:
    return {name: value.numpy() for name, value in tensors.items()}


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_golden_file_is_what_transformers_computes_now(case: str) -> None:
    make_golden = _live()
    assert tuple(make_golden.GOLDEN_CASES) == FAMILY_CASES
    tensors, metadata = make_golden.compute(*make_golden.GOLDEN_CASES[case])
    stored, _ = read_tensors(case)
    assert stored.keys() == tensors.keys()
    for name, value in _as_numpy(tensors).items():
        assert relative_error(value, stored[name]) < TOLERANCE, name
    check(golden(_as_numpy(tensors), metadata))


@pytest.mark.parametrize(
    "case",
    [
        "mixtral_tied_wide_heads",
        "qwen3_moe_normalised_with_a_dense_layer",
        "qwen3_moe_every_second_layer",
        "qwen3_biased",
        "llama_biased_yarn",
        "deepseek_v2_groups",
        "deepseek_v3_two_tokens_further",
        "glm4_moe_plain",
        "gpt_oss_windows_everywhere",
    ],
)
def test_oracle_matches_transformers_live(case: str) -> None:
    make_golden = _live()
    tensors, metadata = make_golden.compute(*make_golden.LIVE_CASES[case])
    check(golden(_as_numpy(tensors), metadata))
