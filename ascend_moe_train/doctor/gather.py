"""From the sources one by one to the evidence as a whole: ranks, and one clock. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from ascend_moe_train.doctor.clock import common_day, on_one_scale
from ascend_moe_train.doctor.event import Actor, Event, Evidence, Scanned

MAX_RANKS = 1_000_000
LEAST_OFFSET_S = 2.0  # clocks that differ by less are left as they are
STEADY_S = 1.0  # what the difference of two clocks may vary by
LEAST_PAIRS = 3

# Facts by which a source says which rank it is itself.
_OWN_RANK = ("f-setup", "f-setup-device", "f-entry-init", "f-this-node", "f-rank-of")


def gather(sources: Sequence[Scanned]) -> Evidence:
    """Everything on one clock, each event with its rank where that can be told.

    Where sources name the start of the run that they end with, those of older starts are left out.
    """
    newest = max((source.start for source in sources), default="")
    sources = [source for source in sources if source.start in ("", newest)]
    offsets_s = _offsets(sources)
    hosts = {source.actor.host for source in sources}
    ranks_of = {source.name: _rank_of(source, len(hosts) == 1) for source in sources}
    pids = _pids(sources, ranks_of)
    near_s = common_day([e.moment for source in sources for e in source.events if e.moment is not None])
    near_s = near_s if near_s is not None else common_day([s.last for s in sources if s.last is not None])
    events = []
    said = {(e.rule.id, e.text) for source in sources if source.actor.part != "launcher" for e in source.events}
    for source in sources:
        for event in source.events:
            if source.actor.part == "launcher" and (event.rule.id, event.text) in said:
                continue  # msrun and others repeat what their processes print
            actor = _resolved(event.actor, source, ranks_of[source.name], pids)
            at_s = on_one_scale(event.moment, near_s) if event.moment is not None else None
            shifted = at_s - offsets_s.get(source.name, 0.0) if at_s is not None else None
            events.append(replace(event, actor=actor, at_s=shifted))
    events = [replace(event, order=order) for order, event in enumerate(_in_order(_that_count(events)))]
    by_rank = _by_rank(sources, ranks_of, events)
    return Evidence(
        events=events,
        sources=sources,
        ranks=tuple(sorted(by_rank)),
        by_rank=by_rank,
        offsets_s=offsets_s,
        pids=pids,
        source_ranks=ranks_of,
    )


def _that_count(events: Sequence[Event]) -> Sequence[Event]:
    """Without warnings where nothing else is wrong: many runs that go well print some."""
    if any(not event.is_warning and event.rule.role not in ("fact", "benign") for event in events):
        return events
    return [event for event in events if not event.is_warning or event.rule.role in ("fact", "benign")]


def _in_order(events: Sequence[Event]) -> list[Event]:
    """By time; an event without one comes right before the next of its source that has one."""
    keys: list[tuple[bool, float]] = []
    after: dict[str, float] = {}
    for event in reversed(events):
        if event.at_s is not None:
            after[event.place.source] = event.at_s
        at_s = after.get(event.place.source)
        keys.append((at_s is None, at_s or 0.0))
    return [event for _, event in sorted(zip(reversed(keys), events, strict=True), key=lambda pair: pair[0])]


def _rank_of(source: Scanned, is_one_host: bool) -> int | None:
    """The rank of a whole source: by its name; else by what its lines say of themselves, if they agree; on a single
    host by its device."""
    if source.actor.rank is not None or source.actor.part != "unknown":
        return source.actor.rank
    largest: dict[int, set[int]] = defaultdict(set)
    pids = set()
    for event in source.events:
        rank = event.value("rank")
        if event.rule.id in _OWN_RANK and rank is not None and event.actor.rank is None:
            largest[event.value("size") or 0].add(rank)
            pids.add(event.actor.pid)
    # a group's own numbers are below the world's: the widest group has the global ones
    widest = largest[max(largest)] if largest else set()
    if len(widest) == 1 and len(pids) == 1:
        return next(iter(widest))
    return source.actor.device if is_one_host else None


def _pids(sources: Sequence[Scanned], ranks_of: Mapping[str, int | None]) -> dict[int, int]:
    """Ranks by process number, where all that is known agrees."""
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for source in sources:
        for event in source.events:
            pid, rank = _claim(event, ranks_of[source.name])
            if pid is not None and rank is not None:
                seen[pid][rank] += 1
    return {pid: next(iter(ranks)) for pid, ranks in seen.items() if len(ranks) == 1}


def _claim(event: Event, source_rank: int | None) -> tuple[int | None, int | None]:
    """The process and the rank that a line shows to be one."""
    if event.rule.id == "elastic-failed":
        return event.value("pid"), event.value("rank")
    if event.actor.part == "launcher":  # which repeats what a rank printed
        return event.actor.pid, event.value("rank") if event.rule.id == "f-this-node" else None
    if event.actor.part in ("scheduler", "kernel", "tool"):
        return None, None
    if event.actor.rank is not None or source_rank is not None:
        return event.actor.pid, event.actor.rank if event.actor.rank is not None else source_rank
    return event.actor.pid, event.value("rank") if event.rule.id in _OWN_RANK else None


def _resolved(actor: Actor, source: Scanned, rank: int | None, pids: Mapping[int, int]) -> Actor:
    """Who wrote a line, with the rank that it has by its source or its process."""
    if actor.rank is not None or actor.part in ("scheduler", "kernel", "tool"):
        return actor
    if actor.part == "launcher" and actor.pid not in pids:
        return actor
    own = rank if rank is not None else pids.get(actor.pid) if actor.pid is not None else None
    if own is None and source.actor.pid is not None:
        own = pids.get(source.actor.pid)
    return actor if own is None else replace(actor, part="rank", rank=own)


def _by_rank(
    sources: Sequence[Scanned], ranks_of: Mapping[str, int | None], events: Sequence[Event]
) -> dict[int, tuple[Scanned, ...]]:
    found: dict[int, dict[str, Scanned]] = defaultdict(dict)
    by_name = {source.name: source for source in sources}
    for source in sources:
        rank = ranks_of[source.name]
        if rank is not None:
            found[rank][source.name] = source
    for event in events:
        if event.actor.rank is not None and event.actor.rank <= MAX_RANKS:
            found[event.actor.rank][event.place.source] = by_name[event.place.source]
    return {rank: tuple(each.values()) for rank, each in found.items()}


def _offsets(sources: Sequence[Scanned]) -> dict[str, float]:
    """How much the clock of each source runs ahead of the others', where steps that all take together show it.

    Ranks end a step together, so a source whose steps all come the same time later has another clock.
    """
    times: dict[int, dict[str, float]] = defaultdict(dict)
    for source in sources:
        steps = source.steps if source.actor.part != "launcher" else ()  # which has those of several ranks
        for step, moment in steps:
            if moment is not None and moment.kind == "full":
                times[step][source.name] = moment.seconds
    ahead: dict[str, list[float]] = defaultdict(list)
    for of_step in times.values():
        if len(of_step) > 1:
            middle = sorted(of_step.values())[(len(of_step) - 1) // 2]
            for name, at_s in of_step.items():
                ahead[name].append(at_s - middle)
    offsets = {}
    for name, shifts in ahead.items():
        usual = median(shifts)
        if len(shifts) >= LEAST_PAIRS and abs(usual) > LEAST_OFFSET_S and _is_steady(shifts, usual):
            offsets[name] = usual
    return offsets


def _is_steady(shifts: Sequence[float], usual: float) -> bool:
    return median(abs(shift - usual) for shift in shifts) < STEADY_S
