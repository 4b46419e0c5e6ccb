"""What was found in logs: who says it, when, where it stands. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ascend_moe_train.doctor.clock import Moment
from ascend_moe_train.doctor.rule import Rule

Part = Literal["rank", "scheduler", "launcher", "kernel", "tool", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """Who wrote a line: a rank, if that is known; else what is known of it."""

    part: Part = "unknown"
    rank: int | None = None
    pid: int | None = None
    host: str | None = None
    device: int | None = None

    @property
    def words(self) -> str:
        """Such as `rank 3`, `the scheduler` or `process 4711`."""
        if self.rank is not None:
            return f"rank {self.rank}"
        if self.part in ("scheduler", "launcher", "kernel"):
            return f"the {self.part}"
        where = f" on {self.host}" if self.host else ""
        if self.device is not None:
            return f"device {self.device}{where}"
        return f"process {self.pid}{where}" if self.pid is not None else f"somebody{where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A line of a source, from 1."""

    source: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A line that a rule knows. `at_s` is on the clock of all; `order` is its place among all events. One that
    `is_warning` counts only where something else is wrong."""

    rule: Rule
    actor: Actor
    place: Place
    text: str
    moment: Moment | None
    values: Mapping[str, str] = field(default_factory=dict)
    at_s: float | None = None
    order: int = 0
    is_warning: bool = False

    def value(self, name: str) -> int | None:
        """A whole number that the line gives; None if it does not."""
        text = self.values.get(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None

    def by(self, actor: Actor) -> "Event":
        """The same by another."""
        return replace(self, actor=actor)


@dataclass(kw_only=True, slots=True)
class Scanned:
    """What one source holds. `ranks` are those its lines claim for themselves; `steps` are (step, moment) near its end,
    `losses` (step, line, figures); `counts` how often each rule matched; `is_cut` whether its last line has no end;
    `start` names the start of the run that it ends with."""

    name: str
    actor: Actor
    events: list[Event] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    steps: list[tuple[int, Moment | None]] = field(default_factory=list)
    losses: list[tuple[int, int, Mapping[str, float]]] = field(default_factory=list)
    first: Moment | None = None
    last: Moment | None = None
    last_text: str = ""
    num_lines: int = 0
    num_bytes: int = 0
    is_cut: bool = False
    start: str = ""
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that was read, on one clock, with ranks where they could be told. `ranks` are all that are known of;
    `by_rank` are the sources of each,
    `pids` the ranks of processes, `source_ranks` those of whole sources."""

    events: Sequence[Event]
    sources: Sequence[Scanned]
    ranks: tuple[int, ...]
    by_rank: Mapping[int, tuple[Scanned, ...]]
    offsets_s: Mapping[str, float]
    pids: Mapping[int, int]
    source_ranks: Mapping[str, int | None]

    def of(self, *rule_ids: str) -> list[Event]:
        """Events of some rules, in the order of time."""
        return [event for event in self.events if event.rule.id in rule_ids]

    def of_role(self, *roles: str) -> list[Event]:
        """Events of some roles, in the order of time."""
        return [event for event in self.events if event.rule.role in roles]
