"""Dynamic loss scale (Micikevicius et al., 2018, section 3.2). Pure."""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import ConfigDict, Field

from ascend_moe_train.optim.config import LossScaleConfig


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale in force, the good steps since it last changed, and how often it overflowed."""

    # what a checkpoint must hold to be read back as one
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    scale: Annotated[float, Field(gt=0)]
    good_steps: Annotated[int, Field(ge=0)] = 0
    overflows: Annotated[int, Field(ge=0)] = 0

    def after(self, overflowed: bool, config: LossScaleConfig) -> "LossScale":
        """The state after one step: halved (by `factor`) on overflow, raised after `window` good steps in a row."""
        if overflowed:
            lower = max(config.min, self.scale / config.factor)
            return LossScale(scale=lower, overflows=self.overflows + 1)
        if self.good_steps + 1 >= config.window:
            return replace(self, scale=self.scale * config.factor, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)
