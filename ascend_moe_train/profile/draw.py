"""Drawings for the page of a capture, as SVG text that needs no script. Pure.

What is drawn carries its figures as titles, which browsers show under the pointer.
"""

import html
from collections.abc import Iterator, Mapping, Sequence

from ascend_moe_train.profile.across import PathPart
from ascend_moe_train.profile.tables import Lane, Memory, Rank

WIDTH = 1160
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 8, 30
_ROW = 22
MAX_ROWS = 64
PARTS = ("computing", "exposed communication", "free")
_CLASSES = ("computing", "moving", "free")
_BUSY = 50  # per cent of a bin from which on it is drawn as that


def step_bars(ranks: Sequence[Rank]) -> str:
    """A bar for each rank: computing, exposed communication, free, on one scale."""
    shown = [rank for rank in ranks if rank.steps][:MAX_ROWS]
    longest_us = max(rank.e2e_us for rank in shown) or 1.0
    scale = (WIDTH - _LEFT - _RIGHT) / longest_us
    height = _TOP + _ROW * len(shown) + _BOTTOM
    parts = []
    for place, rank in enumerate(shown):
        x, y = float(_LEFT), _TOP + _ROW * place
        parts.append(_text(_LEFT - 8, y + 15, f"rank {rank.rank}", "end"))
        for name, title, value in zip(_CLASSES, PARTS, (rank.computing_us, rank.exposed_us, rank.free_us), strict=True):
            words = f"rank {rank.rank}, {title}: {value / 1e3:.1f} ms, {100 * value / (rank.e2e_us or 1.0):.1f} %"
            parts.append(_rect(x, y + 2, value * scale, _ROW - 4, name, words))
            x += value * scale
    parts += _scale(height, longest_us / 1e3)
    return _svg(height, "Step of each rank", parts) + legend(dict(zip(_CLASSES, PARTS, strict=True)))


def timeline(ranks: Sequence[Rank], offsets_ns: Mapping[int, int], path: Sequence[PathPart], path_start_ns: int) -> str:
    """A row for each rank: when it computed, and when it only communicated; a line along the critical path."""
    rows = [(rank, rank.lane) for rank in ranks if rank.lane is not None][:MAX_ROWS]
    if not rows:
        return ""
    starts = {rank.rank: lane.start_ns - offsets_ns.get(rank.rank, 0) for rank, lane in rows}
    ends = [starts[rank.rank] + lane.bin_ns * len(lane.computing) for rank, lane in rows]
    first_ns = min(starts.values())
    span_ns = max(1, max(ends) - first_ns)
    scale = (WIDTH - _LEFT - _RIGHT) / span_ns
    height = _TOP + _ROW * len(rows) + _BOTTOM
    parts, places = [], {}
    for place, (rank, lane) in enumerate(rows):
        y = _TOP + _ROW * place
        places[rank.rank] = y + _ROW / 2
        parts.append(_text(_LEFT - 8, y + 15, f"rank {rank.rank}", "end"))
        for name, begin, end in _runs(lane):
            x = _LEFT + (starts[rank.rank] - first_ns + begin * lane.bin_ns) * scale
            width = (end - begin) * lane.bin_ns * scale
            words = f"rank {rank.rank}: {_TITLES[name]} for {(end - begin) * lane.bin_ns / 1e6:.1f} ms"
            parts.append(_rect(x, y + 2, width, _ROW - 4, name, words))
    points = []
    for part in path:
        if part.rank in places:
            for at_ms in (part.start_ms, part.end_ms):
                x = _LEFT + (path_start_ns - first_ns + at_ms * 1e6) * scale
                points.append(f"{x:.1f},{places[part.rank]:.1f}")
    if points:
        parts.append(f'<polyline class="path" points="{" ".join(points)}"/>')
    parts += _scale(height, span_ns / 1e6)
    names = {**dict(zip(_CLASSES, PARTS, strict=True)), **({"on-path": "critical path"} if points else {})}
    return _svg(height, "Timeline of the ranks", parts) + legend({key: names[key] for key in names if key != "free"})


_TITLES = dict(zip(_CLASSES, PARTS, strict=True))


def _runs(lane: Lane) -> Iterator[tuple[str, int, int]]:
    """Neighbouring bins that are the same, as one; free bins are left out."""
    kinds = [
        "computing" if computing >= _BUSY else "moving" if moving >= _BUSY else "computing" if computing > 5 else ""
        for computing, moving in zip(lane.computing, lane.communication, strict=True)
    ]
    begin = 0
    for place in range(1, len(kinds) + 1):
        if place == len(kinds) or kinds[place] != kinds[begin]:
            if kinds[begin]:
                yield kinds[begin], begin, place
            begin = place


def memory_curves(memory: Sequence[Memory]) -> str:
    """Reserved memory of each component over time."""
    shown = [each for each in memory if len(each.curve) > 1]
    if not shown:
        return ""
    first = min(each.curve[0][0] for each in shown)
    last = max(each.curve[-1][0] for each in shown)
    most = max(each.peak_reserved_mb for each in shown) or 1.0
    height, span = 220, max(1, last - first)
    plot = height - _TOP - _BOTTOM
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _TOP + plot * (1 - share)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{most * share / 1024:.1f} GB", "end"))
    names = {}
    for place, each in enumerate(shown[:6]):
        points = " ".join(
            f"{_LEFT + (WIDTH - _LEFT - _RIGHT) * (at - first) / span:.1f},{_TOP + plot * (1 - size / most):.1f}"
            for at, size in each.curve
        )
        parts.append(f'<polyline class="curve s{place}" points="{points}"/>')
        names[f"s{place}"] = f"{each.component}, peak {each.peak_reserved_mb / 1024:.1f} GB"
    parts += _scale(height, span / 1e6)
    return _svg(height, "Reserved memory", parts) + legend(names)


def heat(rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], unit: str) -> str:
    """A table of cells, darker the larger they are; empty where nothing is known."""
    most = max((value for row in values for value in row if value is not None), default=0.0) or 1.0
    head = "".join(f"<th>{html.escape(each)}</th>" for each in ("", *columns))
    body = []
    for name, row in zip(rows, values, strict=True):
        cells = []
        for value in row:
            level = 0 if value is None else min(9, int(9.99 * value / most))
            text = "" if value is None else f"{value:.1f}"
            cells.append(f'<td class="h{level}">{text}</td>')
        body.append(f"<tr><td>{html.escape(name)}</td>{''.join(cells)}</tr>")
    return f'<table class="heat"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table><p>{unit}</p>'


def legend(names: Mapping[str, str]) -> str:
    """Colours and what they are."""
    spans = (f'<span class="{key}">{html.escape(name)}</span>' for key, name in names.items())
    return f'<p class="legend">{"".join(spans)}</p>'


def _scale(height: float, most_ms: float) -> Iterator[str]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + (WIDTH - _LEFT - _RIGHT) * share
        yield _text(x, height - 10, f"{most_ms * share:.4g} ms", "middle" if share < 1 else "end")


def _rect(x: float, y: float, width: float, height: float, name: str, title: str) -> str:
    return (
        f'<rect class="{name}" x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{height:.1f}">'
        f"<title>{html.escape(title)}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    view = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return f'<div class="wide"><svg {view} role="img" aria-label="{label}">{"".join(parts)}</svg></div>'
