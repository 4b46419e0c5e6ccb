"""Ranks that did not meet: who is missing at the root, who came late, or nobody reaches anybody. Pure."""

from collections.abc import Sequence

from ascend_moe_train.doctor.event import Event, Evidence
from ascend_moe_train.doctor.hypothesis import Hypothesis, inferred
from ascend_moe_train.doctor.rule import RuleBook

CONNECT_TIMEOUT_S = 120.0  # HCCL_CONNECT_TIMEOUT unless set
MISSING_LEVEL, LATE_LEVEL, ALL_LEVEL = 70, 68, 59
MAX_LIST = 65_536


def meeting(evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """Why a communicator did not come about."""
    return _late(evidence, book) or _missing(evidence, book) or _nobody(evidence, book)


def _missing(evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    for event in evidence.of("f-agent-failed"):
        ranks = _numbers(event.values.get("list", ""))
        if ranks:
            return inferred(book, "not-connected", MISSING_LEVEL, [event], ranks=ranks)
    listed = evidence.of("f-connected")
    if not listed:
        return []
    connected = {rank for event in listed for rank in _numbers(event.values.get("list", ""))}
    sizes = [size for e in evidence.of("f-need-ranks", "f-setup", "f-entry-init") if (size := e.value("size"))]
    size = max(sizes, default=_plausible_size(connected))
    ranks = [rank for rank in range(min(size, MAX_LIST)) if rank not in connected]
    return inferred(book, "not-connected", MISSING_LEVEL, [listed[0]], ranks=ranks) if ranks else []


def _numbers(text: str) -> list[int]:
    words = text.replace("[", " ").replace("]", " ").replace(",", " ").split()
    return [int(word) for word in words if word.isdecimal() and len(word) <= 16][:MAX_LIST]


def _plausible_size(connected: set[int]) -> int:
    """The world, where nothing says how many ranks it has: hosts have 8 cards, or 2 or 4 when there are fewer."""
    most = max(connected, default=0) + 1
    return next((size for size in (2, 4, 8) if size >= most and size > len(connected)), -(-most // 8) * 8)


def _late(evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """Ranks that entered a communicator later than the timeout after the first."""
    entries: dict[int, Event] = {}
    for event in evidence.of("f-entry-root", "f-entry-init"):
        rank = event.actor.rank if event.actor.rank is not None else event.value("rank")
        rank = 0 if rank is None and event.rule.id == "f-entry-root" else rank
        if rank is not None and event.at_s is not None:
            entries.setdefault(rank, event)
    if len(entries) < 2:
        return []
    times = {rank: event.at_s or 0.0 for rank, event in entries.items()}
    first = min(times.values())
    limit_s = _timeout_s(evidence)
    late = [rank for rank, at_s in times.items() if at_s - first > limit_s]
    if not late or len(late) == len(times):
        return []
    earliest = min(times, key=lambda rank: times[rank])
    events = [entries[earliest], *(entries[rank] for rank in late[:3])]
    spread = f"{max(times[rank] for rank in late) - first:.0f} s"
    values = {"spread": spread, "timeout": f"{limit_s:.0f} s"}
    return inferred(book, "late-start", LATE_LEVEL, events, ranks=late, values=values)


def _timeout_s(evidence: Evidence) -> float:
    for event in evidence.of("f-timeout"):
        digits = event.values.get("seconds", "").removesuffix("s").strip()
        if digits.isdecimal() and len(digits) < 7:
            return float(digits)
    return CONNECT_TIMEOUT_S


def _nobody(evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """Ranks of a whole host, or all, waited for the root and none of them is late."""
    said = [e for e in evidence.of("hccl-root-collect") if e.actor.rank is not None]
    ranks = {event.actor.rank for event in said}
    sizes = [size for e in evidence.of("f-setup", "f-entry-init") if (size := e.value("size"))]
    if len(ranks) < 3 or not sizes or set(evidence.ranks) - ranks:
        return []
    return inferred(book, "all-wait", ALL_LEVEL, _first_of_each(said)[:3], is_decided=True)


def _first_of_each(events: Sequence[Event]) -> list[Event]:
    found: dict[int | None, Event] = {}
    for event in events:
        found.setdefault(event.actor.rank, event)
    return list(found.values())
