"""Model configs as config.json: what is written means the same model, and no more is changed than has to be."""

from collections.abc import Mapping
from typing import Any

import pytest

from ascend_moe_train.checkpoint.converted import output_differences
from ascend_moe_train.checkpoint.huggingface_config import model_config_from_hf
from ascend_moe_train.checkpoint.huggingface_families import FAMILIES
from ascend_moe_train.checkpoint.huggingface_write import family_of, with_dtype, write_config
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.presets import PRESETS, tiny
from tests.hf_folders import golden_model
from tests.oracle.golden import FAMILY_CASES


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_family_that_computes_it(name: str) -> None:
    model = PRESETS[name]()
    config = write_config(model, family_of(model), {})
    assert output_differences(model, model_config_from_hf(config)) == {}
    assert config["architectures"] == [f"{''.join(w.capitalize() for w in config['model_type'].split('_'))}ForCausalLM"]


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_config_of_the_same_model_stays_as_it_is(case: str) -> None:
    config, _ = golden_model(case)
    assert write_config(model_config_from_hf(config), config["model_type"], config) == config


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_only_what_differs_is_changed(case: str) -> None:
    config, _ = golden_model(case)
    model = model_config_from_hf(config).model_copy(update={"vocab_size": 99})
    written = write_config(model, config["model_type"], config)
    assert {key for key in written.keys() | config.keys() if written.get(key) != config.get(key)} == {"vocab_size"}


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_config_from_nothing_means_the_same(case: str) -> None:
    config, _ = golden_model(case)
    model = model_config_from_hf(config)
    assert output_differences(model, model_config_from_hf(write_config(model, config["model_type"], {}))) == {}


def test_every_family_is_among_the_cases() -> None:
    assert {golden_model(case)[0]["model_type"] for case in FAMILY_CASES} == set(FAMILIES)


def test_router_spelled_in_two_ways_is_the_same_model() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, ffn=48, score_order="after_topk")
    assert output_differences(tiny().model_copy(update={"moe": moe}), tiny()) == {}
    changed = moe.model_copy(update={"routed_scale": 2.0})
    assert output_differences(tiny().model_copy(update={"moe": changed}), tiny()) == {"moe.routed_scale": (2.0, 1.0)}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "float16"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float16"}, {"dtype": "bfloat16"}),
        ({}, {"torch_dtype": "bfloat16"}),
        ({"quantization_config": {"quant_method": "fp8"}}, {"torch_dtype": "bfloat16"}),
    ],
)
def test_dtype(config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert with_dtype(config, "bfloat16") == expected


def test_a_contradiction_is_one_line() -> None:
    with pytest.raises(
        CheckpointError, match=r"'mixtral' computes model\.moe\.routed_scale = 1\.0, this model has 2\.0"
    ) as caught:
        moe = MoEConfig(num_experts=4, top_k=2, ffn=48, routed_scale=2.0)
        write_config(tiny().model_copy(update={"moe": moe}), "mixtral", {})
    assert "\n" not in str(caught.value)
