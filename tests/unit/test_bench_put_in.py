"""What rungs of the ladder put into a model computes what the model's own layers do: against the fp64 oracle."""

from typing import Any

import pytest

from ascend_moe_train.bench.put_in import put_one_by_one, put_permute
from ascend_moe_train.model.config import ClampedSwiGLUConfig, ModelConfig
from tests.model_cases import CASES, batch, firm_params
from tests.model_run import CompiledModel, errors, kernels
from tests.oracle.transformer import transformer_grads

TOLERANCE = 1e-5


# experts that drop nothing, in the order of tokens
CASE = next(
    case
    for case in CASES.values()
    if case.config.moe
    and case.kernels == "portable"
    and not (case.config.moe.capacity_factor or case.config.moe.jitter)
)


def biased(config: ModelConfig) -> ModelConfig:
    assert config.moe is not None
    own = config.moe.model_copy(update={"expert_bias": True, "clamped_swiglu": ClampedSwiGLUConfig()})
    return config.model_copy(update={"moe": own})


CONFIGS = {"plain": CASE.config, "biased": biased(CASE.config)}


def fused(model: Any) -> None:
    put_permute(model, kernels("native"))


@pytest.mark.parametrize(
    ("name", "put_in"),
    [pytest.param("plain", put_one_by_one, marks=pytest.mark.slow), ("biased", put_one_by_one), ("plain", fused)],
)
def test_losses_and_gradients_equal_the_oracle(name: str, put_in: Any) -> None:
    config, fed = CONFIGS[name], batch(CASE)
    params = firm_params(config, fed)
    model = CompiledModel(config, kernels("portable"), params, fed.tokens_BS.shape[1], put_in=put_in)
    found = model.run(fed)
    expected, grads = transformer_grads(params, config, fed)
    assert {part: error for part, error in errors(found, expected, grads).items() if not error < TOLERANCE} == {}
    assert found.dropped == 0
