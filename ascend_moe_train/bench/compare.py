"""`amt bench compare`: two results of the same benchmark, or two predictions of plans, figure by figure. Pure."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ascend_moe_train.bench import planned
from ascend_moe_train.bench.result import Chart, Column, Result, Row, machine, now, read_result, shown
from ascend_moe_train.errors import MetricsError

NUMBERS = ("bytes", "byte_rate", "seconds", "count", "rate", "flops", "ratio", "share", "number")


def compared(first_path: Path, second_path: Path, command: str) -> Result:
    """A row for each figure of the rows that both have. Raises MetricsError: a file that is no result, or two of
    different benchmarks, or nothing in common."""
    first, second = _read(first_path), _read(second_path)
    if first.kind != second.kind:
        raise MetricsError(
            f"{second_path} is of `{_verb(second)}`, {first_path} of `{_verb(first)}`: two of the same benchmark can "
            "be compared"
        )
    key = first.columns[0].key
    others = {row.get(key): row for row in second.rows}
    pairs = [(row, others[row.get(key)]) for row in first.rows if row.get(key) in others]
    if not pairs:
        raise MetricsError(f"{first_path} and {second_path} have no row in common")
    columns, equal = _figures(first, pairs)
    rows = [each for row, other in pairs for each in _rows(str(row.get(key)), row, other, columns)]
    notes = list(_notes(key, first, second))
    if equal:
        notes.append(f"The same in all rows of both: {', '.join(equal)}.")
    is_plan = first.kind == planned.KIND
    if is_plan:
        notes.insert(0, "Every figure here is a prediction of `amt plan`. Nothing of it was measured.")
    return Result(
        kind="compare",
        title=f"{first.title} and {second.title}: {planned.MARK}" if is_plan else f"{first.title}, two times",
        command=command,
        columns=_columns(is_plan, named=any(row["figure"] for row in rows)),
        rows=tuple(rows),
        settings=_settings(first, second),
        notes=tuple(notes),
        machine=machine(),
        made_at=now(),
    )


def charts_of(result: Result) -> tuple[Chart, ...]:
    """Bars of the ratios, for each figure by itself."""
    figures = dict.fromkeys(str(row["figure"]) for row in result.rows)
    return tuple(
        Chart(
            title=f"{figure}: second / first" if figure else "Second / first",
            values=(_ratio_key(figure),),
            note="1 where both are equal",
            shows="ratio",
        )
        for figure in figures
    )


def _read(path: Path) -> Result:
    return read_result(path, planned.plan_of, "nor of `amt plan --json`")


def _verb(result: Result) -> str:
    return "amt plan --json" if result.kind == planned.KIND else f"amt bench {result.kind}"


def _columns(is_plan: bool, *, named: bool) -> tuple[Column, ...]:
    mark = ", predicted" if is_plan else ""
    return (
        Column(key="name", head="row"),
        *([Column(key="figure", head="figure")] if named else []),
        Column(key="first_shown", head=f"first{mark}"),
        Column(key="second_shown", head=f"second{mark}"),
        Column(key="ratio", head="second / first", shows="ratio"),
    )


def _ratio_key(figure: str) -> str:
    return f"ratio of {figure}"


def _figures(first: Result, pairs: Sequence[tuple[Row, Row]]) -> tuple[list[Column], list[str]]:
    """Columns with numbers, and the heads of those that say nothing, being the same everywhere."""
    if "value" in first.rows[0]:  # of a result with a figure in each row
        return [Column(key="value", head="", shows="number")], []
    columns = [column for column in first.columns if column.shows in NUMBERS]
    differ = [each for each in columns if any(row.get(each.key) != other.get(each.key) for row, other in pairs)]
    if not differ:
        return columns, []
    return differ, [column.head for column in columns if column not in differ]


def _rows(name: str, row: Row, other: Row, columns: Sequence[Column]) -> list[Row]:
    found: list[Row] = []
    for column in columns:
        a, b = row.get(column.key), other.get(column.key)
        if isinstance(a, int | float) and isinstance(b, int | float):
            ratio = b / a if a else None
            found.append(
                {
                    "name": name,
                    "figure": column.head,
                    "first": a,
                    "second": b,
                    "first_shown": _shown(row, a, column),
                    "second_shown": _shown(other, b, column),
                    "ratio": ratio,
                    _ratio_key(column.head): ratio,
                }
            )
    return found


def _shown(row: Row, value: float, column: Column) -> str:
    """As the result itself shows it, with the unit, if a row is a figure."""
    own = row.get("shown") if column.key == "value" else None
    return own if isinstance(own, str) else shown(value, column.shows)


def _settings(first: Result, second: Result) -> dict[str, str]:
    """What the two are, and in what they differ."""
    found = {"first": f"{first.command}, {first.made_at}", "second": f"{second.command}, {second.made_at}"}
    for name in dict.fromkeys([*first.machine, *second.machine]):
        a, b = first.machine.get(name, "-"), second.machine.get(name, "-")
        if a != b:
            found[f"differs: {name}"] = f"{a} | {b}"
    for name in dict.fromkeys([*first.settings, *second.settings]):
        c, d = first.settings.get(name), second.settings.get(name)
        if c != d:
            found[f"differs: {name}"] = f"{c} | {d}"
    return found


def _notes(key: str, first: Result, second: Result) -> Iterator[str]:
    a, b = ({str(row.get(key)) for row in each.rows} for each in (first, second))
    for name, only in (("first", a - b), ("second", b - a)):
        if only:
            yield f"Only in the {name}: {', '.join(sorted(only))}."
