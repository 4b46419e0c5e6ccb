"""Trainings that compute parts of the forward pass again."""

import gc
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ascend_moe_train.config import RunConfig, run_to_dict
from tests.parity.layouts import Case
from tests.parity.train_worker import train

Policy = Literal["selective", "full"]


@dataclass(frozen=True, kw_only=True)
class RecomputeCase(Case):
    """`layers` as in section `recompute`."""

    policy: Policy
    layers: int | None = None

    @property
    def name(self) -> str:
        """As the tests call it."""
        return f"{super().name}, {self.policy} recompute of {self.layers or 'all'} layers"

    @property
    def reference(self) -> Case:
        """The same training in one process, which keeps everything."""
        kept = {key: value for key, value in asdict(self).items() if key not in ("policy", "layers", "layout")}
        return Case(layout=None, **kept)

    def run(self) -> RunConfig:
        """The run file that a user would write."""
        recompute = {"policy": self.policy, "layers": self.layers}
        return RunConfig.model_validate_json(json.dumps({**run_to_dict(super().run()), "recompute": recompute}))


def on_rank(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `train` says of every case, in their order."""
    from ascend_moe_train.parallel.mpi import MpiComm

    comm = MpiComm()
    found = []
    for case in cases:
        found.append(train(RecomputeCase(**case), comm))
        gc.collect()  # compiled graphs are in cycles of references
    return found
