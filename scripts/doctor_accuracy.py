"""How often the doctor is right on cases with known causes: `python -m scripts.doctor_accuracy FOLDER`.

FOLDER holds `cases.json` (one excerpt each) and `multi_rank.json` (logs of several ranks). Writes
docs/doctor-accuracy.md. "Without its own rule" is leave-one-out: the rule that decided a case is taken away, and the
next best answer counts. A case is right when the kind of cause is.
"""

import io
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe_train.doctor.diagnose import scan_stream, verdict_of
from ascend_moe_train.doctor.matcher import Matcher
from ascend_moe_train.doctor.reading import Source
from ascend_moe_train.doctor.rule import RuleBook, rule_book
from ascend_moe_train.doctor.verdict import Verdict

PAGE = Path(__file__).parents[1] / "docs" / "doctor-accuracy.md"
CONFIDENCES = ("high", "medium", "low")

# Kinds that name the same from another side: what a rank raised in its program, and that its peers saw it crash.
ALSO_RIGHT: Mapping[str, frozenset[str]] = {"peer_crash": frozenset({"program"})}

Files = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Logs by the names of their files; the kind of cause, and the ranks that failed first (None where nobody is to be
    named) and that are only victims."""

    name: str
    files: Files
    group: str
    confidence: str
    first: frozenset[int] | None = None
    victims: frozenset[int] = frozenset()
    is_multi: bool = False
    first_is_scheduler: bool = False


@dataclass(frozen=True, kw_only=True)
class Score:
    """What came out for a case."""

    case: Case
    verdict: Verdict
    is_right: bool
    is_right_without: bool
    is_rank_right: bool
    is_herring: bool


def cases(folder: Path) -> list[Case]:
    """All cases of a folder."""
    single = json.loads((folder / "cases.json").read_text(encoding="utf-8"))["cases"]
    multi = json.loads((folder / "multi_rank.json").read_text(encoding="utf-8"))["cases"]
    found = [
        Case(
            name=each["id"],
            files=[("case.log", f"{each['log']}\n")],
            group=each["group"],
            confidence=each["confidence"],
        )
        for each in single
    ]
    return [*found, *map(_multi, multi)]


def _multi(each: Mapping[str, Any]) -> Case:
    first = each["first_failing_rank"]
    listed = first if isinstance(first, list) else [first]
    victims = each["victims"] if isinstance(each["victims"], list) else []
    return Case(
        name=each["id"],
        files=list(_files(each["ranks"])),
        group=each["group"],
        confidence=each["confidence"],
        first=None if first is None else frozenset(rank for rank in listed if isinstance(rank, int)),
        victims=frozenset(victims),
        is_multi=True,
        first_is_scheduler=first == "scheduler",
    )


def _files(ranks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for number, each in enumerate(ranks):
        rank = each["rank"]
        name = f"rank_{rank}.log" if isinstance(rank, int) else f"{number}_{str(rank).replace(' ', '_')}.log"
        folder = f"{each['node']}/" if each.get("node") else ""
        yield f"{folder}{name}", f"{each['log']}\n"


def diagnosed(files: Files, book: RuleBook, rules: Matcher) -> Verdict:
    """The verdict on texts under the names of their files."""
    scanned = [
        scan_stream(Source(name=name, size_bytes=len(text)), io.BytesIO(text.encode()), rules) for name, text in files
    ]
    return verdict_of(scanned, book)


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
        is_right=_is_right(case, verdict),
        is_right_without=_is_right(case, without),
        is_rank_right=_is_rank_right(case, verdict),
        is_herring=is_wrapped or bool(verdict.is_decided and ranks & case.victims),
    )


def _is_right(case: Case, verdict: Verdict) -> bool:
    group = "benign" if verdict.cause is None else verdict.cause.rule.group
    return group == case.group or group in ALSO_RIGHT.get(case.group, frozenset())


def _is_rank_right(case: Case, verdict: Verdict) -> bool:
    cause = verdict.cause
    if case.first_is_scheduler:
        return cause is not None and cause.events[0].actor.part == "scheduler"
    ranks = frozenset(cause.ranks) if cause is not None else frozenset()
    return not ranks or not verdict.is_decided if case.first is None else ranks == case.first


def _is_of_a_line(verdict: Verdict) -> bool:
    return verdict.cause is not None and not verdict.cause.rule.is_inferred


def share(flags: Sequence[bool]) -> str:
    """Such as `59 of 61 (97 %)`."""
    return f"{sum(flags)} of {len(flags)} ({sum(flags) / len(flags):.0%})" if flags else "-"


def page(scores: Sequence[Score]) -> str:
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
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str]) -> int:
    """Writes the page."""
    if len(arguments) != 1:
        print("usage: python -m scripts.doctor_accuracy FOLDER", file=sys.stderr)
        return 2
    book = rule_book()
    rules = Matcher(book)
    text = page([scored(case, book, rules) for case in cases(Path(arguments[0]))])
    PAGE.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
