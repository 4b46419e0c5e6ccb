"""Drawings for the planner's page, as SVG text that needs no script. Pure.

What is drawn carries its figures as titles, which browsers show under the pointer.
"""

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ascend_moe_train.parallel.schedule import COMPUTE, Kind
from ascend_moe_train.parallel.timeline import Span, Timeline
from ascend_moe_train.units import format_bytes, format_seconds

WIDTH = 1160
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 10, 34
_BAR_GAP = 0.25
_ROW = 24
MAX_SPANS = 12_000  # beyond, the page would be slow to open: the start and the end of the step are drawn
_CLASS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight"}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One part of a bar."""

    name: str
    size_bytes: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """A plan as time against memory. `chosen` is the best one, `on_front` one that no other beats in both."""

    label: str
    step_s: float
    peak_bytes: float
    on_front: bool
    chosen: bool


def memory_bars(stages: Sequence[Sequence[Item]], room_bytes: float) -> str:
    """A stacked bar for each pipeline stage, and a line at what a device has room for."""
    names = list(dict.fromkeys(item.name for stage in stages for item in stage))
    most = max([room_bytes, *(sum(item.size_bytes for item in stage) for stage in stages)]) * 1.05
    height = 320
    plot = height - _TOP - _BOTTOM
    step = (WIDTH - _LEFT - _RIGHT) / len(stages)
    width = min(step * (1 - _BAR_GAP), 90)
    parts = list(_ruler(most, height, format_bytes))
    for number, stage in enumerate(stages):
        x = _LEFT + step * number + (step - width) / 2
        y = float(_TOP + plot)
        for item in stage:
            size = plot * item.size_bytes / most
            y -= size
            parts.append(_rect(x, y, width, size, f"item i{names.index(item.name) % 12}", _of_stage(number, item)))
        if len(stages) <= 32 or number % 8 == 0:
            parts.append(_text(x + width / 2, height - 12, f"{number}", "middle"))
    limit = _TOP + plot * (1 - room_bytes / most)
    parts.append(f'<line class="limit" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{limit:.1f}" y2="{limit:.1f}"/>')
    parts.append(_text(WIDTH - _RIGHT, limit - 4, f"room {format_bytes(room_bytes)}", "end"))
    return _svg(height, "Memory of each pipeline stage", parts) + _legend(names)


def step_rows(timeline: Timeline) -> str:
    """A row for each stage: its passes from the start of the step to its end."""
    rows = timeline.spans
    height = _TOP + _ROW * len(rows) + _BOTTOM
    scale = (WIDTH - _LEFT - _RIGHT) / timeline.step_s
    shown = MAX_SPANS // len(rows)
    parts = []
    for stage, spans in enumerate(rows):
        y = _TOP + _ROW * stage
        parts.append(_text(_LEFT - 8, y + _ROW / 2 + 4, f"stage {stage}", "end"))
        for span in _ends([span for span in spans if span.action.kind in COMPUTE], shown):
            action = span.action
            name = _CLASS[action.kind] + (" odd" if action.chunk % 2 else "")
            duration = format_seconds(span.end_s - span.start_s)
            x = _LEFT + span.start_s * scale
            parts.append(_rect(x, y + 2, (span.end_s - span.start_s) * scale, _ROW - 4, name, f"{action}: {duration}"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + (WIDTH - _LEFT - _RIGHT) * share
        parts.append(_text(x, height - 12, format_seconds(timeline.step_s * share), "middle" if share < 1 else "end"))
    return _svg(height, "Timeline of the step", parts)


def front(points: Sequence[Point], room_bytes: float) -> str:
    """Plans as points: memory to the right, time upwards; a line joins those that no other beats in both."""
    height = 360
    most_s = max(point.step_s for point in points) * 1.08
    most_bytes = max([room_bytes, *(point.peak_bytes for point in points)]) * 1.05
    plot_x, plot_y = WIDTH - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def place(point: Point) -> tuple[float, float]:
        x = _LEFT + plot_x * point.peak_bytes / most_bytes
        return x, _TOP + plot_y * (1 - point.step_s / most_s)

    parts = list(_ruler(most_s, height, format_seconds))
    shares = (0.25, 0.5, 0.75, 1.0)
    parts += [_text(_LEFT + plot_x * share, height - 12, format_bytes(most_bytes * share), "end") for share in shares]
    edge = sorted((point for point in points if point.on_front), key=lambda point: point.peak_bytes)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, edge))
    parts.append(f'<polyline class="edge" points="{path}"/>')
    for point in sorted(points, key=lambda point: (point.chosen, point.on_front)):
        x, y = place(point)
        name = "chosen" if point.chosen else "on" if point.on_front else "off"
        title = f"{point.label}: {format_seconds(point.step_s)}, {format_bytes(point.peak_bytes)}"
        parts.append(
            f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{6 if point.chosen else 4}">'
            f"<title>{html.escape(title)}</title></circle>"
        )
    limit = _LEFT + plot_x * room_bytes / most_bytes
    parts.append(f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>')
    return _svg(height, "Time of a step against memory", parts)


def _ends(spans: Sequence[Span], most: int) -> Sequence[Span]:
    return spans if len(spans) <= most else [*spans[: most // 2], *spans[-(most // 2) :]]


def _of_stage(stage: int, item: Item) -> str:
    return f"stage {stage}, {item.name}: {format_bytes(item.size_bytes)}"


def _ruler(most: float, height: int, shown: Callable[[float], str]) -> Iterable[str]:
    plot = height - _TOP - _BOTTOM
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + plot * (1 - share)
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 8, y + 4, shown(most * share), "end")


def _rect(x: float, y: float, width: float, height: float, name: str, title: str) -> str:
    return (
        f'<rect class="{name}" x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.05):.2f}" height="{max(height, 0):.2f}">'
        f"<title>{html.escape(title)}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _legend(names: Sequence[str]) -> str:
    spans = (f'<span class="i{i % 12}">{html.escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="legend">{"".join(spans)}</p>'
