"""How long ranks wait for each other, and what happens after a failure: parts of section `parallel` of a run. Pure."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ascend_moe_train.part import Part

Seconds = Annotated[float, Field(gt=0)]


class DeadlineConfig(Part):
    """How long a rank may wait for the others before the run ends everywhere: while the step is compiled (its first
    run), in any later step, and while a checkpoint is written. A host that says nothing for `host_s` is lost."""

    compile_s: Seconds = 1800.0
    step_s: Seconds = 300.0
    save_s: Seconds = 600.0
    host_s: Annotated[float, Field(ge=5)] = 30.0


class RestartConfig(Part):
    """How often in a row `amt launch` starts a run again that has failed, before there is a newer checkpoint; and the
    pause before: the first is `pause_s`, each next one twice as long, none longer than `longest_pause_s`."""

    at_most: Annotated[int, Field(ge=0, le=1000)] = 0
    pause_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    longest_pause_s: Annotated[float, Field(ge=0, le=86400)] = 300.0

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.pause_s > self.longest_pause_s:
            raise ValueError(f"pause_s {self.pause_s} is more than longest_pause_s {self.longest_pause_s}")
        return self
