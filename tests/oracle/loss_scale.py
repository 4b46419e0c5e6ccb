"""Dynamic loss scale for fp16 (Micikevicius et al., 2018, section 3.2)."""

from dataclasses import dataclass

from ascend_moe_train.optim.config import LossScaleConfig


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The factor on the loss of the next step, and how it got there."""

    scale: float
    good_steps: int = 0
    """Since the scale last changed."""
    skipped: int = 0


def after_step(state: LossScale, finite: bool, config: LossScaleConfig) -> LossScale:
    """Overflow: skip the step and divide the scale, not below `min`. `window` good steps in a row: multiply it."""
    if not finite:
        lower = max(state.scale / config.factor, config.min)
        return LossScale(scale=lower, good_steps=0, skipped=state.skipped + 1)
    if state.good_steps + 1 == config.window:
        return LossScale(scale=state.scale * config.factor, good_steps=0, skipped=state.skipped)
    return LossScale(scale=state.scale, good_steps=state.good_steps + 1, skipped=state.skipped)
