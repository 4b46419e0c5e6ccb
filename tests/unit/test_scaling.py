"""The dynamic loss scale against the oracle's."""

import numpy as np
import pytest

from ascend_moe_train.optim.config import LossScaleConfig
from ascend_moe_train.optim.scaling import LossScale
from tests.oracle import loss_scale as oracle


@pytest.mark.parametrize(
    "config",
    [
        LossScaleConfig(),
        LossScaleConfig(init=8.0, factor=2.0, window=2, min=2.0),
        LossScaleConfig(init=5.0, factor=3.0, window=1, min=1.0),
        LossScaleConfig(init=4.0, factor=1.5, window=3, min=4.0),
    ],
)
def test_every_state_equals_the_oracle(config: LossScaleConfig) -> None:
    finite = np.random.default_rng(5).random(2500) < 0.8
    finite[1000:2100] = True
    found, expected = LossScale(scale=config.init), oracle.LossScale(scale=config.init)
    for good in finite:
        found, expected = found.after(not good, config), oracle.after_step(expected, bool(good), config)
        assert (found.scale, found.good_steps, found.overflows) == (
            expected.scale,
            expected.good_steps,
            expected.skipped,
        )
    assert found.overflows == int((~finite).sum())


def test_defaults_are_those_of_mixed_precision_training() -> None:
    config = LossScaleConfig()
    assert (config.init, config.factor, config.window) == (2.0**16, 2.0, 1000)
