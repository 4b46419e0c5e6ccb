"""`amt bench compare`: two results of the same benchmark, figure by figure. Pure."""

from pathlib import Path

from ascend_moe_train.bench.result import Column, Result, Row, machine, now, read_result, shown
from ascend_moe_train.errors import MetricsError

NUMBERS = ("bytes", "seconds", "count", "rate", "flops", "ratio", "share", "number")
COLUMNS = (
    Column(key="name", head="row"),
    Column(key="figure", head="figure"),
    Column(key="first_shown", head="first"),
    Column(key="second_shown", head="second"),
    Column(key="ratio", head="second / first", shows="ratio"),
)


def compared(first_path: Path, second_path: Path, command: str) -> Result:
    """A row for each figure of the rows that both have. Raises MetricsError: a file that is no result, or two of
    different benchmarks, or nothing in common."""
    first, second = read_result(first_path), read_result(second_path)
    if first.kind != second.kind:
        raise MetricsError(
            f"{second_path} is of `amt bench {second.kind}`, {first_path} of `amt bench {first.kind}`: two of the same "
            "benchmark can be compared"
        )
    key = first.columns[0].key
    others = {row.get(key): row for row in second.rows}
    rows: list[Row] = []
    for row in first.rows:
        other = others.get(row.get(key))
        if other is not None:
            rows += _rows(str(row.get(key)), row, other, first)
    if not rows:
        raise MetricsError(f"{first_path} and {second_path} have no row in common")
    return Result(
        kind="compare",
        title=f"{first.title}, two times",
        command=command,
        columns=COLUMNS,
        rows=tuple(rows),
        settings=_settings(first, second),
        notes=tuple(_notes(key, first, second)),
        machine=machine(),
        made_at=now(),
    )


def _rows(name: str, row: Row, other: Row, first: Result) -> list[Row]:
    found: list[Row] = []
    if "value" in row:  # of a result with a figure in each row
        columns = [Column(key="value", head="", shows="number")]
    else:
        columns = [column for column in first.columns if column.shows in NUMBERS]
    for column in columns:
        a, b = row.get(column.key), other.get(column.key)
        if isinstance(a, int | float) and isinstance(b, int | float):
            found.append(
                {
                    "name": name,
                    "figure": column.head,
                    "first": a,
                    "second": b,
                    "first_shown": shown(a, column.shows),
                    "second_shown": shown(b, column.shows),
                    "ratio": b / a if a else None,
                }
            )
    return found


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


def _notes(key: str, first: Result, second: Result) -> list[str]:
    a, b = ({str(row.get(key)) for row in each.rows} for each in (first, second))
    notes = []
    for name, only in (("first", a - b), ("second", b - a)):
        if only:
            notes.append(f"Only in the {name}: {', '.join(sorted(only))}.")
    return notes
