"""Results in words: one line of the screen, the JSON that is attached to a report. Pure."""

import math
import time
from dataclasses import asdict
from typing import Any

from ascend_moe_train.selftest.results import Result, counts
from ascend_moe_train.selftest.suite import Report
from ascend_moe_train.train.run_info import versions
from ascend_moe_train.units import format_bytes, format_count, format_seconds

FORMAT = 1
# What of a check's figures is shown where there is room for little.
SHORT = ("error", "ratio", "largest difference", "cases")


def line(result: Result) -> str:
    """One check on the screen."""
    said = result.detail or short_figures(result)
    took = format_seconds(result.took_s) if result.took_s else ""
    return f"{result.status:<8} {result.part:<32} {result.name:<34} {took:>7}  {said}".rstrip()


def short_figures(result: Result) -> str:
    """The figures that tell most."""
    return ", ".join(f"{name} {shown(name, result.figures[name])}" for name in SHORT if name in result.figures)


def shown(name: str, value: float | str | None) -> str:
    """A figure for people; its name ends with the unit."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if name.endswith(", s"):
        return format_seconds(value)
    if name.endswith(", bytes"):
        return format_bytes(value)
    if name in ("cases", "devices"):
        return f"{value:.0f}"
    if name == "tokens/s":
        return format_count(value)
    if value == 0:
        return "0"
    return f"{value:.2f}" if name == "ratio" else f"{value:.1e}"


def verdict(report: Report) -> str:
    """All in a few words."""
    found = counts(report.results)
    words = ", ".join(f"{number} {status}" for status, number in found.items())
    stopped = f"stopped by {report.stopped_by}" if report.stopped_by else "not finished"
    return words if report.is_finished else f"{words}, {stopped}"


def as_json(report: Report) -> dict[str, Any]:
    """The report for machines; a figure that is no number is null."""
    return {
        "format": FORMAT,
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "passed": report.has_passed,
        "finished": report.is_finished,
        "counts": counts(report.results),
        "stopped_by": report.stopped_by,
        "took_s": report.took_s,
        "asked": asdict(report.asked),
        "machine": report.machine,
        "versions": versions(),
        "results": [_finite(asdict(each)) for each in report.results],
    }


def _finite(result: dict[str, Any]) -> dict[str, Any]:
    figures = {name: None if _is_odd(value) else value for name, value in result["figures"].items()}
    return result | {"figures": figures}


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
