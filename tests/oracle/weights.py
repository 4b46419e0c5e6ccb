"""Random weights that let a mistake show."""

import numpy as np

from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.model.counts import buffer_shapes, parameter_shapes
from tests.oracle.arrays import F64


def random_params(config: ModelConfig, seed: int) -> dict[str, F64]:
    """Weights and buffers: activations stay near 1; norm weights lie around 1, so that leaving one out shows."""
    rng = np.random.default_rng(seed)
    params: dict[str, F64] = {}
    for name, shape in parameter_shapes(config).items():
        noise = rng.standard_normal(shape)
        params[name] = 1.0 + 0.2 * noise if len(shape) == 1 else noise / np.sqrt(config.hidden)
    return params | {name: 0.3 * rng.standard_normal(shape) for name, shape in buffer_shapes(config).items()}
