"""The package's schedules against the oracle's, and what a config must not ask for."""

from itertools import product

import pytest

from ascend_moe_train.optim.config import OptimConfig
from ascend_moe_train.optim.lr import learning_rate
from tests.oracle import lr as oracle

SHAPES = list(product(["cosine", "linear", "wsd"], [0, 1, 5], [0.0, 0.05, 0.2, 0.31, 0.5, 1.0], [0.0, 0.1, 1.0]))


@pytest.mark.parametrize("num_steps", [1, 2, 6, 7, 20, 101])
def test_every_step_equals_the_oracle(num_steps: int) -> None:
    compared = 0
    for schedule, warmup_steps, decay_fraction, min_lr_ratio in SHAPES:
        optim = OptimConfig.model_validate(
            {
                "lr": 3e-4,
                "schedule": schedule,
                "warmup_steps": warmup_steps,
                "decay_fraction": decay_fraction,
                "min_lr_ratio": min_lr_ratio,
            }
        )
        if warmup_steps > num_steps or (schedule == "wsd" and warmup_steps + decay_fraction * num_steps > num_steps):
            continue
        found = [learning_rate(optim, step, num_steps) for step in range(num_steps)]
        expected = [oracle.learning_rate(step, num_steps, optim) for step in range(num_steps)]
        assert found == pytest.approx(expected, rel=1e-12), (schedule, warmup_steps, decay_fraction, min_lr_ratio)
        compared += 1
    assert compared >= 3


def test_every_rate_is_between_nothing_and_the_peak() -> None:
    for schedule, warmup_steps, decay_fraction, min_lr_ratio in SHAPES:
        optim = OptimConfig.model_validate(
            {"lr": 1.0, "schedule": schedule, "warmup_steps": warmup_steps, "min_lr_ratio": min_lr_ratio}
            | {"decay_fraction": decay_fraction}
        )
        assert all(0.0 <= learning_rate(optim, step, 30) <= 1.0 for step in range(40))


def test_steps_beyond_the_end_stay_at_the_floor() -> None:
    for schedule in ("cosine", "linear", "wsd"):
        optim = OptimConfig.model_validate({"lr": 2.0, "schedule": schedule, "warmup_steps": 3, "min_lr_ratio": 0.25})
        assert [learning_rate(optim, step, 10) for step in (9, 10, 50)] == pytest.approx([0.5, 0.5, 0.5])
