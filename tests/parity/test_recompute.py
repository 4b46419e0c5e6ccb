"""What is computed again changes no result: the same bits on one process; on many, one process's losses, gradients,
norms, weights and drops, and the collectives that are reckoned with."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.config import RunConfig, run_to_dict
from tests.parity.layouts import Case
from tests.parity.test_training import check, reference
from tests.parity.train_worker import train


@dataclass(frozen=True, kw_only=True)
class Alone(Case):
    """On one process, in the first `layers` alone."""

    layout: str | None = None
    num_micro: int = 1
    layers: int | None = None

    @property
    def reference(self) -> Case:
        """The same training, which keeps everything."""
        kept = {key: value for key, value in asdict(self).items() if key not in ("layers", "recompute")}
        return Case(**kept)

    def run(self) -> RunConfig:
        """The run file that a user would write."""
        recompute = {"policy": self.recompute, "layers": self.layers}
        return RunConfig.model_validate_json(json.dumps({**run_to_dict(super().run()), "recompute": recompute}))


QUICK = [
    Alone(model="mixtral", mode="capacity", recompute="full"),
    Alone(model="mixtral", mode="capacity", recompute="selective"),
    # a block that runs again before one that does not, and an embedding that is used twice
    Alone(model="tied mixtral of 2", mode="dropless", recompute="full", layers=1),
]
ALONE = [
    Alone(model="deepseek", mode="dropless", recompute="full"),
    Alone(model="deepseek", mode="dropless", recompute="selective"),
    # a dense layer that runs again before one with experts that does not
    Alone(model="mtp deepseek of 2", mode="capacity", recompute="full", layers=1),
    Alone(model="tied mixtral of 2", mode="dropless", recompute="full"),
]


def some(layout: str, model: str, mode: str, num_micro: int, recompute: str = "full") -> Case:
    return Case(layout=layout, model=model, mode=mode, num_micro=num_micro, recompute=recompute)


ON_TWO = [
    some("tp2", "deepseek", "dropless", 1),
    some("tp2+sp", "mixtral", "capacity", 1),
    some("ep2", "deepseek", "capacity", 2),
    some("zero3 dp2", "deepseek", "dropless", 1),
    some("zero3 dp2", "mixtral", "dropless", 1, "selective"),
    some("pp2 zero bubble", "mtp deepseek of 2", "dropless", 4),
    some("cp2 ring", "mixtral", "dropless", 1),
    some("cp2 ulysses", "deepseek", "capacity", 1),
]
ON_FOUR = [
    some("pp2 x tp2 x ep2", "tied mixtral of 2", "capacity", 4),
    some("tp2+sp x ep2 x etp2 zero3", "deepseek", "dropless", 1),
]


def same_bits(found: Any, expected: Any) -> bool:
    """Whether two nests of results hold the same arrays and numbers."""
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same_bits(found[key], expected[key]) for key in found)
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(same_bits, found, expected))
    return np.asarray(found).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in ALONE)],
    ids=lambda case: f"{case.name}, layers {case.layers}",
)
def test_one_process_trains_the_same_bits(case: Alone) -> None:
    found, expected = train(case), reference(case.reference)
    for part in ("figures", "pieces"):
        assert same_bits(found[part], expected[part])


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does() -> None:
    check(ON_TWO)


@pytest.mark.slow
def test_four_ranks_train_as_one_process_does() -> None:
    check(ON_FOUR)
