"""The verdict: which of the hypotheses is the root cause, how sure that is, and what else was seen. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ascend_moe_train.doctor.clocks import clocks_apart
from ascend_moe_train.doctor.deaths import direct
from ascend_moe_train.doctor.event import Event, Evidence
from ascend_moe_train.doctor.figures import figures
from ascend_moe_train.doctor.hypothesis import Hypothesis
from ascend_moe_train.doctor.rule import RuleBook
from ascend_moe_train.doctor.starts import meeting
from ascend_moe_train.doctor.waiting import waiting

Confidence = Literal["high", "medium", "low"]

FATAL_LEVEL = 50  # what is below did not end the run
SURE_LEVEL = 85  # of device faults, OOM kills and taken ports, which outrank what follows from them
SAME_TIME_S = 60.0  # clocks and buffers of logs are no better than this
KERNEL_LATE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`cause` is None where no fault was found. `others` are runners-up, `not_it` lines that look like a cause and are
    not; `suspects` the ranks to look at where the cause is not in the logs."""

    cause: Hypothesis | None
    confidence: Confidence
    others: Sequence[Hypothesis]
    not_it: Sequence[Event]
    victims: Sequence[int]
    evidence: Evidence = field(repr=False)

    @property
    def is_decided(self) -> bool:
        """Whether the root cause is told, and not only what follows from it."""
        return self.cause is not None and self.cause.is_decided


def judge(evidence: Evidence, book: RuleBook, more: Sequence[Hypothesis] = ()) -> Verdict:
    """The verdict on all evidence; `more` is what was concluded elsewhere, such as from the figures of training."""
    found = [*direct(evidence, book), *figures(evidence, book), *meeting(evidence, book), *more]
    found += [*waiting(evidence, book), *clocks_apart(evidence, book)]
    if not found and (wrappers := evidence.of_role("wrapper")):
        found = [_only_seen(wrappers[0])]
    ordered = _ordered(_corroborated(found))
    cause = ordered[0] if ordered else None
    return Verdict(
        cause=cause,
        confidence=_confidence(ordered),
        others=_distinct(ordered[1:], cause),
        not_it=_not_it(evidence, cause),
        victims=_victims(evidence, cause),
        evidence=evidence,
    )


def _only_seen(event: Event) -> Hypothesis:
    """Where only lines were found that pass something on."""
    return Hypothesis(rule=event.rule, level=5, events=(event,), at_s=event.at_s, is_decided=False, values=event.values)


def _corroborated(found: Iterable[Hypothesis]) -> list[Hypothesis]:
    """Causes of a rank that others point to gain; the pointers then lose, as the cause says more."""
    hypotheses = list(found)
    pointed = {h.ranks for h in hypotheses if h.ranks and _is_pointer(h)}
    explained = {h.ranks for h in hypotheses if h.ranks and not _is_pointer(h) and h.level >= FATAL_LEVEL}
    kept = []
    for each in hypotheses:
        if _is_pointer(each) and each.ranks in explained and each.rule.id != "killed":
            continue
        gain = 4 if not _is_pointer(each) and each.ranks and each.ranks in pointed else 0
        kept.append(replace(each, level=min(each.level + gain, 100)) if gain else each)
    return kept


def _is_pointer(hypothesis: Hypothesis) -> bool:
    return hypothesis.rule.role == "pointer" or hypothesis.rule.id in ("exited", "vanished", "chain-end", "absent")


def _ordered(found: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The root cause first: of those that end a run the earliest, unless a surer one came with it."""
    fatal = [each for each in found if each.level >= FATAL_LEVEL]
    rest = sorted((each for each in found if each.level < FATAL_LEVEL), key=lambda h: (-h.level, h.order))
    times = [each.at_s for each in fatal if each.at_s is not None]
    first_s = min(times, default=None)

    def key(each: Hypothesis) -> tuple[int, int, float, int]:
        late_s = 0.0 if each.at_s is None or first_s is None else each.at_s - first_s
        allowed_s = KERNEL_LATE_S if each.level >= SURE_LEVEL else SAME_TIME_S
        return (int(late_s > allowed_s), -each.level, late_s if late_s > allowed_s else 0.0, each.order)

    return [*sorted(fatal, key=key), *rest]


def _confidence(ordered: Sequence[Hypothesis]) -> Confidence:
    """High where one cause is plain and nothing else comes near it."""
    if not ordered:
        return "high"
    best = ordered[0]
    if not best.is_decided or best.level < FATAL_LEVEL:
        return "low"
    rivals = [h for h in ordered[1:] if h.rule.group != best.rule.group and h.level >= FATAL_LEVEL]
    is_close = bool(rivals) and max(h.level for h in rivals) > best.level - 8
    if best.level >= 66 and not is_close:
        return "high"
    return "medium" if best.level >= 54 else "low"


def _distinct(found: Sequence[Hypothesis], cause: Hypothesis | None) -> list[Hypothesis]:
    """Runners-up, each rule once."""
    seen = {cause.rule.id} if cause is not None else set()
    kept = []
    for each in found:
        if each.rule.id not in seen:
            seen.add(each.rule.id)
            kept.append(each)
    return kept


def _not_it(evidence: Evidence, cause: Hypothesis | None) -> list[Event]:
    """One line of each rule that looks like a cause and follows from another, the most frequent first."""
    own = {event.rule.id for event in cause.events} | {cause.rule.id} if cause is not None else set()
    found: dict[str, Event] = {}
    for event in evidence.of_role("symptom", "wrapper", "benign"):
        if event.rule.id not in own:
            found.setdefault(event.rule.id, event)
    count: dict[str, int] = {}
    for source in evidence.sources:
        for rule_id, number in source.counts.items():
            count[rule_id] = count.get(rule_id, 0) + number
    order = {"symptom": 0, "wrapper": 1, "benign": 2}
    return sorted(found.values(), key=lambda event: (order[event.rule.role], -count.get(event.rule.id, 0)))


def _victims(evidence: Evidence, cause: Hypothesis | None) -> list[int]:
    """Ranks that report something and are not named as the cause."""
    blamed = set(cause.ranks) if cause is not None else set()
    said = {e.actor.rank for e in evidence.of_role("symptom", "wrapper", "cause") if e.actor.rank is not None}
    return sorted(said - blamed)
