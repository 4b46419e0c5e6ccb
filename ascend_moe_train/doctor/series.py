"""Figures of steps as they follow each other: from a run's metrics.jsonl, or from lines of a log. Pure."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe_train.doctor.event import Scanned
from ascend_moe_train.doctor.reading import METRICS_NAME
from ascend_moe_train.plain_text import plain

MAX_LINE_BYTES = 4 * 2**20
MAX_ROWS = 200_000
MAX_STEP = 10**12

_PLAIN = ("loss", "aux_loss", "grad_norm", "lr", "step_s", "loss_scale", "drop_rate", "memory_bytes", "skipped")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step: figures by name, NaN where they were not finite; `line` is where it stands."""

    step: int
    figures: Mapping[str, float]
    line: int = 0


@dataclass(frozen=True, kw_only=True)
class Series:
    """Steps of one source in their order, each once; of a rank, if it is known whose they are."""

    source: str
    rows: Sequence[Row]
    rank: int | None = None


def run_series(paths: Iterable[Path]) -> list[Series]:
    """The metrics of runs at or below the paths."""
    found = []
    for path in paths:
        files = sorted(path.rglob(METRICS_NAME)) if path.is_dir() else [path] if path.name == METRICS_NAME else []
        found += [Series(source=plain(str(file)), rows=read_rows(file)) for file in files if file.is_file()]
    return [series for series in found if series.rows]


def read_rows(path: Path) -> list[Row]:
    """Records of steps; lines that are none are passed over. A step that was taken again counts as it was last."""
    rows: dict[int, Row] = {}
    with path.open("rb") as file:
        number = 0
        while (raw := file.readline(MAX_LINE_BYTES)) and len(rows) < MAX_ROWS:
            number += raw.endswith(b"\n")
            if (row := _row(raw, number)) is not None:
                rows[row.step] = row
    return [rows[step] for step in sorted(rows)]


def _row(raw: bytes, number: int) -> Row | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("kind") != "step" or type(record.get("step")) is not int:
        return None
    if not 0 <= record["step"] <= MAX_STEP:
        return None
    figures = {name: value for name in _PLAIN if name in record and (value := _number(record[name])) is not None}
    for name in ("load_cv", "dead_experts"):
        layers = record.get(name)
        for layer, value in enumerate(layers if isinstance(layers, list) else ()):
            if (number_of := _number(value)) is not None:
                figures[f"{name}.{layer}"] = number_of
    return Row(step=record["step"], figures=figures, line=number)


def _number(value: Any) -> float | None:
    """A figure; NaN for null, which stands for what is not finite, and for what no float holds."""
    if value is None:
        return math.nan
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return math.nan


def log_series(sources: Iterable[Scanned], ranks: Mapping[str, int | None]) -> list[Series]:
    """The figures that logs of MindFormers, Megatron and the like print for steps; of a launcher that repeats what its
    ranks print, only where there are no logs of ranks."""
    found = []
    every = list(sources)
    has_ranks = any(source.losses and ranks.get(source.name) is not None for source in every)
    for source in every:
        if has_ranks and source.actor.part == "launcher":
            continue
        rows: dict[int, Row] = {}
        for step, line, figures in source.losses:
            rows[step] = Row(step=step, figures=_scaled(figures), line=line)
        if rows:
            found.append(
                Series(source=source.name, rows=[rows[step] for step in sorted(rows)], rank=ranks.get(source.name))
            )
    return found


def _scaled(figures: Mapping[str, float]) -> dict[str, float]:
    """Times in seconds."""
    scaled = dict(figures)
    if "step_ms" in scaled:
        scaled["step_s"] = scaled.pop("step_ms") / 1000
    return scaled
