"""Which process ended first, by those who saw it end: launchers, the kernel, our supervisor. Pure."""

import signal
from collections.abc import Iterable

from ascend_moe_train.doctor.event import Event, Evidence
from ascend_moe_train.doctor.hypothesis import Hypothesis, inferred
from ascend_moe_train.doctor.rule import RuleBook

KILLED_LEVEL, CRASHED_LEVEL, EXITED_LEVEL, UNKNOWN_EXITED_LEVEL = 75, 72, 60, 51
VICTIM_LEVEL = 15  # a rank that ended first, but by its own log only because of others
GENERAL_LEVEL = 56  # of an exception that general words explain

_EXIT_RULES = ("ms-worker-exit", "elastic-failed", "elastic-exit")
_REPEATERS = ("", "the launcher")
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def ended_first(evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """The first process that a launcher saw end with an error."""
    for event in evidence.of(*_EXIT_RULES):
        code = _exit_code(event)
        if code is None or code == 0:
            continue
        rank = exited_rank(event, evidence)
        ranks = () if rank is None else (rank,)
        pid = event.values.get("pid", "")
        who = f"process {pid}" if pid else "a process"
        number = -code if code < 0 else code - 128 if code > 128 else 0
        if number in _CRASHES:
            return inferred(
                book, "crashed", CRASHED_LEVEL, [event], ranks=ranks, who=who, values={"signal": str(number)}
            )
        own = [each for each in evidence.events if rank is not None and each.actor.rank == rank]
        if number in (signal.SIGKILL, signal.SIGTERM) and all(e.rule.id != "ms-told-to-end" for e in own):
            return inferred(book, "killed", KILLED_LEVEL, [event], ranks=ranks, who=who, values={"signal": str(number)})
        is_victim = bool(own) and any(e.rule.role == "symptom" for e in own) and not any(map(is_cause, own))
        level = VICTIM_LEVEL if is_victim else EXITED_LEVEL if ranks else UNKNOWN_EXITED_LEVEL
        return inferred(
            book, "exited", level, [event], ranks=ranks, who=who, values={"code": str(code)}, is_decided=not is_victim
        )
    return []


def is_cause(event: Event) -> bool:
    """Whether a line tells of a root cause on its own."""
    return event.rule.role == "cause" and event.rule.level >= 50


def _exit_code(event: Event) -> int | None:
    text = event.values.get("code", "").strip(".")
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 6 else None


def exited_rank(event: Event, evidence: Evidence) -> int | None:
    """The rank that ended: named, or by its process number, or else by the order in which msrun starts them."""
    if event.rule.id == "elastic-failed":
        return event.value("rank")
    pid = event.value("pid")
    if pid is not None and pid in evidence.pids:
        return evidence.pids[pid]
    if event.rule.id == "elastic-exit":
        named = [e for e in evidence.of("elastic-rank") if e.place.source == event.place.source]
        before = [e for e in named if e.place.line < event.place.line]
        return before[-1].value("rank") if before else None
    return None if pid is None else _by_start_order(pid, evidence)


def _by_start_order(pid: int, evidence: Evidence) -> int | None:
    """msrun starts the scheduler and then the workers, each of two processes, in the order of ranks (measured on
    MindSpore 2.10 with --join)."""
    scheduler = min((e.actor.pid for e in evidence.events if e.actor.part == "scheduler" and e.actor.pid), default=None)
    if scheduler is None or not evidence.ranks or not scheduler < pid <= scheduler + 2 * len(evidence.ranks):
        return None
    return min((pid - scheduler - 1) // 2, max(evidence.ranks))


def direct(evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """Every line that tells a cause or points to it, the first of each rule and actor."""
    found: list[Hypothesis] = []
    seen: set[tuple[str, int | None, str]] = set()
    for event in evidence.of_role("cause", "pointer"):
        if event.rule.id in _EXIT_RULES:
            continue
        ranks = _ranks(event, evidence)
        key = (event.rule.id, ranks[0] if ranks else None, event.actor.words)
        if key in seen:
            continue
        seen.add(key)
        level = max(event.rule.level, GENERAL_LEVEL) if "said" in event.values else event.rule.level
        found.append(
            Hypothesis(
                rule=event.rule,
                level=level,
                events=(event,),
                ranks=ranks,
                who=_who(event),
                at_s=event.at_s,
                values=dict(event.values),
            )
        )
    return [*_together(found), *ended_first(evidence, book)]


def _together(found: Iterable[Hypothesis]) -> list[Hypothesis]:
    """What our supervisor says of a rank counts less than what that rank says itself, and so does what a launcher or
    nobody known repeats of it."""
    every = list(found)
    of_ranks = {h.rule.id for h in every if h.ranks}
    hypotheses = [h for h in every if h.ranks or h.who not in _REPEATERS or h.rule.id not in of_ranks]
    causes = {h.ranks for h in hypotheses if h.rule.role == "cause" and h.level >= 50 and h.ranks}
    return [h for h in hypotheses if not (h.rule.id in ("amt-failed", "amt-mistake") and h.ranks in causes)]


def _ranks(event: Event, evidence: Evidence) -> tuple[int, ...]:
    """The ranks that an event is about: named by a pointer, else who wrote it."""
    if event.rule.role == "pointer":
        for name in ("rank", "node"):
            if (rank := event.value(name)) is not None:
                return (rank,)
        device = event.value("device")
        return () if device is None else _of_device(event.values.get("ip", ""), device, evidence)
    pid = event.value("pid")
    if pid is not None and pid in evidence.pids:
        return (evidence.pids[pid],)
    return () if event.actor.rank is None else (event.actor.rank,)


def _of_device(ip: str, device: int, evidence: Evidence) -> tuple[int, ...]:
    """The rank of a device of a host, by what ranks said at their start; on a single host it is the same number."""
    setups = evidence.of("f-setup-device")
    for event in setups:
        if event.value("phy") == device and event.values.get("host", "").startswith(ip):
            rank = event.actor.rank if event.actor.rank is not None else event.value("rank")
            return () if rank is None else (rank,)
    hosts = {event.values.get("host", "").partition("%")[0] for event in setups}
    return (device,) if len(hosts) <= 1 else ()


def _who(event: Event) -> str:
    if event.rule.role == "pointer" and (device := event.values.get("device")):
        return f"device {device} of {event.values.get('ip', 'its host')}"
    if (pid := event.values.get("pid")) is not None and event.actor.part == "kernel":
        return f"process {pid}"
    return (
        event.actor.words if event.actor.part != "unknown" or event.actor.pid or event.actor.device is not None else ""
    )
