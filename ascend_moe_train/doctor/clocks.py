"""Clocks of ranks that are far apart, which end no run, and put its events into a wrong order. Pure."""

from collections.abc import Container

from ascend_moe_train.doctor.event import Actor, Event, Evidence, Place
from ascend_moe_train.doctor.hypothesis import Hypothesis, inferred
from ascend_moe_train.doctor.rule import RuleBook

LEAST_S = 60.0  # below that, ranks may end a step at different times
LEVEL = 30


def clocks_apart(evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """The logs of ranks whose clocks were found to be wrong."""
    far = {name: ahead_s for name, ahead_s in evidence.offsets_s.items() if abs(ahead_s) >= LEAST_S}
    if not far:
        return []
    ranks = [rank for name in far if (rank := evidence.source_ranks[name]) is not None]
    most_s = max(far.values(), key=abs)
    values = {"spread": f"{abs(most_s):.0f} s", "way": "ahead of" if most_s > 0 else "behind"}
    return inferred(book, "clocks-differ", LEVEL, _last_lines(far, evidence, book), ranks=ranks, values=values)


def _last_lines(names: Container[str], evidence: Evidence, book: RuleBook) -> list[Event]:
    """The last line of each log, by which its clock can be compared with a good one."""
    return [
        Event(
            rule=rule,
            actor=Actor(part="rank", rank=evidence.source_ranks[source.name]),
            place=Place(source=source.name, line=source.num_lines),
            text=source.last_text,
            moment=source.last,
        )
        for rule in book.by_code.get("@clocks-differ", ())
        for source in evidence.sources
        if source.name in names
    ]
