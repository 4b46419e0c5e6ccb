"""Learning rate of every step of a run."""

import math

from ascend_moe_train.optim.config import OptimConfig


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Return the rate of `step` (from 0) in a run of `total_steps`.

    Step s of W warm-up steps has lr (s + 1) / W, so the last of them has lr. The run ends with n decay steps:
    all that follow the warm-up (cosine, linear) or round(decay_fraction * total_steps) of them at most (wsd). The
    i-th decay step (from 1) is i/n of the way from lr to min_lr_ratio * lr, so the last step of the run is there.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    decay_steps = total_steps - optim.warmup_steps
    if optim.schedule == "wsd":
        decay_steps = min(decay_steps, round(optim.decay_fraction * total_steps))
    nth = step + 1 - (total_steps - decay_steps)
    if nth <= 0:
        return optim.lr
    way = min(nth / decay_steps, 1.0) if decay_steps > 0 else 1.0
    left = 0.5 * (1.0 + math.cos(math.pi * way)) if optim.schedule == "cosine" else 1.0 - way
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * left)
