"""The built model has the parameters that its config says it has."""

import pytest

from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.model.counts import num_parameters, parameter_shapes
from ascend_moe_train.model.kernels.portable import PortableKernels
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.presets import tiny
from tests.oracle.golden import golden, read_tensors
from tests.unit.test_counts import EVERY_PART

DENSE = tiny().model_copy(update={"moe": None, "tie_embeddings": True})


GPT_OSS = golden(*read_tensors("gpt_oss_tiny")).config


@pytest.mark.parametrize("cfg", [tiny(), DENSE, EVERY_PART, GPT_OSS], ids=["tiny", "dense", "mixed", "gpt_oss"])
def test_names_shapes_and_count(cfg: ModelConfig) -> None:
    weights = Transformer(cfg, PortableKernels(), num_positions=16).weights()
    assert [(name, tuple(parameter.shape)) for name, parameter in weights] == list(parameter_shapes(cfg).items())
    assert sum(parameter.size for _, parameter in weights) == num_parameters(cfg)
