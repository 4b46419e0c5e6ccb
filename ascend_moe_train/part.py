"""The base of every part of a run's configuration."""

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A frozen section of the run configuration: unknown keys, wrong types and non-finite numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
