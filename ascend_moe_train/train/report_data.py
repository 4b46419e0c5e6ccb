"""The metrics of a run, thinned to what a page can show. Pure.

Shape letters: L MoE layers, E experts, P points of a curve, W columns of the heat map.
"""

import base64
import itertools
import math
import warnings
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.parallel.spans import CommTotal
from ascend_moe_train.train.metrics import EvalRecord, Load, StepRecord, read_records

MAX_POINTS = 800
MAX_MARKS = 400
MAX_COLUMNS = 320
MAX_CELLS = 2**21
MAX_KINDS = 1000

# A heat map cell is one byte: 0 no assignment at all, 1..255 the share over 1/E on a log2 scale of +-HEAT_OCTAVES.
HEAT_OCTAVES = 4.0

Floats = NDArray[np.float64]
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

STEP_SERIES = (
    "loss",
    "loss_smooth",
    "aux_loss",
    "z_loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "model_flops_per_s",
    "mfu",
    "loss_scale",
    "drop_rate",
    "memory_bytes",
    "comm_s",
    "comm_exposed_s",
    "comm_bytes",
)
LAYER_SERIES = ("load_cv", "load_max_over_mean", "dead_experts")


@dataclass(kw_only=True)
class CommSum:
    """What collectives of a kind took and moved in the `steps` that had some."""

    steps: int = 0
    calls: int = 0
    payload_bytes: int = 0
    total_s: float = 0.0
    exposed_s: float = 0.0

    def add(self, one: CommTotal) -> None:
        """Takes in those of one step."""
        self.steps += 1
        self.calls += one.calls
        self.payload_bytes += one.payload_bytes
        self.total_s += one.total_s
        self.exposed_s += math.nan if one.exposed_s is None else one.exposed_s


@dataclass(kw_only=True)
class RunData:
    """All scalars of a run (NaN where unknown), the heat map, and its totals. `comm` is by content, verb and group."""

    step: "array[int]" = field(default_factory=lambda: array("q"))
    columns: "dict[str, array[float]]" = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    evals: list[EvalRecord] = field(default_factory=list)
    heat: "HeatBins | None" = None
    tokens: int = 0
    seconds: float = 0.0
    num_layers: int = 0
    comm: dict[tuple[str, str, str], CommSum] = field(default_factory=dict)

    def column(self, name: str) -> Floats:
        """One scalar over all steps."""
        return np.array(self.columns.get(name, ()), np.float64)

    def add(self, record: StepRecord) -> None:
        """Takes in one step."""
        self.step.append(record.step)
        for name in STEP_SERIES:
            value = getattr(record, name)
            self._append(name, math.nan if value is None else value)
        for name in LAYER_SERIES:
            values = [value for value in getattr(record, name) if math.isfinite(value)] or [math.nan]
            self._append(name, math.fsum(values) / len(values))
            self._append(f"{name}_low", min(values))
            self._append(f"{name}_high", max(values))
        if record.skipped:
            self.skipped.append(record.step)
        self.tokens += record.tokens
        self.seconds += record.step_s if math.isfinite(record.step_s) else 0.0
        self.num_layers = max(self.num_layers, len(record.load_cv))
        for each in record.comm:
            key = each.content, each.verb, each.group
            if key in self.comm or len(self.comm) < MAX_KINDS:
                self.comm.setdefault(key, CommSum()).add(each)
        if record.load:
            self.heat = self.heat or HeatBins(num_layers=len(record.load), num_experts=len(record.load[0]))
            self.heat.add(record.step, record.load)

    def _append(self, name: str, value: float) -> None:
        self.columns.setdefault(name, array("d")).append(value)


class HeatBins:
    """Mean load over ranges of steps. The ranges double whenever there are too many, so a run of any length fits."""

    def __init__(self, *, num_layers: int, num_experts: int) -> None:
        self.num_layers, self.num_experts = num_layers, num_experts
        self._max_columns = min(max(MAX_CELLS // (num_layers * num_experts), 8), MAX_COLUMNS) // 2 * 2
        self._sums: list[Floats] = []
        self._counts: list[int] = []
        self._first: list[int] = []
        self._last: list[int] = []
        self._per_column = 1

    def add(self, step: int, load: Load) -> None:
        """Takes in one step's shares [L, E]."""
        if self._counts and self._counts[-1] < self._per_column:
            self._sums[-1] += np.array(load)
            self._counts[-1] += 1
            self._last[-1] = step
            return
        if len(self._counts) == self._max_columns:
            self._merge_pairs()
        self._sums.append(np.array(load, np.float64))
        self._counts.append(1)
        self._first.append(step)
        self._last.append(step)

    def _merge_pairs(self) -> None:
        self._sums = [left + right for left, right in zip(self._sums[::2], self._sums[1::2], strict=True)]
        self._counts = [left + right for left, right in zip(self._counts[::2], self._counts[1::2], strict=True)]
        self._first, self._last = self._first[::2], self._last[1::2]
        self._per_column *= 2

    def to_json(self) -> Json:
        """Steps of each column and base64 of the cells [L, E, W], one byte each."""
        share_WLE = np.stack(self._sums) / np.array(self._counts)[:, None, None]
        with np.errstate(divide="ignore"):
            octaves_WLE = np.log2(share_WLE * self.num_experts)
        level_WLE = np.clip(np.round(octaves_WLE / HEAT_OCTAVES * 127), -127, 127) + 128
        cells_WLE = np.where(share_WLE > 0, level_WLE, 0).astype(np.uint8)
        return {
            "layers": self.num_layers,
            "experts": self.num_experts,
            "octaves": HEAT_OCTAVES,
            "first": list(self._first),
            "last": list(self._last),
            "cells": base64.b64encode(np.ascontiguousarray(cells_WLE.transpose(1, 2, 0)).tobytes()).decode(),
        }


def read_run(path: Path) -> RunData:
    """Reads a metrics file. Raises MetricsError."""
    data = RunData()
    for record in read_records(path):
        if isinstance(record, StepRecord):
            data.add(record)
        else:
            data.evals.append(record)
    return data


def series_json(data: RunData) -> dict[str, Json]:
    """Every curve by name; those without a finite value are left out."""
    step = np.array(data.step, np.int64)
    curves: dict[str, Json] = {}
    for name in STEP_SERIES:
        value = data.column(name)
        curves[name] = thin(step, value, value, value)
    for name in LAYER_SERIES if data.num_layers else ():
        curves[name] = thin(step, data.column(name), data.column(f"{name}_low"), data.column(f"{name}_high"))
    if not data.num_layers:
        del curves["drop_rate"], curves["aux_loss"], curves["z_loss"]
    eval_step = np.array([record.step for record in data.evals], np.int64)
    for name in ("loss", "perplexity", "bits_per_byte"):
        values = [getattr(record, name) for record in data.evals]
        value = np.array([math.nan if value is None else value for value in values], np.float64)
        curves[f"eval_{name}"] = thin(eval_step, value, value, value)
    return {name: curve for name, curve in curves.items() if curve is not None}


def thin(step_P: NDArray[np.int64], value_P: Floats, low_P: Floats, high_P: Floats) -> Json:
    """At most MAX_POINTS points: the mean of each range of steps, with the lowest and highest value in it.

    A point that is not finite becomes null; ranges skip such values. None when nothing is finite. `low` and `high`
    are left out where they equal the value everywhere.
    """
    value_P, low_P, high_P = (np.where(np.isfinite(column), column, math.nan) for column in (value_P, low_P, high_P))
    if np.isnan(value_P).all():
        return None
    if len(step_P) > MAX_POINTS:
        edges = np.linspace(0, len(step_P), MAX_POINTS + 1).astype(np.int64)
        ranges = [slice(start, stop) for start, stop in itertools.pairwise(edges.tolist())]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mean of empty slice|All-NaN slice", RuntimeWarning)
            value_P, low_P, high_P = (
                np.array([reduce(column[where]) for where in ranges])
                for reduce, column in ((np.nanmean, value_P), (np.nanmin, low_P), (np.nanmax, high_P))
            )
        ends = step_P[[0, -1]]
        step_P = np.array([step_P[where].mean() for where in ranges]).round().astype(np.int64)
        step_P[[0, -1]] = ends
    curve: dict[str, Json] = {"step": step_P.tolist(), "value": _rounded(value_P)}
    if not (np.array_equal(low_P, value_P, equal_nan=True) and np.array_equal(high_P, value_P, equal_nan=True)):
        curve |= {"low": _rounded(low_P), "high": _rounded(high_P)}
    return curve


def _rounded(value_P: Floats) -> list[Json]:
    """Six significant digits are more than any screen shows."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in value_P.tolist()]


def skipped_json(data: RunData) -> Json:
    """The skipped steps, evenly thinned when there are too many to mark."""
    every = math.ceil(len(data.skipped) / MAX_MARKS) or 1
    return list(data.skipped[::every])
