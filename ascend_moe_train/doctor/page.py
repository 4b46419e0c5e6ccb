"""The page of a verdict: one HTML file with a timeline over ranks, which loads nothing and needs no script. Pure."""

import html
from collections.abc import Sequence

from ascend_moe_train.doctor.clock import shown_time
from ascend_moe_train.doctor.event import Event
from ascend_moe_train.doctor.rule import Lang, RuleBook
from ascend_moe_train.doctor.verdict import Verdict
from ascend_moe_train.doctor.words import no_fault_lines, remarks, verdict_rows
from ascend_moe_train.html_page import asset, filled, policy_hash

MAX_ROWS, MAX_MARKS = 128, 40
WIDTH, ROW, LEFT = 900, 18, 110


def page(verdict: Verdict, book: RuleBook, lang: Lang) -> str:
    """The page as text. All strings may hold anything: they are escaped here."""
    style = asset(__package__, "doctor.css")
    rows = verdict_rows(verdict, book, lang, with_all=True)
    rest = remarks(verdict, lang) if rows else no_fault_lines(verdict, lang)
    parts = {
        "lang": lang,
        "title": html.escape(rows[0][1] if rows else rest[0]),
        "verdict": _list(rows) + "".join(f"<p>{html.escape(line)}</p>" for line in rest),
        "timeline": _timeline(verdict),
        "style": style,
        "style_hash": policy_hash(style),
    }
    return filled(asset(__package__, "doctor.html"), parts)


def _list(rows: Sequence[tuple[str, str]]) -> str:
    """Heads with what is said under them."""
    if not rows:
        return ""
    parts = [f"{f'<dt>{html.escape(head)}</dt>' if head else ''}<dd>{html.escape(said)}</dd>" for head, said in rows]
    return f"<dl>{''.join(parts)}</dl>"


def _timeline(verdict: Verdict) -> str:
    """A row for each rank, and for whoever else has said something; a mark for each line."""
    roles = ("cause", "pointer", "symptom")
    timed = [event for event in verdict.evidence.of_role(*roles) if event.at_s is not None]
    if not timed:
        return "<p>No line that matters carries a time.</p>"
    first, last = timed[0].at_s or 0.0, timed[-1].at_s or 0.0
    rows: dict[str, list[Event]] = {f"rank {rank}": [] for rank in verdict.evidence.ranks[:MAX_ROWS]}
    for event in timed:
        rows.setdefault(event.actor.words, []).append(event)
    shown = list(rows.items())[:MAX_ROWS]
    cause = {event.order for event in verdict.cause.events} if verdict.cause is not None else set()
    height = ROW * (len(shown) + 2)
    box = f"0 0 {LEFT + WIDTH + 20} {height}"
    parts = [f'<div class="wide"><svg viewBox="{box}" role="img" aria-label="events of ranks over time">']
    for index, (name, events) in enumerate(shown):
        y = ROW * (index + 1)
        parts.append(f'<text x="0" y="{y}">{html.escape(name)}</text>')
        parts.append(f'<line class="row" x1="{LEFT}" y1="{y - 4}" x2="{LEFT + WIDTH}" y2="{y - 4}"/>')
        parts += [_mark(event, y, first, last, event.order in cause) for event in _spread(events, cause)]
    y = ROW * (len(shown) + 1)
    parts.append(f'<text x="{LEFT}" y="{y}">{shown_time(first)}</text>')
    parts.append(f'<text class="end" x="{LEFT + WIDTH}" y="{y}">{shown_time(last)}</text></svg></div>')
    return "".join(parts)


def _spread(events: Sequence[Event], cause: set[int]) -> list[Event]:
    """As many as can be told apart, those of the cause among them."""
    step = max(1, len(events) // MAX_MARKS)
    return [event for index, event in enumerate(events) if index % step == 0 or event.order in cause]


def _mark(event: Event, y: int, first_s: float, last_s: float, is_cause: bool) -> str:
    share = 0.5 if last_s <= first_s else ((event.at_s or 0.0) - first_s) / (last_s - first_s)
    name = "root" if is_cause else event.rule.role
    title = html.escape(f"{shown_time(event.at_s or 0.0)} {event.place}: {event.text[:200]}")
    return f'<circle class="{name}" cx="{LEFT + share * WIDTH:.1f}" cy="{y - 4}" r="5"><title>{title}</title></circle>'
