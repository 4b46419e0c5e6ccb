"""Two captures beside each other: the step, its parts, collectives and operators by count and shape. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean

from rich.console import Group, RenderableType
from rich.text import Text

from ascend_moe_train.profile.across import kind_of_collective
from ascend_moe_train.profile.analysis import Analysis
from ascend_moe_train.profile.screen import table, unmarked
from ascend_moe_train.profile.tables import KernelGroup, Rank
from ascend_moe_train.units import UNKNOWN

MAX_ROWS = 15


@dataclass(frozen=True, kw_only=True)
class Row:
    """A name with ms a step in both, mean over ranks; counts where it has any. None is not in that capture."""

    name: str
    before_ms: float | None
    after_ms: float | None
    before_count: float | None = None
    after_count: float | None = None

    @property
    def change_ms(self) -> float:
        """After less before; what is in one only changes by all of it."""
        return (self.after_ms or 0.0) - (self.before_ms or 0.0)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`parts` in their order, the rest by how much changed. `noise` says what may be chance."""

    before: str
    after: str
    parts: tuple[Row, ...]
    collectives: tuple[Row, ...]
    operators: tuple[Row, ...]
    shapes: tuple[Row, ...]
    noise: str


def compare(before: Analysis, after: Analysis) -> Comparison:
    """See `Comparison`."""
    return Comparison(
        before=before.capture.folder,
        after=after.capture.folder,
        parts=tuple(_parts(before, after)),
        collectives=tuple(_largest(_collectives(before), _collectives(after))),
        operators=tuple(_largest(_operators(before, _type), _operators(after, _type))),
        shapes=tuple(_largest(_operators(before, _shape), _operators(after, _shape))),
        noise=_noise(before, after),
    )


def _parts(before: Analysis, after: Analysis) -> Iterator[Row]:
    names: dict[str, Callable[[Rank], float]] = {
        "step": lambda rank: rank.e2e_us,
        "computing": lambda rank: rank.computing_us,
        "exposed communication": lambda rank: rank.exposed_us,
        "overlapped communication": lambda rank: rank.overlapped_us,
        "free": lambda rank: rank.free_us,
    }
    for name, value in names.items():
        yield Row(name=name, before_ms=_mean_ms(before, value), after_ms=_mean_ms(after, value))


def _mean_ms(analysis: Analysis, value: Callable[[Rank], float]) -> float | None:
    found = [value(rank) / 1e3 for rank in analysis.ranks if rank.steps]
    return mean(found) if found else None


_Sums = dict[str, tuple[float, float]]  # name -> count and ms, a rank and step


def _collectives(analysis: Analysis) -> _Sums:
    found: dict[str, list[float]] = {}
    with_any = [rank for rank in analysis.ranks if rank.collectives]
    for rank in with_any:
        for each in rank.collectives:
            kind = kind_of_collective(each, analysis.layout)
            sums = found.setdefault(f"{each.kind} ({kind})", [0.0, 0.0])
            sums[0] += 1 / rank.num_steps / len(with_any)
            sums[1] += each.elapse_ms / rank.num_steps / len(with_any)
    return {name: (sums[0], sums[1]) for name, sums in found.items()}


def _type(group: KernelGroup) -> str:
    return group.type


def _shape(group: KernelGroup) -> str:
    return f"{group.type} {group.shapes}" if group.shapes else ""


def _operators(analysis: Analysis, name_of: Callable[[KernelGroup], str]) -> _Sums:
    found: dict[str, list[float]] = {}
    with_any = [rank for rank in analysis.ranks if rank.kernels]
    for rank in with_any:
        for each in rank.kernels:
            if name := name_of(each):
                sums = found.setdefault(name, [0.0, 0.0])
                sums[0] += each.count / rank.num_steps / len(with_any)
                sums[1] += each.total_us / 1e3 / rank.num_steps / len(with_any)
    return {name: (sums[0], sums[1]) for name, sums in found.items()}


def _largest(before: _Sums, after: _Sums) -> list[Row]:
    rows = []
    for name in {**before, **after}:
        one, other = before.get(name), after.get(name)
        rows.append(
            Row(
                name=name,
                before_ms=one[1] if one else None,
                after_ms=other[1] if other else None,
                before_count=one[0] if one else None,
                after_count=other[0] if other else None,
            )
        )
    return sorted(rows, key=lambda row: (-abs(row.change_ms), row.name))[:MAX_ROWS]


def _noise(before: Analysis, after: Analysis) -> str:
    steps = [max((len(rank.steps) for rank in each.ranks), default=0) for each in (before, after)]
    if min(steps) < 2:
        return "one step was profiled: a difference of some per cent may be chance; profile several steps of both"
    noise = [each.value or 0.0 for side in (before, after) for each in side.figures if each.name == "noise"]
    return f"steps of one rank differ by up to {100 * max(noise):.1f} % (standard deviation)"


def comparison_screen(found: Comparison) -> RenderableType:
    """Tables, the largest changes first."""
    sections = {
        "Step, mean over ranks": found.parts,
        "Collectives, a rank and step": found.collectives,
        "Operators, a rank and step": found.operators,
        "Operators by shape, a rank and step": found.shapes,
    }
    title = Text.from_markup(f"[bold]{unmarked(found.before)}[/] against [bold]{unmarked(found.after)}[/]")
    shown = [_section(name, rows) for name, rows in sections.items() if rows]
    return Group(title, *shown, Text.from_markup(f"[yellow]note:[/] {unmarked(found.noise)}"))


def _section(name: str, rows: tuple[Row, ...]) -> RenderableType:
    has_counts = any(row.before_count is not None or row.after_count is not None for row in rows)
    counts = ("count", "count after") if has_counts else ()
    shown = table(name, "", "ms", "ms after", "change", *counts)
    for row in rows:
        change = f"{row.change_ms:+z.2f}"
        if row.before_ms and row.after_ms is not None:
            change += f" ({100 * row.change_ms / row.before_ms:+z.0f} %)"
        numbers = [_ms(row.before_ms), _ms(row.after_ms), change]
        if has_counts:
            numbers += ["" if each is None else f"{each:g}" for each in (row.before_count, row.after_count)]
        shown.add_row(unmarked(row.name[:60]), *numbers)
    return shown


def _ms(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"
