"""What one training run of the ladder measured, and the file that keeps it. Pure."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ascend_moe_train.parallel.spans import CommTotal
from ascend_moe_train.train.metrics import replace_file

ASKED, FOUND = "asked.json", "found.json"  # what ranks are told, and what they leave
SETTLED_SHARE = 0.5  # of the steps: the first compile, and the caches are cold
MAX_BYTES = 2**24

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Bytes = Annotated[int, Field(ge=0, le=2**53)]


@dataclass(frozen=True, kw_only=True)
class RankFound:
    """Of one rank. `start_bytes` is its memory before its model is built, `peak_bytes` the most in any step but the
    first: resident, without pages of files; times are of each step."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    start_bytes: Bytes
    peak_bytes: Bytes
    step_s: tuple[Number, ...]
    comm_s: tuple[Number, ...]
    exposed_s: tuple[Number, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one run. `losses` are those of each step, `ranks` in their order; `calls` are the first rank's collectives of
    the last step, and `sent_bytes` what it sends for them."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    device: str
    kernels: str
    tokens_per_step: int
    losses: tuple[Number, ...]
    ranks: tuple[RankFound, ...]
    calls: tuple[CommTotal, ...]
    sent_bytes: float

    @property
    def step_s(self) -> float:
        """Seconds of a step: the median of the later ones, of the slowest rank each."""
        return settled([max(each) for each in zip(*(rank.step_s for rank in self.ranks), strict=True)])

    @property
    def best_step_s(self) -> float:
        """Of the step after the first that other jobs held up least; of the slowest rank."""
        return min([max(each) for each in zip(*(rank.step_s for rank in self.ranks), strict=True)][1:])

    @property
    def comm_s(self) -> float:
        """What all collectives of a step took: the mean over ranks, the median over the later steps."""
        return settled([statistics.fmean(each) for each in zip(*(rank.comm_s for rank in self.ranks), strict=True)])

    @property
    def exposed_s(self) -> float:
        """How long the step stood still for them, likewise."""
        return settled([statistics.fmean(each) for each in zip(*(rank.exposed_s for rank in self.ranks), strict=True)])

    @property
    def memory_bytes(self) -> int:
        """The most that any rank has had in a step, beyond what it had before its model was built."""
        return max(rank.peak_bytes - rank.start_bytes for rank in self.ranks)

    @property
    def whole_bytes(self) -> int:
        """The most that any rank has had in a step, with what it had before its model was built."""
        return max(rank.peak_bytes for rank in self.ranks)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A measurement with what it is of: it counts for the same question only."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    asked: dict[str, Any]
    measured: Measured


_KEPT, _MEASURED = TypeAdapter(Kept), TypeAdapter(Measured)


def settled(values: list[float]) -> float:
    """The median of the later half of a run's steps."""
    return statistics.median(values[int(len(values) * SETTLED_SHARE) :])


def write_measured(path: Path, measured: Measured) -> None:
    """Whole or not at all. Raises MetricsError."""
    replace_file(path, [_MEASURED.dump_json(measured)])


def read_measured(path: Path) -> Measured | None:
    """None if there is none that can be read."""
    text = _text(path)
    try:
        return None if text is None else _MEASURED.validate_json(text)
    except ValidationError:
        return None


def keep(path: Path, asked: dict[str, Any], measured: Measured) -> None:
    """Keeps a measurement for `kept_for`. Raises MetricsError."""
    replace_file(path, [_KEPT.dump_json(Kept(asked=asked, measured=measured))])


def kept_for(path: Path, asked: dict[str, Any]) -> Measured | None:
    """The measurement that a file keeps, if it is of the same question; None for anything else."""
    text = _text(path)
    try:
        found = None if text is None else _KEPT.validate_json(text)
    except ValidationError:
        return None
    return found.measured if found is not None and found.asked == asked else None


def _text(path: Path) -> bytes | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError:
        return None
    return text if len(text) <= MAX_BYTES else None
