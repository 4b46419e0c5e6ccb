"""How weights are updated. Pure."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ascend_moe_train.part import Part

Fraction = Annotated[float, Field(ge=0, le=1)]


class OptimConfig(Part):
    """AdamW (Loshchilov & Hutter, 2019) with a warm-up and a decay.

    The learning rate rises linearly over `warmup_steps`, then follows `schedule` down to `lr * min_lr_ratio`: `cosine`
    and `linear` over all remaining steps, `wsd` (warmup-stable-decay) flat and then linear over the last
    `decay_fraction` of the run.
    """

    lr: Annotated[float, Field(gt=0)] = 3e-4
    min_lr_ratio: Fraction = 0.1
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    decay_fraction: Fraction = 0.2
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0


class LossScaleConfig(Part):
    """Dynamic loss scale for fp16: multiplied by `factor` after `window` good steps, divided on overflow."""

    init: Annotated[float, Field(ge=1)] = 65536.0
    factor: Annotated[float, Field(gt=1)] = 2.0
    window: Annotated[int, Field(gt=0)] = 1000
    min: Annotated[float, Field(ge=1)] = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.init:
            raise ValueError(f"min {self.min} is above init {self.init}")
        return self
