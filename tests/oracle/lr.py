"""Learning rate of every step of a run."""

import math

from ascend_moe_train.optim.config import OptimConfig


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Return the rate of `step` (from 0) in a run of `total_steps`.

    Step s of W warm-up steps has lr (s + 1) / W. The decay starts at step W (cosine, linear), or round(decay_fraction *
    total_steps) steps before the end but not inside the warm-up (wsd). Its first step has lr, the last step of the run
    min_lr_ratio * lr; a decay of one step is there at once.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    start, last = optim.warmup_steps, total_steps - 1
    if optim.schedule == "wsd":
        start = max(start, total_steps - round(optim.decay_fraction * total_steps))
    if step < start:
        return optim.lr
    way = 1.0 if step >= last else (step - start) / (last - start)
    left = 0.5 * (1.0 + math.cos(math.pi * way)) if optim.schedule == "cosine" else 1.0 - way
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * left)
