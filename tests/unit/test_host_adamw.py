"""AdamW in host memory against the fp64 oracle."""

import math
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.optim.adamw import step_factors
from ascend_moe_train.optim.config import OptimConfig
from ascend_moe_train.optim.host_adamw import CHUNK, HostAdamW, HostTensor
from tests.model_run import kernels
from tests.oracle.adamw import Moments, adamw, clip_by_global_norm
from tests.oracle.differences import relative_error

TOLERANCE = 1e-5
# one that ends inside a chunk, one of several
SHAPES = {"norm.weight": (7,), "ffn.weight": (CHUNK // 4 + 1, 6)}
DIMS = {"norm.weight": 1, "ffn.weight": 2}


def arrays(seed: int, size: float) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: (size * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("scale", [1.0, 65536.0])
@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_steps_equal_the_oracle(scale: float, clip_norm: float | None) -> None:
    config = OptimConfig(clip_norm=clip_norm, weight_decay=0.1, eps=1e-6)
    start = arrays(seed=0, size=0.3)
    tensors = [(name, HostTensor(shape)) for name, shape in SHAPES.items()]
    for name, tensor in tensors:
        tensor.array[...] = start[name]
    optimizer = HostAdamW(tensors, config, kernels("portable"), DIMS)
    weights = {name: value.astype(np.float64) for name, value in start.items()}
    moments = {name: Moments(first=np.zeros(shape), second=np.zeros(shape)) for name, shape in SHAPES.items()}
    for update, size in enumerate((1e-3, 5.0, 0.05), 1):
        grads, lr = arrays(seed=update, size=size), 1e-2 * update
        clipped, norm = clip_by_global_norm(grads, math.inf if clip_norm is None else clip_norm)
        control = np.array([*step_factors(config, lr, update), scale, math.inf])
        optimizer.update([grads[name] * np.float32(scale) for name in SHAPES], norm, control)
        for i, (name, grad) in enumerate(clipped.items()):
            weights[name], moments[name] = adamw(
                weights[name], grad, moments[name], update, lr, config, decay=len(grad.shape) > 1
            )
            moved, expected = tensors[i][1].array - start[name], weights[name] - start[name]
            assert relative_error(moved, expected) < TOLERANCE, (update, name)
            for kind, found in (("first", optimizer.first), ("second", optimizer.second)):
                moment = found[i].array.astype(np.float64)
                assert relative_error(moment, getattr(moments[name], kind)) < TOLERANCE, (update, name, kind)


def test_an_array_is_filled_and_read_as_a_parameter_is() -> None:
    tensor = HostTensor((2, 3))
    tensor.set_data(HostTensor((2, 3)))
    tensor.asnumpy()[1, 2] = 5
    assert (tensor.shape, tensor.size, float(tensor.array.sum())) == ((2, 3), 6, 5.0)
