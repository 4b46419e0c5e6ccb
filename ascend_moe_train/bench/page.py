"""The page of a benchmark: one HTML file with its table and bars, which loads nothing and needs no script. Pure."""

import html
import json
from collections.abc import Iterable, Sequence

from ascend_moe_train.bench.bars import bars
from ascend_moe_train.bench.result import Chart, Result, shown
from ascend_moe_train.html_page import asset, filled, policy_hash

WORDS = "text"


def page(result: Result, charts: Sequence[Chart]) -> str:
    """The page as text. All strings may hold anything: they are escaped here."""
    style = asset(__package__, "bench.css")
    sections = [_card("Figures", _table(result)), *(bars(chart, result.rows, result.columns) for chart in charts)]
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in result.notes)
    facts = {name: _said(value) for name, value in result.settings.items()} | result.machine
    sections += [_card("How to read it", notes), _card("Settings and machine", _facts(facts.items()))]
    parts = {
        "title": html.escape(result.title),
        "kind": html.escape(f"amt bench {result.kind}"),
        "status": html.escape(f"{result.command}, {result.made_at}"),
        "sections": "\n".join(filter(None, sections)),
        "style": style,
        "style_hash": policy_hash(style),
    }
    return filled(asset(__package__, "bench.html"), parts)


def _said(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h2>{html.escape(title)}</h2>{body}</section>' if body else ""


def _table(result: Result) -> str:
    head = "".join(f"<th{_kind(c.shows)}>{html.escape(c.head)}</th>" for c in result.columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td{_kind(c.shows)}>{html.escape(shown(row.get(c.key), c.shows))}</td>" for c in result.columns)
        + "</tr>"
        for row in result.rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _kind(shows: str) -> str:
    return ' class="words"' if shows == WORDS else ""


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts)
    return f'<dl class="facts">{rows}</dl>'
