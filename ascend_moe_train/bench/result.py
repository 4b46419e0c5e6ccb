"""A benchmark's result: rows of figures with what they were measured on; as JSON, as Markdown, as a table. Pure."""

import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ascend_moe_train.errors import MetricsError
from ascend_moe_train.plain_text import plain
from ascend_moe_train.train.metrics import first_problem
from ascend_moe_train.train.run_info import versions
from ascend_moe_train.units import UNKNOWN, format_bytes, format_count, format_flops_per_s, format_seconds, format_share

FORMAT = 1
MAX_BYTES = 2**24
_ROOT = Path(__file__).parents[2]

Shows = Literal["text", "bytes", "byte_rate", "seconds", "count", "rate", "flops", "ratio", "share", "number", "error"]
Figure = str | float | None
Row = dict[str, Figure]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of every row: its key, its head, and what it is."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: str
    head: str
    shows: Shows = "text"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Bars: one for each row that has the figures `values`, of which several stand one after the other, each with its
    word of `legend`. `low` and `high` are the ends of a line upon it. On a `log` scale bars begin at the power of ten
    below the least. `shows` is for figures that are no column."""

    title: str
    values: tuple[str, ...]
    note: str = ""
    low: str | None = None
    high: str | None = None
    log: bool = False
    legend: tuple[str, ...] = ()
    shows: Shows = "number"


@dataclass(frozen=True, kw_only=True)
class Result:
    """`kind` is the benchmark, `command` what made it, `settings` what it was told; the first column names the rows."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: str
    title: str
    command: str
    columns: Annotated[tuple[Column, ...], Field(min_length=1)]
    rows: tuple[Row, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    machine: dict[str, str] = field(default_factory=dict)
    made_at: str = ""
    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT


_RESULT = TypeAdapter(Result)


def machine() -> dict[str, str]:
    """Versions, processor, load of the last minute, and the commit of a source tree."""
    found = {name: value for name, value in versions().items() if name != "system"}
    found["load of the last minute"] = f"{os.getloadavg()[0]:.1f}"
    if (_ROOT / ".git").exists():
        words = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        found["commit"] = done.stdout.strip() or UNKNOWN
    return found


def now() -> str:
    """The time, as `Result.made_at` has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def shown(value: Figure, shows: Shows) -> str:
    """A figure for people."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return UNKNOWN if shows != "text" else ""
    if isinstance(value, str):
        return value
    if shows == "error":
        return "0" if value == 0 else f"{value:+.1e}"
    ways: dict[str, Callable[[float], str]] = {
        "bytes": format_bytes,
        "byte_rate": lambda number: f"{format_bytes(number)}/s",
        "seconds": format_seconds,
        "count": lambda number: f"{number:,.0f}",
        "rate": format_count,
        "flops": format_flops_per_s,
        "ratio": lambda number: f"{number:.2f}",
        "share": format_share,
    }
    return ways[shows](value) if shows in ways else f"{value:.4g}"


def table_of(result: Result, keys: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    """Heads and cells of those columns, all without `keys`."""
    columns = [column for column in result.columns if keys is None or column.key in keys]
    heads = tuple(column.head for column in columns)
    return [heads, *(tuple(shown(row.get(c.key), c.shows) for c in columns) for row in result.rows)]


def markdown(result: Result) -> str:
    """The result as a page of Markdown."""
    head, *rows = table_of(result)
    lines = [
        f"# {plain(result.title)}",
        "",
        f"    {plain(result.command)}",
        "",
        _line(head),
        "|" + " --- |" * len(head),
    ]
    lines += [_line(row) for row in rows]
    lines += ["", *map(plain, result.notes)]
    where = ", ".join(f"{key} {value}" for key, value in result.machine.items())
    return "\n".join([*lines, "", plain(f"Measured at {result.made_at} on: {where}."), ""])


def result_json(result: Result) -> str:
    """What `read_result` reads; a figure that is no number is null."""
    return json.dumps(json.loads(_RESULT.dump_json(result)), indent=2) + "\n"


def read_result(path: Path, otherwise: Callable[[bytes], Result | None] = lambda _: None, other: str = "") -> Result:
    """A result from a file; `otherwise` makes one of what is no result, None if it cannot, and `other` names what that
    may be. Raises MetricsError naming file and field."""
    if path.exists() and not path.is_file():  # a pipe might never end
        raise MetricsError(f"{path}: is no regular file")
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise MetricsError(f"{path}: {error.strerror or error}") from None
    if len(text) > MAX_BYTES:
        raise MetricsError(f"{path}: longer than {MAX_BYTES} bytes")
    try:
        return _RESULT.validate_json(text)
    except ValidationError as error:
        if (made := otherwise(text)) is not None:
            return made
        kinds = f"no result of `amt bench`{f', {other}' if other else ''}"
        raise MetricsError(f"{path}: {kinds}: {first_problem(error)}") from None


def spread(values: Sequence[float]) -> Mapping[str, float | None]:
    """The lowest and the highest of several; nothing of a single one."""
    if len(values) < 2:
        return {"low": None, "high": None}
    return {"low": min(values), "high": max(values)}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(plain(cell).replace("|", "\\|") for cell in cells) + " |"
