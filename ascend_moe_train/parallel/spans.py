"""How long collectives of a step take, how long the step waits for them, and what they move.

Pure.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from ascend_moe_train.parallel.comm import Comm, Group, ObservedComm

Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(max_length=64)]
_Key = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class CommTotal:
    """All calls of a verb in a group that carry the same (`contents.Content`). `payload_bytes` is the verb's payload on
    this rank (see `comm.Comm`), `total_s` what the calls took, with what this rank waited in them for others to come,
    `exposed_s` how long the step stood still for them; None in records of before it was known."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    verb: Name
    group: Name
    calls: Count
    payload_bytes: Count
    total_s: Seconds
    content: Name = "other"
    exposed_s: Seconds | None = None


@dataclass(frozen=True, kw_only=True)
class StepComm:
    """Of one step on one rank. `total_s` is the sum over all calls, `exposed_s` how long the step stood still for
    them; `calls` are added up by verb, group and content, in the order of their first."""

    total_s: float
    exposed_s: float
    calls: tuple[CommTotal, ...]

    @property
    def payload_bytes(self) -> int:
        """Of all calls."""
        return sum(each.payload_bytes for each in self.calls)


@dataclass(frozen=True, kw_only=True)
class TimedCall:
    """One call, from when to when on the clock of its `CallLog`, in seconds."""

    verb: str
    group: Group
    payload_bytes: int
    start_s: float
    end_s: float


@dataclass(kw_only=True)
class CallLog:
    """Every call by itself, and from when to when the step stood still for one. To be told right after it."""

    clock: Callable[[], float] = time.perf_counter
    calls: list[TimedCall] = field(default_factory=list)
    waits_s: list[tuple[float, float]] = field(default_factory=list)

    def ran(self, verb: str, group: Group, payload_bytes: int, seconds: float) -> None:
        """A call is over, which took so long."""
        end_s = self.clock()
        call = TimedCall(verb=verb, group=group, payload_bytes=payload_bytes, start_s=end_s - seconds, end_s=end_s)
        self.calls.append(call)

    def waited(self, seconds: float) -> None:
        """The step has stood still for so long."""
        end_s = self.clock()
        self.waits_s.append((end_s - seconds, end_s))


class Spans:
    """Adds up what is told of calls, from any thread, until it is taken. While it has a `log`, that is told too."""

    def __init__(self) -> None:
        self.log: CallLog | None = None
        self._lock = threading.Lock()
        self._ran: dict[_Key, tuple[int, int, float]] = {}
        self._exposed_s: dict[_Key, float] = {}

    def ran(self, verb: str, group: Group, payload_bytes: int, seconds: float) -> None:
        """A call is over, which took so long."""
        if (log := self.log) is not None:
            log.ran(verb, group, payload_bytes, seconds)
        key = verb, group.name, group.content
        with self._lock:
            calls, moved, total_s = self._ran.get(key, (0, 0, 0.0))
            self._ran[key] = calls + 1, moved + payload_bytes, total_s + seconds

    def waited(self, verb: str, group: Group, seconds: float) -> None:
        """The step has stood still for a call for so long."""
        if (log := self.log) is not None:
            log.waited(seconds)
        key = verb, group.name, group.content
        with self._lock:
            self._exposed_s[key] = self._exposed_s.get(key, 0.0) + seconds

    def take(self) -> StepComm:
        """What has been told since this was called last."""
        with self._lock:
            ran, exposed_s = self._ran, self._exposed_s
            self._ran, self._exposed_s = {}, {}
        calls = tuple(
            CommTotal(
                verb=key[0],
                group=key[1],
                content=key[2],
                calls=count,
                payload_bytes=moved,
                total_s=total_s,
                exposed_s=exposed_s.get(key, 0.0),
            )
            for key, (count, moved, total_s) in ran.items()
        )
        total_s = sum(each.total_s for each in calls)
        return StepComm(total_s=total_s, exposed_s=sum(exposed_s.values()), calls=calls)


class TimedComm(ObservedComm):
    """Tells `on_span` of every call that moves something or waits for others: verb, group, payload in bytes, and
    seconds."""

    def __init__(
        self,
        inner: Comm,
        on_span: Callable[[str, Group, int, float], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self._on_span, self._clock = on_span, clock

    def _observe(self, verb: str, group: Group, payload: int, call: Callable[[], Any]) -> Any:
        start_s = self._clock()
        result = call()
        if verb != "split" and group.size > 1:
            self._on_span(verb, group, payload, self._clock() - start_s)
        return result
