"""Learning-rate schedules as pure functions of the step."""

import math

from ascend_moe_train.optim.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) in a run of `num_steps`.

    Warm-up gives step s the share (s + 1) / warmup_steps. After it, `progress` runs from 0 to 1 at the last step:
    `cosine` follows half a cosine (Loshchilov & Hutter, 2017), `linear` a line, both down to lr * min_lr_ratio; `wsd`
    stays flat and falls on a line over the last `decay_fraction` of all steps (MiniCPM: Hu et al., 2024, section 4).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    last = num_steps - 1
    if config.schedule == "wsd":
        start = max(config.warmup_steps, num_steps - round(num_steps * config.decay_fraction))
    else:
        start = config.warmup_steps
    if step < start:
        return config.lr
    progress = 1.0 if step >= last else (step - start) / (last - start)
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)
