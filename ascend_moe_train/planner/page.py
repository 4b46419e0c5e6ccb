"""The planner's page: one HTML file with tables and drawings, which loads nothing and needs no script. Pure."""

import html
from collections.abc import Sequence

from ascend_moe_train.html_page import asset, card, filled, policy_hash
from ascend_moe_train.parallel.schedule import SENDS, Action, Kind, schedule
from ascend_moe_train.parallel.timeline import Timeline, simulate
from ascend_moe_train.planner.draw import Item, Point, front, memory_bars, step_rows
from ascend_moe_train.planner.explain import PARTS, plan_words
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.plan import Job
from ascend_moe_train.planner.scored import Scored
from ascend_moe_train.units import format_bytes, format_count, format_seconds, format_share

MAX_POINTS = 400


def timeline_of(job: Job, best: Scored) -> Timeline:
    """The step's passes, by the lists that the trainer runs."""
    plan, time = best.plan, best.time

    def duration_s(stage: int, action: Action) -> float:
        if action.kind in SENDS:
            return time.send_s
        each = time.passes[action.chunk * plan.pp + stage]
        if action.kind is Kind.FORWARD:
            return each.forward_s
        later_s = each.weight_s if plan.schedule == "zero_bubble" and plan.pp > 1 else 0.0
        return each.backward_s - later_s if action.kind is Kind.BACKWARD else each.weight_s

    name = plan.schedule if plan.pp > 1 else "1f1b"
    return simulate(schedule(name, plan.pp, plan.num_micro(job), plan.chunks), duration_s)


def page(job: Job, cluster: Cluster, title: str, best: Sequence[Scored], seen: Sequence[Scored], notes: str) -> str:
    """The page as text. All strings may hold anything: they are escaped here."""
    style = asset("ascend_moe_train", "page.css") + asset(__package__, "plan.css")
    chosen, room = best[0], cluster.device.memory_bytes
    stages = [
        [Item(name=name, size_bytes=size) for name, size in stage.items.items() if size > 0]
        for stage in chosen.memory.stages
    ]
    timeline = timeline_of(job, chosen)
    sections = [
        card("Plans", _table(best)),
        card("Memory of each pipeline stage", memory_bars(stages, room)),
        card("Where the step goes", _parts(chosen)),
        card(f"Timeline of the passes, {plan_words(chosen.plan)}", step_rows(timeline)),
        card("Time of a step against memory, of every plan evaluated that fits", front(_points(best, seen), room)),
        card("Notes", f"<pre>{html.escape(notes)}</pre>"),
    ]
    parts = {
        "title": html.escape(title),
        "status": html.escape(f"{plan_words(chosen.plan)}; on {cluster.name}"),
        "tiles": _tiles(chosen),
        "sections": "\n".join(sections),
        "style": style,
        "style_hash": policy_hash(style),
    }
    return filled(asset(__package__, "plan.html"), parts)


def _tiles(best: Scored) -> str:
    shown = {
        "Step": (format_seconds(best.time.step_s), "predicted"),
        "Tokens": (f"{format_count(best.time.tokens_per_s)}/s", "whole cluster"),
        "MFU": (format_share(best.time.mfu), "causal model FLOPs"),
        "Memory": (format_bytes(best.memory.peak_bytes), f"fullest stage, {best.memory.fullest}"),
        "Bubble": (format_share(best.time.bubble_share), "of the step"),
    }
    return "".join(
        f'<div><dt>{name}</dt><dd class="value">{html.escape(value)}</dd>'
        f'<dd class="note">{html.escape(note)}</dd></div>'
        for name, (value, note) in shown.items()
    )


def _table(best: Sequence[Scored]) -> str:
    rows = [
        [
            str(number),
            plan_words(each.plan),
            format_bytes(each.memory.peak_bytes),
            format_seconds(each.time.step_s),
            format_count(each.time.tokens_per_s),
            format_share(each.time.mfu),
            format_share(each.time.bubble_share),
        ]
        for number, each in enumerate(best, 1)
    ]
    heads = ["", "plan", "memory", "step", "tokens/s", "MFU", "bubble"]
    return _html_table(heads, rows)


def _parts(best: Scored) -> str:
    step_s = best.time.step_s
    parts = sorted(best.time.items.items(), key=lambda pair: -pair[1])
    rows = [["", PARTS.get(name, name), format_seconds(value), format_share(value / step_s)] for name, value in parts]
    return _html_table(["", "part", "time", "of the step"], [row for row in rows if row[-1] != "0.0 %"])


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(each)}</th>" for each in heads)
    body = "".join(
        f"<tr{' class=chosen-row' if number == 0 else ''}>"
        + "".join(
            f"<td{' class=words' if place == 1 else ''}>{html.escape(cell)}</td>" for place, cell in enumerate(row)
        )
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _points(best: Sequence[Scored], seen: Sequence[Scored]) -> list[Point]:
    """Every plan on the front, and of the others the fastest."""
    ordered = sorted(seen, key=lambda each: (each.time.step_s, each.memory.peak_bytes))
    points, least = [], float("inf")
    for number, each in enumerate(ordered):
        is_on = each.memory.peak_bytes < least
        least = min(least, each.memory.peak_bytes)
        if is_on or number < MAX_POINTS:
            points.append(
                Point(
                    label=plan_words(each.plan),
                    step_s=each.time.step_s,
                    peak_bytes=each.memory.peak_bytes,
                    on_front=is_on,
                    chosen=each.plan == best[0].plan,
                )
            )
    return points
