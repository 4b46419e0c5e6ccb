"""Ranks that wait for each other: who is behind, who is missing, where a chain of waiting ends. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ascend_moe_train.doctor.clock import shown_time
from ascend_moe_train.doctor.deaths import exited_rank
from ascend_moe_train.doctor.event import Event, Evidence
from ascend_moe_train.doctor.hypothesis import Hypothesis, inferred
from ascend_moe_train.doctor.rule import RuleBook

CHAIN_LEVEL, BEHIND_LEVEL, OTHER_LEVEL, LATE_LEVEL, ABSENT_LEVEL = 66, 72, 74, 60, 58
UNDECIDED_LEVEL = 20
LATE_S = 60.0  # ranks that wait for the same give up within this of each other
OPERATIONS = frozenset(
    {
        "allgather",
        "allreduce",
        "alltoall",
        "alltoallv",
        "alltoallvc",
        "batchsendrecv",
        "broadcast",
        "gather",
        "receive",
        "reduce",
        "reducescatter",
        "scatter",
        "send",
    }
)

_EDGES = ("f-remote", "f-remote-text", "f-ring", "f-link-row", "f-p2p", "f-aicpu-remote")
NEAR_LINES = 3  # a task's lines stand together
OWN = -1  # waits for its own device


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Who waits, since when they say so, for whom, and in which collective."""

    reporters: Mapping[int, Event]
    edges: Mapping[int, tuple[int, Event]]
    calls: Mapping[int, tuple[str, Event]]
    indexes: Mapping[int, tuple[int, Event]]
    sequences: Mapping[int, tuple[int, Event]]


def waits_of(evidence: Evidence) -> Waits:
    """What ranks say of their waiting. A rank's time is its earliest: single lines may carry a wrong one."""
    reporters: dict[int, Event] = {}
    for event in evidence.of_role("symptom"):
        if event.actor.rank is not None and event.rule.group in ("hccl_nccl_timeout", "peer_crash", "network"):
            reporters.setdefault(event.actor.rank, event)
    edges: dict[int, tuple[int, Event]] = {}
    for event in evidence.of(*_EDGES):
        rank = event.actor.rank
        peer = _peer(event, evidence)
        if rank is not None and peer is not None and rank not in edges and peer != rank:
            edges[rank] = (peer, event)
    calls = {
        e.actor.rank: (operation, e)
        for e in evidence.of("f-tag", "f-watchdog", "f-watchdog-open")
        if e.actor.rank is not None and (operation := _operation(e)) is not None
    }
    return Waits(
        reporters=reporters,
        edges=edges,
        calls=calls,
        indexes=_numbers(evidence, "index", "f-index"),
        sequences=_numbers(evidence, "sequence", "f-watchdog", "f-watchdog-open"),
    )


def _numbers(evidence: Evidence, name: str, *rules: str) -> dict[int, tuple[int, Event]]:
    found: dict[int, tuple[int, Event]] = {}
    for rule in rules:
        for event in evidence.of(rule):
            number = event.value(name)
            if event.actor.rank is not None and number is not None:
                found.setdefault(event.actor.rank, (number, event))
    return found


def _operation(event: Event) -> str | None:
    """The collective that a tag or a watchdog names; None for one that does not exist."""
    name = event.values.get("op") or event.values.get("tag", "").partition("_")[0]
    plain = name.removeprefix("Hcom").strip("_").replace("_", "").lower()
    is_known = plain in OPERATIONS or event.rule.id.startswith("f-watchdog")
    return name.removeprefix("Hcom") if is_known and name else None


def _peer(event: Event, evidence: Evidence) -> int | None:
    """Who is waited for, as a global rank; OWN for the rank's own device."""
    text = event.values.get("peer", "")
    if text == "local":
        return OWN
    number = event.value("peer")
    if number is None or number >= 2**32 - 1:
        return None
    if event.rule.id == "f-p2p":
        return _on_host(event, number, evidence)
    named = [e for e in evidence.of("f-group", "f-remote-group") if e.place.source == event.place.source]
    near = [e for e in named if abs(e.place.line - event.place.line) <= NEAR_LINES]
    return _global(near[0], number, evidence) if near else number


def _on_host(event: Event, device: int, evidence: Evidence) -> int | None:
    """The rank of a device of the same host."""
    setups = evidence.of("f-setup-device")
    own = next((e.values.get("host") for e in setups if e.actor.rank == event.actor.rank), None)
    for each in setups:
        if own is not None and each.values.get("host") == own and each.value("phy") == device:
            return each.actor.rank if each.actor.rank is not None else each.value("rank")
    return None if setups else device


def _global(group: Event, number: int, evidence: Evidence) -> int | None:
    """The global rank of a group's own number: by who said to be that in this group at the start; the same number in a
    group of all ranks; else not known."""
    name, size = group.values.get("group", ""), group.value("size")
    for event in evidence.of("f-setup", "f-entry-init"):
        if event.values.get("group") == name and event.value("rank") == number and event.actor.rank is not None:
            return event.actor.rank
    return number if size is not None and size == len(evidence.ranks) else None


def waiting(evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """The first conclusion that holds, from what says most: other collectives, who is behind, chains, lateness,
    silence; else what is seen, as undecided."""
    waits = waits_of(evidence)
    steps = (_other_collective, _behind, _chain, _late, _silent, _same)
    for step in steps:
        if found := step(waits, evidence, book):
            return found
    symptoms = evidence.of_role("symptom")
    if not symptoms:
        return []
    first = symptoms[0]
    return [
        Hypothesis(
            rule=first.rule,
            level=UNDECIDED_LEVEL,
            events=(first,),
            at_s=first.at_s,
            is_decided=False,
            values=first.values,
        )
    ]


def _other_collective(waits: Waits, evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    names = {rank: name.lower().strip("_") for rank, (name, _) in waits.calls.items()}
    if len(set(names.values())) < 2:
        return []
    counts = Counter(names.values()).most_common()
    rare = counts[-1][0]
    is_tie = counts[0][1] == counts[-1][1]
    odd = [rank for rank, name in names.items() if is_tie or name == rare]
    events = [event for _, event in waits.calls.values()][:3]
    own = waits.calls[odd[-1]][0]
    others = next(waits.calls[rank][0] for rank, name in names.items() if name != names[odd[-1]])
    return inferred(book, "other-collective", OTHER_LEVEL, events, ranks=odd, values={"own": own, "others": others})


def _behind(waits: Waits, evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    for numbers in (waits.indexes, waits.sequences):
        values = {rank: number for rank, (number, _) in numbers.items()}
        if len(set(values.values())) < 2:
            continue
        least, most = min(values.values()), max(values.values())
        odd = [rank for rank, number in values.items() if number == least]
        if len(odd) * 2 > len(values) and len(values) > 2:
            continue
        events = [numbers[rank][1] for rank in [*odd, *(r for r in values if r not in odd)]][:3]
        return inferred(
            book, "behind", BEHIND_LEVEL, events, ranks=odd, values={"own": str(least), "others": str(most)}
        )
    return []


def _chain(waits: Waits, evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    ends: dict[int, list[Event]] = defaultdict(list)
    rings: list[list[int]] = []
    for start in waits.edges:
        path = [start]
        events = []
        while path[-1] in waits.edges:
            peer, event = waits.edges[path[-1]]
            events.append(event)
            if peer == OWN:
                break
            if peer in path:
                rings.append(path[path.index(peer) :])
                break
            path.append(peer)
        else:
            ends[path[-1]] += events
            continue
        if waits.edges[path[-1]][0] == OWN:
            ends[path[-1]] += events
    if len(ends) == 1:
        rank, events = next(iter(ends.items()))
        quoted = list({event.order: event for event in events}.values())[:4]
        if waits.edges.get(rank, (None, None))[0] == OWN:
            return inferred(book, "own-device", CHAIN_LEVEL, quoted, ranks=[rank])
        return suspect(rank, quoted, evidence, book, fallback="chain-end")
    if rings and not ends:
        ring = " -> ".join(map(str, [*rings[0], rings[0][0]]))
        events = [waits.edges[rank][1] for rank in rings[0]][:4]
        return inferred(book, "cycle", UNDECIDED_LEVEL + 5, events, is_decided=False, values={"ring": ring})
    return []


def _late(waits: Waits, evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """All ranks report: the last of them came last, if that is long after the first."""
    times = {r: e.at_s for r, e in waits.reporters.items() if e.at_s is not None and not _is_launch_failure(e)}
    if len(times) < 2 or set(times) < set(evidence.ranks):
        return []
    last = max(times, key=lambda rank: times[rank])
    others = [at_s for rank, at_s in times.items() if rank != last]
    if times[last] - max(others) < LATE_S:
        return []
    events = [waits.reporters[min(times, key=lambda rank: times[rank])], waits.reporters[last]]
    spread = f"{times[last] - min(others):.0f} s"
    return inferred(book, "late", LATE_LEVEL, events, ranks=[last], values={"spread": spread}, at_s=min(others))


def _is_launch_failure(event: Event) -> bool:
    return event.rule.id == "ms-collective-launch"


def _silent(waits: Waits, evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """Ranks of which there are logs, and that do not report what most of the others do."""
    quiet = [
        rank
        for rank in evidence.ranks
        if rank not in waits.reporters and not any(e.rule.level >= 50 for e in evidence.events if e.actor.rank == rank)
    ]
    if not waits.reporters or not quiet or len(quiet) > max(len(waits.reporters), 1):
        return []
    events = sorted(waits.reporters.values(), key=lambda event: event.order)[:3]
    if len(quiet) == 1:
        return suspect(quiet[0], events, evidence, book, fallback="absent")
    return inferred(book, "absent", ABSENT_LEVEL, events, ranks=quiet)


def suspect(
    rank: int, events: Sequence[Event], evidence: Evidence, book: RuleBook, *, fallback: str
) -> list[Hypothesis]:
    """What became of the rank that others wait for: it ended well, is busy, stopped without a word, or is not here."""
    own = [event for event in evidence.events if event.actor.rank == rank]
    facts = [event for event in own if event.rule.id == "finished" or event.rule.id.startswith("busy-")]
    ended_well = [e for e in evidence.of("f-unregistered") if e.value("node") == rank]
    if ended_well or (facts and facts[-1].rule.id == "finished"):
        return inferred(book, "uneven-steps", CHAIN_LEVEL, [*(ended_well or facts[-1:]), *events], ranks=[rank])
    if facts:
        what = facts[-1].rule.id.removeprefix("busy-")
        return inferred(book, "busy", CHAIN_LEVEL, [facts[-1], *events], ranks=[rank], values={"what": what})
    named = [e for e in evidence.of("ms-node-timeout") if e.value("node") == rank]
    if (code := _outlived(rank, bool(named), evidence)) is not None:
        return inferred(book, code, CHAIN_LEVEL, [*named[:1], *events], ranks=[rank])
    if named or (rank in evidence.by_rank and any(map(_is_launch_failure, events))):
        return inferred(book, "vanished", CHAIN_LEVEL, [*named[:1], *events], ranks=[rank])
    return inferred(book, fallback, CHAIN_LEVEL if fallback == "chain-end" else ABSENT_LEVEL, events, ranks=[rank])


def _outlived(rank: int, is_missed: bool, evidence: Evidence) -> str | None:
    """What msrun and its scheduler together tell of a rank without a word, where another ended first: msrun would have
    seen it end, so it was there, and either stood still or did not come in time. None without both."""
    ended = [exited_rank(event, evidence) for event in evidence.of("ms-worker-exit")]
    if not ended or None in ended or rank in ended or all(s.actor.part != "scheduler" for s in evidence.sources):
        return None
    return "frozen" if is_missed else "slow-rank"


def _same(waits: Waits, evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """All stand in the same collective."""
    numbers = {number for number, _ in waits.sequences.values()}
    if len(waits.sequences) < 2 or len(numbers) != 1 or set(waits.sequences) < set(evidence.ranks):
        return []
    events = [event for _, event in waits.sequences.values()][:3]
    since = hang_began_s(events)
    shown = "the time of the report minus the timeout" if since is None else shown_time(since)
    operation = events[0].values.get("op", "")
    own = f"{operation} {next(iter(numbers))}".strip()
    return inferred(
        book,
        "same-collective",
        UNDECIDED_LEVEL + 5,
        events,
        is_decided=False,
        values={"own": own, "since": shown},
        at_s=since,
    )


def hang_began_s(events: Sequence[Event]) -> float | None:
    """When a hang began: the report's time minus the timeout that was in force; None where either is unknown."""
    began = []
    for event in events:
        timeout_ms = event.value("timeout")
        if timeout_ms is not None and event.at_s is not None:
            began.append(event.at_s - timeout_ms / 1000)
    return min(began, default=None)
