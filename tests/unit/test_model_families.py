"""The parts of DeepSeek, GLM and gpt-oss in one batch of several documents, against the fp64 oracle.

Golden files of transformers (test_model_hf.py) hold whole sequences alone, and no balance loss of DeepSeek's.
"""

from dataclasses import replace

import pytest

from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.presets import tiny
from tests.model_cases import VOCAB, Case, batch, firm_params
from tests.model_run import NO_NOISE, CompiledModel, errors, kernels, noise
from tests.oracle.transformer import transformer_grads

TOLERANCE = 1e-4
NOISE_SEED = 5

DEEPSEEK = {
    "num_kv_heads": 4,
    "attention": {"mla": {"kv_latent": 12, "q_latent": 14, "nope_dim": 6, "rope_dim": 4, "value_dim": 10}},
    "rope": {"scaling": "yarn", "factor": 4.0, "original_positions": 16, "mscale_all_dim": 0.7},
    "moe": {
        "num_experts": 6,
        "top_k": 2,
        "ffn": 12,
        "shared_ffn": 8,
        "dense_layers": (0,),
        "score": "sigmoid",
        "num_groups": 3,
        "top_groups": 2,
        "groups_by": "best_two",
        "balance_bias_rate": 0.001,
        "routed_scale": 2.5,
        "aux_loss_coef": 0.3,
        "aux_loss_scope": "sequence",
    },
    "mtp": {"depth": 2, "loss_coef": 0.6},
}
GPT_OSS = {
    "attention": {"bias": "all", "sinks": True, "window": 3, "window_layers": (0,)},
    "rope": {"fraction": 0.5},
    "qk_norm": "full",
    "moe": {
        "num_experts": 4,
        "top_k": 2,
        "ffn": 12,
        "score_order": "after_topk",
        "router_bias": True,
        "expert_bias": True,
        "clamped_swiglu": {"alpha": 1.702, "limit": 1.0},
        "capacity_factor": 0.8,
        "jitter": 0.2,
    },
    "mtp": {},
    "tie_embeddings": True,
}


@pytest.mark.parametrize(
    ("options", "kernel_set"),
    [
        pytest.param(DEEPSEEK, "native", id="DeepSeek, native"),
        pytest.param(GPT_OSS, "portable", id="gpt-oss, portable"),
        pytest.param(DEEPSEEK, "portable", id="DeepSeek, portable", marks=pytest.mark.slow),
        pytest.param(GPT_OSS, "native", id="gpt-oss, native", marks=pytest.mark.slow),
    ],
)
def test_losses_and_every_gradient_equal_the_oracle(options: dict[str, object], kernel_set: str) -> None:
    chosen = kernels(kernel_set)
    config = ModelConfig.model_validate(tiny().model_dump() | {"vocab_size": VOCAB} | options)
    assert config.moe is not None
    seed = NOISE_SEED if config.moe.jitter else NO_NOISE
    fed = batch(Case(name="", kernels=kernel_set, config=config, has_documents=True))
    fed = replace(fed, noise_TD=noise(config, fed, seed))
    params = firm_params(config, fed)
    expected, grads = transformer_grads(params, config, fed)
    found = CompiledModel(config, chosen, params, num_positions=fed.tokens_BS.shape[1]).run(fed, seed)
    assert found.grads.keys() == grads.keys()
    too_large = {name: error for name, error in errors(found, expected, grads).items() if not error < TOLERANCE}
    assert too_large == {}
    assert found.counts_LE.shape[0] == len(expected.moe_layers)
