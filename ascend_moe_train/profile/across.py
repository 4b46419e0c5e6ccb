"""What ranks say together: stages, stragglers, what each kind of group costs, the critical path. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from ascend_moe_train.profile.communication import PAYLOAD
from ascend_moe_train.profile.groups import is_p2p
from ascend_moe_train.profile.layout import Layout
from ascend_moe_train.profile.matched import Matching, Shared
from ascend_moe_train.profile.tables import Collective, Rank

MIN_SHARE = 0.01  # of the step: what is shorter is not worth a word
MIN_TOKENS = 1.05  # more rows than the median of peers
MAX_PATH = 200


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage; means over its ranks, a step. Waiting is by comparison over ranks."""

    stage: int
    ranks: tuple[int, ...]
    computing_ms: float
    free_ms: float
    p2p_ms: float | None
    p2p_wait_ms: float | None
    bubble_written_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that its peers wait for. `delay_ms` a step, in `times` collectives; more than the median of its peers by
    `computing_ms` and `free_ms`."""

    rank: int
    stage: int | None
    delay_ms: float
    times: int
    computing_ms: float
    free_ms: float
    cause: str


@dataclass(frozen=True, kw_only=True)
class KindCost:
    """Collectives of one kind of group, a step, mean over the ranks that have any. None is not known."""

    kind: str
    groups: tuple[str, ...]
    ranks: int
    count: float
    elapse_ms: float
    exposed_ms: float | None
    wait_ms: float | None
    size_mb: float
    operators: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PathPart:
    """A stretch of the critical path: what rank did, from and to, in ms of the step."""

    rank: int
    start_ms: float
    end_ms: float
    what: str


@dataclass(frozen=True, kw_only=True)
class LinkClass:
    """Transport between ranks: bytes through time, and the slowest pair."""

    transport: str
    size_mb: float
    time_ms: float
    gb_per_s: float
    slowest: str
    slowest_gb_per_s: float


def stages_of(ranks: Sequence[Rank], layout: Layout, matching: Matching) -> list[Stage]:
    """Stages in order; none when it is not known that there are several."""
    if layout.num_stages < 2:
        return []
    waits = _p2p_waits(matching)
    by_stage: dict[int, list[Rank]] = defaultdict(list)
    for rank in ranks:
        if rank.rank in layout.stages and rank.steps:
            by_stage[layout.stages[rank.rank]].append(rank)
    found = []
    for stage, members in sorted(by_stage.items()):
        with_ops = [each for each in members if each.collectives]
        written = [step.bubble_written_us for each in members for step in each.steps]
        known = [each / 1e3 for each in written if each is not None]
        found.append(
            Stage(
                stage=stage,
                ranks=tuple(each.rank for each in members),
                computing_ms=mean(each.computing_us for each in members) / 1e3,
                free_ms=mean(each.free_us for each in members) / 1e3,
                p2p_ms=mean(p2p_ms(each) for each in with_ops) if with_ops else None,
                p2p_wait_ms=mean(waits.get(each.rank, 0.0) / each.num_steps for each in with_ops) if waits else None,
                bubble_written_ms=mean(known) if known else None,
            )
        )
    return found


def p2p_ms(rank: Rank) -> float:
    """Time in messages between stages, a step."""
    return sum(each.elapse_ms for each in rank.collectives if is_p2p(each.kind)) / rank.num_steps


def _p2p_waits(matching: Matching) -> dict[int, float]:
    found: dict[int, float] = defaultdict(float)
    for each in matching.shared:
        if is_p2p(each.kind):
            for rank in each.by_rank:
                found[rank] += each.wait_ms(rank)
    return found


def stragglers(ranks: Sequence[Rank], layout: Layout, matching: Matching) -> list[Straggler]:
    """Ranks that came last among peers of their own stage, worst first; none where that costs less than MIN_SHARE."""
    by_number = {each.rank: each for each in ranks}
    delay: dict[int, float] = defaultdict(float)
    times: dict[int, int] = defaultdict(int)
    for each in matching.shared:
        if len({layout.stages.get(rank, 0) for rank in each.by_rank}) == 1 and not is_p2p(each.kind):
            delay[each.last] += each.spread_ms
            times[each.last] += 1
    found = []
    for rank, total_ms in delay.items():
        me = by_number[rank]
        peers = [by_number[each] for each in _peers(rank, layout, by_number) if by_number[each].steps]
        cost_ms = total_ms / me.num_steps
        if len(peers) < 2 or not me.steps or cost_ms < MIN_SHARE * me.e2e_us / 1e3:
            continue
        others = [each for each in peers if each.rank != rank]
        computing_ms = (me.computing_us - median(each.computing_us for each in others)) / 1e3
        free_ms = (me.free_us - median(each.free_us for each in others)) / 1e3
        found.append(
            Straggler(
                rank=rank,
                stage=layout.stages.get(rank),
                delay_ms=cost_ms,
                times=times[rank],
                computing_ms=computing_ms,
                free_ms=free_ms,
                cause=_cause(me, others, computing_ms, free_ms, cost_ms),
            )
        )
    return sorted(found, key=lambda each: -each.delay_ms)


def _peers(rank: int, layout: Layout, by_number: Mapping[int, Rank]) -> tuple[int, ...]:
    return next(group for group in layout.peers(list(by_number)) if rank in group)


def _cause(me: Rank, others: Sequence[Rank], computing_ms: float, free_ms: float, cost_ms: float) -> str:
    """The largest difference from peers that could explain the delay."""
    if computing_ms >= 0.25 * cost_ms and computing_ms >= free_ms:
        mine, theirs = expert_rows(me), [rows for rows in map(expert_rows, others) if rows]
        if mine and theirs and mine > MIN_TOKENS * median(theirs):
            return f"more tokens: {mine / median(theirs):.2f} times the rows of its peers in grouped matmuls"
        return "slow compute: it computes longer than its peers"
    if free_ms >= 0.25 * cost_ms:
        return "host-bound: its device waits longer than those of its peers"
    mine_rate, rates = _rate(me), [rate for rate in map(_rate, others) if rate]
    if mine_rate and rates and mine_rate < 0.8 * median(rates):
        return f"slow link: {mine_rate:.1f} GB/s against {median(rates):.1f} of its peers"
    return "late arrival: it computes and waits no longer than its peers over the whole step"


def _rate(rank: Rank) -> float | None:
    pairs = [pair for each in rank.collectives for name, pair in each.links.items() if name in ("SDMA", "RDMA")]
    size, time = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    return size / time if time > 0 else None


def expert_rows(rank: Rank) -> float | None:
    """Token rows of all grouped matmuls of a step, from the first dimension of their first input."""
    rows = 0.0
    for each in rank.kernels:
        if "groupedmatmul" in each.type.lower() or "grouped_matmul" in each.type.lower():
            first = each.shapes.partition(";")[0].partition(",")[0].strip()
            rows += each.count * float(first) if first.isdecimal() and len(first) < 13 else 0.0
    return rows / rank.num_steps or None


def kind_costs(ranks: Sequence[Rank], layout: Layout, matching: Matching) -> list[KindCost]:
    """By kind of group, dearest first."""
    waits: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for shared in matching.shared:
        kind = layout.kinds.get(shared.group, "unknown")
        for number in shared.by_rank:
            waits[kind][number] += shared.wait_ms(number)
    parts: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0.0, 0.0]))
    unknown: set[str] = set()
    names: dict[str, set[str]] = defaultdict(set)
    operators: dict[str, set[str]] = defaultdict(set)
    for rank in ranks:
        for each in rank.collectives:
            kind = kind_of_collective(each, layout)
            sums = parts[kind][rank.rank]
            size_mb = sum(each.links.get(name, (0.0, 0.0))[0] for name in ("SDMA", "RDMA", PAYLOAD))
            for place, value in enumerate((1.0, each.elapse_ms, each.exposed_ms or 0.0, size_mb)):
                sums[place] += value / rank.num_steps
            if each.exposed_ms is None:
                unknown.add(kind)
            operators[kind].add(each.kind)
            names[kind].add(layout.groups[each.group].name if each.group in layout.groups else each.group)
    found = []
    steps = {rank.rank: rank.num_steps for rank in ranks}
    for kind, by_rank in parts.items():
        values = list(by_rank.values())
        waited = [total / steps[number] for number, total in waits[kind].items()]
        found.append(
            KindCost(
                kind=kind,
                groups=tuple(sorted(names[kind] - {""})[:8]),
                ranks=len(values),
                count=mean(each[0] for each in values),
                elapse_ms=mean(each[1] for each in values),
                exposed_ms=None if kind in unknown else mean(each[2] for each in values),
                wait_ms=sum(waited) / len(values) if waited else None,
                size_mb=mean(each[3] for each in values),
                operators=tuple(sorted(operators[kind])),
            )
        )
    return sorted(found, key=lambda each: -each.elapse_ms)


def kind_of_collective(each: Collective, layout: Layout) -> str:
    """What it is for: messages are the pipeline's, everything else its group's."""
    return "PP" if is_p2p(each.kind) else layout.kinds.get(each.group, "unknown")


def link_classes(ranks: Sequence[Rank]) -> list[LinkClass]:
    """Transports between ranks, from the matrix; copies inside a rank are none."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    slowest: dict[str, tuple[float, str]] = {}
    for rank in ranks:
        for each in rank.links:
            if each.transport in ("LOCAL", "") or each.time_ms <= 0:
                continue
            sums[each.transport][0] += each.size_mb
            sums[each.transport][1] += each.time_ms
            rate = each.size_mb / each.time_ms
            if each.size_mb > 1 and rate < slowest.get(each.transport, (float("inf"), ""))[0]:
                slowest[each.transport] = (rate, f"rank {rank.rank}: {each.source} to {each.target} of its group")
    return [
        LinkClass(
            transport=name,
            size_mb=size_mb,
            time_ms=time_ms,
            gb_per_s=size_mb / time_ms,
            slowest=slowest.get(name, (0.0, ""))[1],
            slowest_gb_per_s=slowest.get(name, (size_mb / time_ms, ""))[0],
        )
        for name, (size_mb, time_ms) in sorted(sums.items())
    ]


def critical_path(ranks: Sequence[Rank], matching: Matching) -> tuple[int, list[PathPart]]:
    """Back from the end of the last step: what a rank did since it last waited, then the rank that it waited for.

    Returns when the step began, in ns, and parts in the order of time. Waits of less than MIN_SHARE of the step are no
    reason to go to another rank.
    """
    shared = [each for each in matching.shared if all(one.start_ns for one in each.by_rank.values())]
    if not shared:
        return 0, []
    step = max(shared, key=lambda each: _end_ns(each, each.last, matching)).step
    shared = [each for each in shared if each.step == step]
    ops: dict[int, list[tuple[int, Shared]]] = defaultdict(list)
    for each in shared:
        for rank in each.by_rank:
            ops[rank].append((_end_ns(each, rank, matching), each))
    for listed in ops.values():
        listed.sort(key=lambda pair: pair[0])
    at_ns, rank = max((listed[-1][0], rank) for rank, listed in ops.items())
    starts = [each.lane.start_ns - matching.offsets_ns.get(each.rank, 0) for each in ranks if each.lane is not None]
    first_ns = min([*starts, *(_start_ns(each, one, matching) for each in shared for one in each.by_rank)])
    least_ns = max(1, round(MIN_SHARE * (at_ns - first_ns)))
    parts: list[tuple[int, int, int, str]] = []
    for _ in range(MAX_PATH):
        found = [
            (end_ns, each)
            for end_ns, each in ops[rank]
            if end_ns <= at_ns and each.last != rank and each.wait_ms(rank) * 1e6 >= least_ns
        ]
        if not found:
            break
        end_ns, each = found[-1]
        parts.append((rank, end_ns, at_ns, "computes, sends and waits less than 1 % of the step"))
        late_ns = _start_ns(each, each.last, matching)
        parts.append((each.last, min(late_ns, end_ns), end_ns, f"{each.kind}, for which rank {rank} had waited"))
        at_ns, rank = min(late_ns, end_ns), each.last
    parts.append((rank, first_ns, at_ns, "from the start of the step"))
    return first_ns, [
        PathPart(rank=one, start_ms=(start - first_ns) / 1e6, end_ms=(end - first_ns) / 1e6, what=what)
        for one, start, end, what in reversed(parts)
        if end > start
    ]


def _start_ns(each: Shared, rank: int, matching: Matching) -> int:
    return each.by_rank[rank].start_ns - matching.offsets_ns.get(rank, 0)


def _end_ns(each: Shared, rank: int, matching: Matching) -> int:
    return _start_ns(each, rank, matching) + round(each.by_rank[rank].elapse_ms * 1e6)
