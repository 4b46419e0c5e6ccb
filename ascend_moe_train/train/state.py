"""What a run remembers from one step to the next besides its tensors, and how that goes into a checkpoint. Pure."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.optim.scaling import LossScale
from ascend_moe_train.train.metrics import first_problem


class TrainingState(BaseModel):
    """Counters and statistics of a run; one value per step, never changed in place.

    `step` is the number of finished steps and so the next step's index (data order, learning rate and noise are
    functions of it), `updates` counts those that changed the weights, `bad_in_row` the non-finite ones in a row up to
    now. After `fixed_after` updates 1-bit Adam's second moments stay as they are; until then `second_sum` is their sum
    when it was last looked at. `recent_losses` are the good losses that a spike is judged against, newest last.
    `data_skipped` is of how many steps the data was passed over in rewinds, the last `rewinds` of them in a row to the
    checkpoint of step `rewound_to`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    step: int = Field(default=0, ge=0)
    updates: int = Field(default=0, ge=0)
    tokens: int = Field(default=0, ge=0)
    bad_in_row: int = Field(default=0, ge=0)
    skipped: int = Field(default=0, ge=0)
    loss_scale: LossScale = LossScale(scale=1.0)
    smooth_total: float = 0.0
    smooth_weight: float = Field(default=0.0, ge=0)
    recent_losses: tuple[float, ...] = ()
    fixed_after: int | None = Field(default=None, ge=1)
    second_sum: float = Field(default=0.0, ge=0)
    data_skipped: int = Field(default=0, ge=0)
    rewinds: int = Field(default=0, ge=0)
    rewound_to: int | None = Field(default=None, ge=0)

    @property
    def data_step(self) -> int:
        """The number of the data that comes next."""
        return self.step + self.data_skipped

    def rewound(self, saved: "TrainingState") -> "TrainingState":
        """Where to go on after a bad step: at a saved state, with the data that follows that of the bad step."""
        count = self.rewinds + 1 if self.rewound_to == saved.step else 1
        skipped = self.data_step - saved.step
        return saved.model_copy(update={"data_skipped": skipped, "rewinds": count, "rewound_to": saved.step})

    @classmethod
    def from_meta(cls, meta: dict[str, Any], step: int, where: str) -> "TrainingState":
        """The state that the `meta` of a checkpoint of `step` holds. Raises CheckpointError naming the field."""
        try:
            state = cls.model_validate_json(json.dumps(meta["state"]))
        except KeyError:
            raise CheckpointError(f"{where}: manifest.json: meta.state is missing") from None
        except ValidationError as error:
            raise CheckpointError(f"{where}: manifest.json: meta.state: {first_problem(error)}") from None
        if state.step != step:
            raise CheckpointError(f"{where}: manifest.json: meta.state.step is {state.step}, the checkpoint's {step}")
        return state
