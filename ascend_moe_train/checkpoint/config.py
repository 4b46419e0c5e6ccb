"""When and how training state is written. Pure."""

from typing import Annotated

from pydantic import Field

from ascend_moe_train.part import Part


class CheckpointConfig(Part):
    """Checkpoints go to `run.dir`/checkpoints; the newest `keep` stay. The last step is always saved."""

    every: Annotated[int, Field(gt=0)] = 200
    keep: Annotated[int, Field(gt=0)] = 3
    asynchronous: bool = True
