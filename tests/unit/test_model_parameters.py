"""The built model has the parameters that its config says it has."""

import pytest

from ascend_moe_train.model.config import ModelConfig, MoEConfig
from ascend_moe_train.model.counts import num_parameters, parameter_shapes
from ascend_moe_train.model.kernels.portable import PortableKernels
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.presets import tiny

DENSE = tiny().model_copy(update={"moe": None, "tie_embeddings": True})
MIXED = ModelConfig(
    vocab_size=100,
    hidden=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    ffn=56,
    qk_norm="head",
    moe=MoEConfig(num_experts=6, top_k=2, ffn=16, shared_ffn=12, dense_layers=(0,)),
)


@pytest.mark.parametrize("cfg", [tiny(), DENSE, MIXED], ids=["tiny", "dense", "mixed"])
def test_names_shapes_and_count(cfg: ModelConfig) -> None:
    parameters = Transformer(cfg, PortableKernels(), num_positions=16).trainable_params()
    assert {parameter.name: tuple(parameter.shape) for parameter in parameters} == parameter_shapes(cfg)
    assert sum(parameter.size for parameter in parameters) == num_parameters(cfg)
