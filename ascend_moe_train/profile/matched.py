"""The same collective on several ranks: who waited for whom, by clocks that agree. Pure.

All ranks of a collective leave it together, so a rank's wait is its own time in it less the shortest of all; the rank
with the shortest came last. Clocks of ranks are compared at the ends of what they did together.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ascend_moe_train.profile.groups import is_p2p
from ascend_moe_train.profile.tables import Collective, Rank

SAME_CLOCK_NS = 100_000  # ends of one collective on one host are within some microseconds


@dataclass(frozen=True, kw_only=True)
class Shared:
    """One collective that at least two ranks took part in."""

    step: str
    name: str
    kind: str
    group: str
    by_rank: Mapping[int, Collective]
    last: int

    @property
    def spread_ms(self) -> float:
        """How much longer the first was in it than the last."""
        times = [each.elapse_ms for each in self.by_rank.values()]
        return max(times) - min(times)

    @property
    def moving_ms(self) -> float:
        """The shortest time in it: an upper bound of what moving the data took."""
        return min(each.elapse_ms for each in self.by_rank.values())

    def wait_ms(self, rank: int) -> float:
        """How long a rank waited for the last to come."""
        return self.by_rank[rank].elapse_ms - self.moving_ms


@dataclass(frozen=True, kw_only=True)
class Matching:
    """All shared collectives, what each rank's clock is ahead of the first's, and groups that could not be matched."""

    shared: tuple[Shared, ...]
    offsets_ns: Mapping[int, int]
    drifted: tuple[str, ...]

    def waits_ms(self) -> dict[int, float]:
        """By rank, of all steps together."""
        found: dict[int, float] = defaultdict(float)
        for each in self.shared:
            for rank in each.by_rank:
                found[rank] += each.wait_ms(rank)
        return dict(found)

    def times_last(self) -> Counter[int]:
        """How often each rank came last."""
        return Counter(each.last for each in self.shared)


def match(ranks: Sequence[Rank], stages: Mapping[int, int]) -> Matching:
    """Collectives by step, name and occurrence. Groups in which ranks saw different numbers of them are left out, since
    counters in names may have drifted apart. Names without a group are the same only inside a pipeline stage, since
    each stage has a graph of its own, and of messages between stages not even there."""
    found: dict[tuple[str, str, int, int], dict[int, Collective]] = defaultdict(dict)
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for rank in ranks:
        seen: Counter[tuple[str, str]] = Counter()
        for each in rank.collectives:
            has_group = bool(each.group) or "hcom_" in each.name
            if not has_group and is_p2p(each.kind):
                continue
            key = (each.step, each.name)
            found[*key, seen[key], 0 if has_group else stages.get(rank.rank, 0)][rank.rank] = each
            seen[key] += 1
            counts[each.group][rank.rank] += 1
    drifted = {group for group, by_rank in counts.items() if group and len(set(by_rank.values())) > 1}
    shared = {key: by_rank for key, by_rank in found.items() if len(by_rank) > 1}
    kept = {key: by for key, by in shared.items() if next(iter(by.values())).group not in drifted}
    offsets = _offsets(list(kept.values()))
    return Matching(
        shared=tuple(_shared(key[0], by_rank, offsets) for key, by_rank in kept.items()),
        offsets_ns=offsets,
        drifted=tuple(sorted(drifted)),
    )


def _shared(step: str, by_rank: Mapping[int, Collective], offsets: Mapping[int, int]) -> Shared:
    any_one = next(iter(by_rank.values()))
    is_timed = all(each.start_ns for each in by_rank.values())

    def lateness(rank: int) -> tuple[float, int]:
        each = by_rank[rank]
        return (each.start_ns - offsets.get(rank, 0) if is_timed else -each.elapse_ms), -rank

    return Shared(
        step=step,
        name=any_one.name,
        kind=any_one.kind,
        group=any_one.group,
        by_rank=by_rank,
        last=max(by_rank, key=lateness),
    )


def _offsets(shared: Sequence[Mapping[int, Collective]]) -> dict[int, int]:
    """From rank to rank along the groups that join them; clocks that agree are left alone."""
    apart: dict[tuple[int, int], list[int]] = defaultdict(list)
    for by_rank in shared:
        ends = {rank: each.start_ns + round(each.elapse_ms * 1e6) for rank, each in by_rank.items() if each.start_ns}
        ordered = sorted(ends)
        for one, other in pairwise(ordered):
            apart[one, other].append(ends[other] - ends[one])
    neighbours: dict[int, dict[int, int]] = defaultdict(dict)
    for (one, other), values in apart.items():
        step_ns = round(median(values))
        step_ns = step_ns if abs(step_ns) > SAME_CLOCK_NS else 0
        neighbours[one][other], neighbours[other][one] = step_ns, -step_ns
    offsets: dict[int, int] = {}
    for start in sorted(neighbours):
        if start in offsets:
            continue
        offsets[start] = 0
        waiting = [start]
        while waiting:
            rank = waiting.pop()
            for other, step_ns in neighbours[rank].items():
                if other not in offsets:
                    offsets[other] = offsets[rank] + step_ns
                    waiting.append(other)
    return offsets
