"""Cases with known causes, and the doctor's answer to one: what scripts/doctor_accuracy.py measures with."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe_train.doctor.diagnose import scan_stream, verdict_of
from ascend_moe_train.doctor.matcher import Matcher
from ascend_moe_train.doctor.reading import Source
from ascend_moe_train.doctor.rule import RuleBook
from ascend_moe_train.doctor.verdict import Verdict

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


def is_right(case: Case, verdict: Verdict) -> bool:
    """Whether the kind of cause is."""
    group = "benign" if verdict.cause is None else verdict.cause.rule.group
    return group == case.group or group in ALSO_RIGHT.get(case.group, frozenset())


def share(flags: Sequence[bool]) -> str:
    """Such as `59 of 61 (97 %)`."""
    return f"{sum(flags)} of {len(flags)} ({sum(flags) / len(flags):.0%})" if flags else "-"
