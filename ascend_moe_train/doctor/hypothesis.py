"""What may have happened: a rule, by whom, when, and the lines that say so. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ascend_moe_train.doctor.event import Event
from ascend_moe_train.doctor.rule import Rule, RuleBook

MAX_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A root cause. `level` orders it among others; `who` is said where no rank is known; without `is_decided` it is
    what is seen of a cause that is not in the logs."""

    rule: Rule
    level: int
    events: tuple[Event, ...]
    ranks: tuple[int, ...] = ()
    who: str = ""
    at_s: float | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    is_decided: bool = True

    @property
    def order(self) -> int:
        """The place of its first line among all events."""
        return min((event.order for event in self.events), default=0)

    @property
    def who_words(self) -> str:
        """The ranks, or whoever it was."""
        return rank_words(self.ranks) if self.ranks else self.who

    def filled(self, text: str) -> str:
        """A text of the rule with its names replaced."""
        names = {"who": self.who_words or "a process", **self.values}
        for name, value in names.items():
            text = text.replace(f"{{{name}}}", value)
        return text


def rank_words(ranks: Sequence[int]) -> str:
    """Such as `rank 3` or `ranks 0, 1, 3 ...`."""
    shown = ", ".join(map(str, ranks[:MAX_NAMED])) + (" ..." if len(ranks) > MAX_NAMED else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def inferred(
    book: RuleBook,
    code: str,
    level: int,
    events: Iterable[Event],
    /,
    *,
    ranks: Iterable[int] = (),
    at_s: float | None = None,
    is_decided: bool = True,
    who: str = "",
    values: Mapping[str, str] | None = None,
) -> list[Hypothesis]:
    """A conclusion under a code of its own; none where its rule is left out of the book."""
    rules = book.by_code.get(f"@{code}", ())
    kept = tuple(events)
    if at_s is None:
        at_s = min((event.at_s for event in kept if event.at_s is not None), default=None)
    return [
        Hypothesis(
            rule=rule,
            level=level,
            events=kept,
            ranks=tuple(sorted(set(ranks))),
            at_s=at_s,
            values=values or {},
            is_decided=is_decided,
            who=who,
        )
        for rule in rules
    ]
