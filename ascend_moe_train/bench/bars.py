"""Bars of a page: SVG that is as wide as its place, with words beside it in HTML, so that a narrow screen can read it.

Pure.
"""

import html
import math
from collections.abc import Iterator, Sequence

from ascend_moe_train.bench.result import Chart, Column, Row, Shows, shown


def bars(chart: Chart, rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The chart, empty if no row has a figure for it."""
    name = columns[0].key
    shows: Shows = next((column.shows for column in columns if column.key in chart.values), chart.shows)
    drawn = [(row, values) for row in rows if (values := _values(row, chart.values)) is not None]
    if not drawn:
        return ""
    ends = [sum(values) for _, values in drawn]
    ends += [high for row, _ in drawn if (high := _number(row, chart.high)) is not None]
    scale = _Scale(ends, log=chart.log)
    lines = []
    for row, values in drawn:
        title = ", ".join(shown(value, shows) for value in values)
        lines.append(
            f"<dt>{html.escape(str(row[name]))}</dt><dd>{html.escape(title)}</dd>"
            f'<dd class="bar"><svg width="100%" height="14" role="img" aria-label="{html.escape(title)}">'
            f"{''.join(_drawn(row, values, chart, scale))}</svg></dd>"
        )
    note = f'<p class="note">{html.escape(chart.note)}</p>' if chart.note else ""
    return (
        f'<section class="card"><h2>{html.escape(chart.title)}</h2>{note}{_legend(chart.legend)}'
        f'<dl class="bars">{"".join(lines)}</dl>'
        f"{scale.words(shows)}</section>"
    )


def _legend(words: Sequence[str]) -> str:
    if not words:
        return ""
    square = '<svg width="10" height="10"><rect class="v{}" width="10" height="10"/></svg>'
    each = (f"<li>{square.format(place)} {html.escape(word)}</li>" for place, word in enumerate(words))
    return f'<ul class="legend">{"".join(each)}</ul>'


class _Scale:
    """From a figure to a share of the width."""

    def __init__(self, ends: Sequence[float], *, log: bool) -> None:
        positive = [end for end in ends if end > 0]
        self._is_log = log and bool(positive)
        self._most = max(ends) or 1.0
        self._least = 10.0 ** math.floor(math.log10(min(positive))) if self._is_log else 0.0
        if self._is_log:
            self._most = 10.0 ** math.ceil(math.log10(self._most))
            if self._most == self._least:
                self._least /= 10

    def share(self, value: float) -> float:
        """0 to 1."""
        if not self._is_log:
            return value / self._most
        if value <= self._least:
            return 0.0
        return math.log10(value / self._least) / math.log10(self._most / self._least)

    def words(self, shows: Shows) -> str:
        """Of a scale that does not begin at zero, where it begins and ends."""
        if not self._is_log:
            return ""
        how: Shows = shows if shows in ("bytes", "byte_rate", "seconds", "flops") else "number"
        return f'<p class="note">logarithmic, from {shown(self._least, how)} to {shown(self._most, how)}</p>'


def _values(row: Row, keys: Sequence[str]) -> list[float] | None:
    found = [_number(row, key) for key in keys]
    values = [value for value in found if value is not None]
    return values if values and len(values) == len(found) else None


def _number(row: Row, key: str | None) -> float | None:
    value = row.get(key) if key is not None else None
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _drawn(row: Row, values: Sequence[float], chart: Chart, scale: _Scale) -> Iterator[str]:
    start = 0.0
    for place in range(len(values)):
        end = scale.share(sum(values[: place + 1]))
        yield f'<rect class="v{place}" x="{start:.2%}" width="{max(end - start, 0):.2%}" height="14"/>'
        start = end
    low, high = _number(row, chart.low), _number(row, chart.high)
    if low is not None and high is not None:
        yield (f'<line class="spread" x1="{scale.share(low):.2%}" x2="{scale.share(high):.2%}" y1="7" y2="7"/>')
