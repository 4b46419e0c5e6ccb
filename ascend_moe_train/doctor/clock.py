"""The times in log lines: many forms, some without a date, on one scale of seconds. Pure.

Times are read as they are written, without a time zone: seconds since 1970 as if all were UTC.
"""

import calendar
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

DAY_S = 86_400
LOOK_CHARS = 400  # a line's time stands near its beginning

_MONTHS = {name: number for number, name in enumerate(calendar.month_abbr) if name}
_NAME = "|".join(_MONTHS)
_CLOCK = r"(?P<h>[0-2]\d):(?P<m>[0-5]\d):(?P<s>[0-6]\d)"
_PART = r"(?:[.,](?P<f>\d{1,9})(?:\.(?P<g>\d{1,3}))?)?"
_FULL = re.compile(rf"(?P<y>20\d\d)[-/](?P<mo>[01]\d)[-/](?P<d>[0-3]\d)[-_ T]{_CLOCK}{_PART}")
_CTIME = re.compile(rf"(?P<n>{_NAME}) {{1,2}}(?P<d>\d{{1,2}}) {_CLOCK}{_PART} (?P<y>20\d\d)")
_SYSLOG = re.compile(rf"(?P<n>{_NAME}) {{1,2}}(?P<d>\d{{1,2}}) {_CLOCK}{_PART}")
_GLOG = re.compile(rf"[EWIF](?P<mo>\d{{1,2}})(?P<d>[0-3]\d) {_CLOCK}{_PART}")
_BARE = re.compile(rf"[\[(]?{_CLOCK}{_PART}(?=[\s\])]|$)")
_KERNEL = re.compile(r"(?:kernel: )?\[ {0,8}(?P<up>\d{1,9}\.\d{6})\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A time as a line has it: seconds since 1970, into an unknown year, into a day, or since a host's start."""

    kind: Literal["full", "year", "day", "up"]
    seconds: float


def moment_of(line: str) -> Moment | None:
    """The first time in a line; None if it has none."""
    head = line[:LOOK_CHARS]
    if ":" not in head and "[" not in head:
        return None
    if (found := _FULL.search(head) or _CTIME.search(head)) is not None:
        return _moment("full", found, year=int(found["y"]))
    if (found := _SYSLOG.search(head) or _GLOG.search(head)) is not None:
        return _moment("year", found, year=1972)
    if (found := _BARE.match(head)) is not None:
        return Moment(kind="day", seconds=_seconds(found))
    if (found := _KERNEL.search(head)) is not None:
        return Moment(kind="up", seconds=float(found["up"]))
    return None


def _moment(kind: Literal["full", "year"], found: re.Match[str], year: int) -> Moment | None:
    names = found.groupdict()
    month = _MONTHS[names["n"]] if names.get("n") else int(names["mo"])
    if not 1 <= month <= 12 or not 1 <= int(names["d"]) <= 31:
        return None
    days = calendar.timegm((year, month, int(names["d"]), 0, 0, 0))
    return Moment(kind=kind, seconds=days + _seconds(found))


def _seconds(found: re.Match[str]) -> float:
    """Seconds of the day. `.624.966` is milliseconds and microseconds, of which zeros at the front may be missing."""
    names = found.groupdict()
    whole = int(names["h"]) * 3600 + int(names["m"]) * 60 + int(names["s"])
    if not names["f"]:
        return float(whole)
    if names["g"]:
        return whole + int(names["f"]) / 1e3 + int(names["g"]) / 1e6
    return whole + float(f"0.{names['f']}")


def common_day(moments: Sequence[Moment]) -> float | None:
    """A time near which all happened: the middle of those that are whole; None if none is."""
    whole = [moment.seconds for moment in moments if moment.kind == "full"]
    return median(whole) if whole else None


def on_one_scale(moment: Moment, near_s: float | None) -> float | None:
    """Seconds of a moment, with what it does not say taken from `near_s`; None where nothing tells.

    Without any whole time, times of a day are seconds of that day, those without a year are of 1972.
    """
    if moment.kind == "full":
        return moment.seconds
    if moment.kind == "up":
        return None
    if near_s is None:
        return moment.seconds
    if moment.kind == "day":
        days = [near_s // DAY_S + shift for shift in (-1, 0, 1)]
        return min((day * DAY_S + moment.seconds for day in days), key=lambda each: abs(each - near_s))
    return min((_in_year(moment.seconds, year) for year in _years(near_s)), key=lambda each: abs(each - near_s))


def _years(near_s: float) -> range:
    year = time.gmtime(near_s).tm_year
    return range(year - 1, year + 2)


def _in_year(seconds: float, year: int) -> float:
    """A time of 1972 in another year."""
    _, month, day, *_ = time.gmtime(seconds)
    return calendar.timegm((year, month, day, 0, 0, 0)) + seconds % DAY_S


def shown_time(at_s: float) -> str:
    """Such as `2026-11-29 16:09:01`; without a date where none is known."""
    if at_s < 3 * 366 * DAY_S:
        return time.strftime("%H:%M:%S" if at_s < DAY_S else "%m-%d %H:%M:%S", time.gmtime(at_s))
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_s))
