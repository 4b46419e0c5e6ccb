"""The page of a selftest: one HTML file for a bug report, which loads nothing and needs no script. Pure."""

import html
from collections.abc import Sequence

from ascend_moe_train.html_page import asset, card, cell, filled, policy_hash, table
from ascend_moe_train.selftest.results import Result
from ascend_moe_train.selftest.suite import MACHINE, Report
from ascend_moe_train.selftest.words import short_figures, shown, verdict
from ascend_moe_train.train.run_info import versions
from ascend_moe_train.units import format_seconds

TIMES = ("first step, s", "step, s", "slowest later step, s", "tokens/s", "checkpoint, s", "memory, bytes")


def page(report: Report) -> str:
    """The page as text. All strings may hold anything: they are escaped here."""
    style = asset(__package__, "selftest.css")
    # what was not run has a table of its own, and the machine too
    titles = dict.fromkeys(_title(each) for each in report.results if each.status != "not run" and each.part != MACHINE)
    sections = [_wrong(report.results), *(_matrix(title, report.results) for title in titles), _times(report.results)]
    facts = {name: shown(name, value) for name, value in report.machine.items()} | versions()
    sections.append(card("Machine", table(["", ""], [[cell(name), cell(value)] for name, value in facts.items()])))
    good = "All checks that were run have passed" if report.is_finished else "Not finished"
    parts = {
        "title": "Checks failed" if report.has_failed else good,
        "mark": "passed" if report.has_passed else "failed",
        "status": html.escape(
            f"{verdict(report)}; device {shown('device', report.machine.get('device'))}, --ranks {report.asked.ranks}, "
            f"{format_seconds(report.took_s)}"
        ),
        "sections": "\n".join(filter(None, sections)),
        "verb": "selftest",
        "beside": "; report.json beside it has the same for machines",
        "style": style,
        "style_hash": policy_hash(style),
    }
    return filled(asset("ascend_moe_train", "plain.html"), parts)


def _title(result: Result) -> str:
    return result.part.partition(": ")[0]


def _wrong(results: Sequence[Result]) -> str:
    """What failed, with what its process printed last; then what was not run, and why, once for each reason."""
    failed = "".join(
        f"<p class=failed>{html.escape(f'{each.part}, {each.name}: {each.detail}')}</p>"
        + (f"<pre>{html.escape(each.log)}</pre>" if each.log else "")
        for each in results
        if each.status == "failed"
    )
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in results:
        if each.status == "not run":
            reasons.setdefault((each.part, each.detail), []).append(each.name)
    rows = [[cell(part), cell(", ".join(names)), cell(why)] for (part, why), names in reasons.items()]
    not_run = card("Not run", table(["part", "checks", "why"], rows)) if rows else ""
    return (card("Failed", failed) if failed else "") + not_run


def _matrix(title: str, results: Sequence[Result]) -> str:
    """The parts of one title beside each other, a check a line."""
    own = [each for each in results if _title(each) == title]
    parts = list(dict.fromkeys(each.part for each in own))
    names = list(dict.fromkeys(each.name for each in own))
    by_place = {(each.part, each.name): each for each in own}
    rows = [[cell(name), *(_mark(by_place.get((part, name))) for part in parts)] for name in names]
    heads = ["", *(part.partition(": ")[2] or part for part in parts)]
    return card(title.capitalize(), table(heads, rows))


def _mark(result: Result | None) -> str:
    if result is None:
        return "<td></td>"
    words = " · ".join(filter(None, [result.status, short_figures(result)]))
    return f"<td class={result.status.replace(' ', '-')}>{html.escape(words)}</td>"


def _times(results: Sequence[Result]) -> str:
    """Of the trainer's own clock; the first step of a process compiles its graphs."""
    timed = [each for each in results if TIMES[0] in each.figures]
    rows = [
        [cell(f"{each.part}, {each.name}"), *(cell(shown(name, each.figures.get(name))) for name in TIMES)]
        for each in timed
    ]
    heads = ["", *(name.rpartition(", ")[0] or name for name in TIMES)]
    return (
        card("Times of the training steps, and of writing or reading a checkpoint", table(heads, rows)) if rows else ""
    )
