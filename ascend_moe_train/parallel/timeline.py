"""How long a pipeline schedule takes: when every action starts and ends, and what is idle. Pure.

The lists are those that the trainer runs (`schedule`), so what comes out here is what it would do if every action took
as long as it is said to.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ascend_moe_train.parallel.config import ScheduleName
from ascend_moe_train.parallel.schedule import COMPUTE, SENDS, Action, Channel, Kind, channels, walk

Durations = Callable[[int, Action], float]
"""(stage, action) -> seconds: of a pass how long it takes, of a send how long its message travels. Receives are not
asked for: they take as long as they wait."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """An action from its start to its end, in seconds from the start of the step. A receive begins when the stage comes
    to it and ends when its message is there; a send takes no time of its stage."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step."""

    spans: tuple[tuple[Span, ...], ...]
    """Of every stage, in the order of its list."""
    busy_s: tuple[float, ...]
    """What the passes of each stage take together."""
    step_s: float

    @property
    def bubble_shares(self) -> tuple[float, ...]:
        """Of each stage, the share of the step in which it is idle."""
        return tuple(1 - busy_s / self.step_s for busy_s in self.busy_s)

    @property
    def bubble_share(self) -> float:
        """The share of the step in which a stage is idle, over all stages."""
        return math.fsum(self.bubble_shares) / len(self.busy_s)

    @property
    def bubble_to_work(self) -> float:
        """Idle time through busy time, over all stages: the bubble fraction of Narayanan et al. (2021, arXiv
        2104.04473, section 2.2)."""
        work_s = math.fsum(self.busy_s)
        return (self.step_s * len(self.busy_s) - work_s) / work_s


@dataclass(frozen=True, kw_only=True)
class EqualStages:
    """`Durations` that are the same for every stage."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    send_s: float = 0.0

    def __call__(self, stage: int, action: Action) -> float:
        """Seconds of a pass or send."""
        if action.kind in SENDS:
            return self.send_s
        if action.kind is Kind.FORWARD:
            return self.forward_s
        return self.backward_s if action.kind is Kind.BACKWARD else self.weight_s


def equal_stages(
    name: ScheduleName, chunks: int, *, forward_s: float, backward_s: float, weight_s: float, send_s: float = 0.0
) -> EqualStages:
    """Durations from those of a micro-batch in a whole stage: each chunk has its part of them, and zero_bubble does
    `weight_s` of `backward_s` later."""
    later_s = weight_s if name == "zero_bubble" else 0.0
    return EqualStages(
        forward_s=forward_s / chunks,
        backward_s=(backward_s - later_s) / chunks,
        weight_s=later_s / chunks,
        send_s=send_s,
    )


def simulate(actions: Sequence[Sequence[Action]], durations: Durations) -> Timeline:
    """The timeline of the lists of all stages, which all begin at 0. A message that comes early waits, and takes no
    time of the stage that sends or receives it.

    Raises ValueError if stages wait for each other, a duration is not finite or negative, or nothing takes time.
    """
    num_stages = len(actions)
    ways = [channels(stage, num_stages) for stage in range(num_stages)]
    arrivals_s: dict[Channel, deque[float]] = {}
    now_s, busy_s = [0.0] * num_stages, [0.0] * num_stages
    spans: list[list[Span]] = [[] for _ in actions]
    for stage, each in walk(actions):
        start_s = now_s[stage]
        if each.kind in COMPUTE or each.kind in SENDS:
            duration_s = durations(stage, each)
            if not 0 <= duration_s < math.inf:
                raise ValueError(f"stage {stage}: {each} takes {duration_s} s: must be 0 or more, and finite")
        if each.kind in COMPUTE:
            now_s[stage] += duration_s
            busy_s[stage] += duration_s
        elif each.kind in SENDS:
            arrivals_s.setdefault(ways[stage][each.kind], deque()).append(start_s + duration_s)
        else:
            now_s[stage] = max(start_s, arrivals_s[ways[stage][each.kind]].popleft())
        spans[stage].append(Span(action=each, start_s=start_s, end_s=now_s[stage]))
    if not sum(busy_s) > 0:
        raise ValueError("no pass takes any time")
    return Timeline(spans=tuple(map(tuple, spans)), busy_s=tuple(busy_s), step_s=max(now_s))
