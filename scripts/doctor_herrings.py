"""Whether the doctor takes what only looks like a cause for one: red herrings of cases, each by itself.

A herring is chosen where the verdict is decided for another kind of cause than the case's, with more than low
confidence. `alone` is a log of nothing else; `beside` is the case's own log with the herring before or after its lines.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ascend_moe_train.doctor.matcher import Matcher
from ascend_moe_train.doctor.rule import RuleBook
from ascend_moe_train.doctor.verdict import Verdict
from scripts.doctor_case import Case, Files, diagnosed, is_right, share

_QUOTED = re.compile(r"'([^']{8,})'|\"([^\"]{8,})\"")


@dataclass(frozen=True, kw_only=True)
class Herring:
    """A text, and whether it was chosen; `is_guess` where alone it gave another kind with low confidence."""

    case: Case
    text: str
    is_chosen_alone: bool
    is_guess: bool
    is_chosen_beside: bool


def herring_texts(folder: Path) -> Mapping[str, Sequence[str]]:
    """Texts by cases: what a case's sentence about a herring quotes, else the sentence."""
    found: dict[str, list[str]] = {}
    for name in ("cases.json", "multi_rank.json"):
        for each in json.loads((folder / name).read_text(encoding="utf-8"))["cases"]:
            texts = [text for sentence in each["red_herrings"] for text in _quoted(sentence)]
            found[each["id"]] = texts
    return found


def _quoted(sentence: str) -> list[str]:
    return [one or other for one, other in _QUOTED.findall(sentence)] or [sentence]


def herrings(
    cases: Sequence[Case], texts: Mapping[str, Sequence[str]], book: RuleBook, rules: Matcher
) -> Iterator[Herring]:
    """All of them, put to the doctor."""
    for case in cases:
        was_right = is_right(case, diagnosed(case.files, book, rules))
        for text in texts[case.name]:
            alone = diagnosed([("x.log", f"{text}\n")], book, rules)
            beside = [diagnosed(files, book, rules) for files in _beside(case.files, text)]
            yield Herring(
                case=case,
                text=text,
                is_chosen_alone=_is_other(case, alone) and alone.confidence != "low",
                is_guess=_is_other(case, alone) and alone.confidence == "low",
                is_chosen_beside=was_right and any(_is_other(case, verdict) for verdict in beside),
            )


def _beside(files: Files, text: str) -> Iterator[Files]:
    """The first file with the text before and after its lines."""
    name, log = files[0]
    for changed in (f"{text}\n{log}", f"{log}{text}\n"):
        yield [(name, changed), *files[1:]]


def _is_other(case: Case, verdict: Verdict) -> bool:
    return verdict.is_decided and not is_right(case, verdict)


def herring_lines(found: Sequence[Herring]) -> list[str]:
    """A part of the page."""
    chosen = sorted({each.case.name for each in found if each.is_chosen_alone or each.is_chosen_beside})
    return [
        "## Red herrings",
        "",
        f"The cases list {len(found)} texts that look like the cause and are not. Each was put to the doctor alone,",
        "and before and after the lines of its case. Chosen means: decided for another kind than the case's, with more",
        "than low confidence. Alone a herring is all that there is to go by: what it names is then told with low",
        "confidence.",
        "",
        "| | of the texts |",
        "| --- | --- |",
        f"| chosen alone | {share([each.is_chosen_alone for each in found])} |",
        f"| another kind told alone, with low confidence | {share([each.is_guess for each in found])} |",
        f"| chosen beside the cause, before or after it | {share([each.is_chosen_beside for each in found])} |",
        "",
        "Chosen: " + (", ".join(chosen) or "none"),
    ]
