"""Ranks that take longer than their like, named from what they themselves compute. Pure."""

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ascend_moe_train.train.config import GuardConfig
from ascend_moe_train.train.ranks import Ranks

LEAST_S = 0.01  # a difference a step below this is the clock's and the system's
_MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What a rank of a pipeline stage computes in a step: its time without what it stands still for others."""

    rank: int
    stage: int
    host: str
    compute_s: float


def slow_ranks(paces: Sequence[Pace], factor: float) -> dict[int, float]:
    """Ranks that take more than `factor` times the (lower) median of their stage, with that ratio, slowest first."""
    by_stage: dict[int, list[float]] = {}
    for pace in paces:
        by_stage.setdefault(pace.stage, []).append(pace.compute_s)
    usual = {stage: statistics.median_low(times) for stage, times in by_stage.items()}
    late = {
        pace.rank: pace.compute_s / usual[pace.stage]
        for pace in paces
        if pace.compute_s > max(factor * usual[pace.stage], usual[pace.stage] + LEAST_S) and usual[pace.stage] > 0
    }
    return dict(sorted(late.items(), key=lambda item: -item[1]))


class Stragglers:
    """Watches the pace of all ranks. All of them call it after the same steps."""

    def __init__(self, ranks: Ranks, guard: GuardConfig) -> None:
        self._ranks, self._factor, self._window = ranks, guard.straggler_factor, guard.straggler_window
        self._times_s: list[float] = []
        self._known: set[int] = set()

    def after_step(self, compute_s: float) -> str | None:
        """Takes in a step of this rank; at the end of a window, a line if other ranks are slow than at the last."""
        if self._factor is None or self._ranks.mesh.world_size == 1:
            return None
        self._times_s.append(compute_s)
        if len(self._times_s) < self._window:
            return None
        mine = [self._ranks.stage, socket.gethostname(), statistics.fmean(self._times_s)]
        paces = [
            Pace(rank=rank, stage=stage, host=host, compute_s=seconds)
            for rank, (stage, host, seconds) in enumerate(self._ranks.exchange(mine))
        ]
        self._times_s = []
        late = slow_ranks(paces, self._factor)
        before, self._known = self._known, set(late)
        if self._known == before:
            return None
        return _words(late, paces, self._window)


def _words(late: Mapping[int, float], paces: Sequence[Pace], window: int) -> str:
    if not late:
        return f"no rank is slow any more, over the last {window} steps"
    named = [
        f"rank {rank} on {paces[rank].host} computes {ratio:.1f} times as long a step as its like "
        f"({paces[rank].compute_s:.3g} s)"
        for rank, ratio in list(late.items())[:_MOST_NAMED]
    ]
    more = f", and {len(late) - _MOST_NAMED} more ranks" if len(late) > _MOST_NAMED else ""
    return f"slow over the last {window} steps: {', '.join(named)}{more}"
