"""How often the doctor is right on cases with known causes: `python -m scripts.doctor_accuracy FOLDER`.

FOLDER holds `cases.json` (one excerpt each) and `multi_rank.json` (logs of several ranks). Writes
docs/doctor-accuracy.md. "Without its own rule" is leave-one-out: the rule that decided a case is taken away, and the
next best answer counts. A case is right when the kind of cause is.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ascend_moe_train.doctor.matcher import Matcher
from ascend_moe_train.doctor.rule import RuleBook, rule_book
from ascend_moe_train.doctor.verdict import Verdict
from scripts.doctor_case import Case, cases, diagnosed, is_right, share
from scripts.doctor_herrings import Herring, herring_lines, herring_texts, herrings

PAGE = Path(__file__).parents[1] / "docs" / "doctor-accuracy.md"
CONFIDENCES = ("high", "medium", "low")


@dataclass(frozen=True, kw_only=True)
class Score:
    """What came out for a case."""

    case: Case
    verdict: Verdict
    is_right: bool
    is_right_without: bool
    is_rank_right: bool
    is_herring: bool


def scored(case: Case, book: RuleBook, rules: Matcher) -> Score:
    """A case, judged, and once more without the rule that decided it."""
    verdict = diagnosed(case.files, book, rules)
    without = verdict
    if verdict.cause is not None:
        less = book.without(frozenset({verdict.cause.rule.id}))
        without = diagnosed(case.files, less, Matcher(less))
    ranks = frozenset(verdict.cause.ranks) if verdict.cause is not None else frozenset()
    is_wrapped = verdict.is_decided and verdict.cause is not None and verdict.cause.rule.role in ("wrapper", "benign")
    return Score(
        case=case,
        verdict=verdict,
        is_right=is_right(case, verdict),
        is_right_without=is_right(case, without),
        is_rank_right=_is_rank_right(case, verdict),
        is_herring=is_wrapped or bool(verdict.is_decided and ranks & case.victims),
    )


def _is_rank_right(case: Case, verdict: Verdict) -> bool:
    cause = verdict.cause
    if case.first_is_scheduler:
        return cause is not None and cause.events[0].actor.part == "scheduler"
    ranks = frozenset(cause.ranks) if cause is not None else frozenset()
    return not ranks or not verdict.is_decided if case.first is None else ranks == case.first


def _is_of_a_line(verdict: Verdict) -> bool:
    return verdict.cause is not None and not verdict.cause.rule.is_inferred


def page(scores: Sequence[Score], found: Sequence[Herring]) -> str:
    """The page as Markdown."""
    lines = [
        "# How often `amt doctor` is right",
        "",
        "Made by `python -m scripts.doctor_accuracy FOLDER` from cases with established causes (threads with a",
        "confirmed fix, vendor documents, own reproductions), which are not part of this repository. The rules were",
        "written with these cases at hand, so the first column is no forecast for others; the one without its own rule",
        "is closer to one: there the rule that decided a case is taken away. The general words that then decide were",
        "chosen by people who knew these cases too. `of a line` leaves out cases that a comparison of ranks or figures",
        "decided: to take that away is to take away logic, and no line.",
        "",
        "| confidence of the case | kind of cause right | without its own rule | the same, of a line "
        "| first failing rank right | herrings |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    by_confidence: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        by_confidence[score.case.confidence].append(score)
    for name in CONFIDENCES:
        own = by_confidence[name]
        by_line = [each.is_right_without for each in own if _is_of_a_line(each.verdict)]
        ranked = [each.is_rank_right for each in own if each.case.is_multi]
        lines.append(
            f"| {name} | {share([each.is_right for each in own])} | {share([each.is_right_without for each in own])} "
            f"| {share(by_line)} | {share(ranked)} | {sum(each.is_herring for each in own)} |"
        )
    lines += ["", "How sure the doctor was, and how often it was right then:", "", "| said | right |", "| --- | --- |"]
    lines += [
        f"| {name} | {share([each.is_right for each in scores if each.verdict.confidence == name])} |"
        for name in CONFIDENCES
    ]
    missed = [each for each in scores if not each.is_right or (each.case.is_multi and not each.is_rank_right)]
    lines += [
        "",
        "Not right: " + (", ".join(f"{each.case.name} ({each.case.confidence})" for each in missed) or "none"),
    ]
    lines += ["", "On healthy, damaged and unseen logs, which these cases say nothing of: [log.md](log.md)."]
    return "\n".join([*lines, "", *herring_lines(found), ""])


def main(arguments: Sequence[str]) -> int:
    """Writes the page."""
    if len(arguments) != 1:
        print("usage: python -m scripts.doctor_accuracy FOLDER", file=sys.stderr)
        return 2
    book = rule_book()
    rules = Matcher(book)
    folder = Path(arguments[0])
    known = cases(folder)
    found = list(herrings(known, herring_texts(folder), book, rules))
    text = page([scored(case, book, rules) for case in known], found)
    PAGE.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
