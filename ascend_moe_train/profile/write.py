"""What our own run did in some steps, as a folder of tables that the readers here take. Pure.

A CPU has no device track. What computes is the graphs' time less that in which a step stood still for collectives.
"""

import csv
import io
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ascend_moe_train.parallel.comm import Group
from ascend_moe_train.parallel.spans import TimedCall
from ascend_moe_train.profile.communication import PAYLOAD
from ascend_moe_train.profile.find import OUTPUT, OWN
from ascend_moe_train.profile.groups import SIZES, hashed, is_p2p
from ascend_moe_train.profile.intervals import Intervals
from ascend_moe_train.profile.trace_view import COLLECTIVES, OVERLAP

KINDS: Mapping[str, str] = {
    "all_reduce": "allReduce",
    "all_gather": "allGather",
    "reduce_scatter": "reduceScatter",
    "all_to_all": "alltoall",
    "all_to_all_v": "alltoallv",
    "recv": "receive",
}
HOST = "Host"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Part of a step, in seconds of the capture's clock. `computes`: in a graph, else the host's own work."""

    name: str
    start_s: float
    end_s: float
    computes: bool


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Steps of one rank. `steps` are (number, start, end), `waits_s` when a step stood still for a collective, in
    seconds of one clock, whose zero was `zero_ns` after 1970. `axes` are this rank's groups along the axes of the
    mesh."""

    rank: int
    zero_ns: int
    steps: Sequence[tuple[int, float, float]]
    phases: Sequence[Phase]
    calls: Sequence[TimedCall]
    waits_s: Sequence[tuple[float, float]]
    axes: Mapping[str, tuple[int, ...]]

    def ns(self, seconds: float) -> int:
        """On the clock of the world."""
        return self.zero_ns + round(seconds * 1e9)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call, as files name it."""

    call: TimedCall
    step: int
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A stretch of a phase in which the step did not stand still."""

    name: str
    step: int
    start_ns: int
    end_ns: int


def write_capture(folder: Path, capture: Capture) -> Path:
    """Writes a folder of this rank inside `folder`, whole or not at all, and returns its path. Raises OSError."""
    stamp = datetime.fromtimestamp(capture.zero_ns / 1e9 + capture.steps[0][1], UTC).strftime("%Y%m%d%H%M%S%f")[:17]
    place = folder / f"rank_{capture.rank}_{stamp}_amt"
    aside = folder / f".{place.name}.tmp"
    (aside / OUTPUT).mkdir(parents=True)
    for name, text in _files(capture):
        (aside / name).write_text(text, encoding="utf-8")
    aside.replace(place)
    return place


def _files(capture: Capture) -> Iterator[tuple[str, str]]:
    """Names and contents."""
    calls = list(_named_calls(capture))
    rows = list(_computing_rows(capture))
    first, last = capture.steps[0][0], capture.steps[-1][0]
    yield f"profiler_info_{capture.rank}.json", json.dumps({OWN: f"steps {first} to {last} of a run on CPUs"})
    yield "profiler_metadata.json", json.dumps(_metadata(capture), indent=1)
    parts = list(_parts_us(capture, rows, calls))
    yield f"{OUTPUT}/step_trace_time.csv", _table(_STEP_COLUMNS, parts)
    yield f"{OUTPUT}/kernel_details.csv", _table(_KERNEL_COLUMNS, (_kernel_row(each) for each in rows))
    yield f"{OUTPUT}/communication.json", json.dumps(_communication(calls), indent=1)
    yield f"{OUTPUT}/communication_calls.csv", _table(_CALL_COLUMNS, (_call_row(each) for each in calls))
    yield f"{OUTPUT}/api_statistic.csv", _table(_HOST_COLUMNS, _host_rows(capture))
    yield f"{OUTPUT}/trace_view.json", json.dumps(list(_trace(capture, rows, calls)))


_STEP_COLUMNS = ("Step", "Computing", "Communication(Not Overlapped)", "Overlapped", "Communication", "Free")
_KERNEL_COLUMNS = ("Step ID", "Name", "Type", "Accelerator Core", "Start Time(us)", "Duration(us)")
_CALL_COLUMNS = ("Step ID", "Verb", "Group", "Content", "Payload(bytes)", "Start Time(us)", "Duration(us)")
_HOST_COLUMNS = ("Level", "API Name", "Time(us)", "Count", "Avg(us)", "Min(us)", "Max(us)")


def _step_at(capture: Capture, time_s: float) -> int | None:
    """The step in which something that starts then counts."""
    return next((number for number, start_s, end_s in capture.steps if start_s <= time_s < end_s), None)


def _named_calls(capture: Capture) -> Iterator[_Call]:
    """Calls in the order of their starts. The ranks of a group call in one order, so that names are the same on all of
    them; those of messages have the rank in them, since a rank's first one need not be its peer's first."""
    seen: Counter[tuple[int, str]] = Counter()
    for call in sorted(capture.calls, key=lambda each: each.start_s):
        step = _step_at(capture, call.start_s)
        if step is None:
            continue
        kind, group = KINDS.get(call.verb, call.verb), hashed(_key_of_call(call, capture.rank))
        place = capture.rank if is_p2p(kind) else 0
        name = f"hcom_{kind}__{group[-3:]}_{seen[step, group]}_{place}@{group}"
        seen[step, group] += 1
        yield _Call(call=call, step=step, name=name, start_ns=capture.ns(call.start_s), end_ns=capture.ns(call.end_s))


def _key(name: str, ranks: Iterable[int]) -> str:
    return f"{name}:{','.join(map(str, ranks))}"


def _key_of_call(call: TimedCall, rank: int) -> str:
    """The unique name of its group. Messages of a rank are a group of their own, as the ranks of a pipeline send
    different numbers of them."""
    key = _key(call.group.name, call.group.ranks)
    return f"{key}:messages of {rank}" if is_p2p(KINDS.get(call.verb, call.verb)) else key


def _metadata(capture: Capture) -> dict[str, Any]:
    """Groups that were used and those of the mesh, and the sizes of its axes."""
    used = {_key_of_call(call, capture.rank): (call.group.name, call.group.ranks) for call in capture.calls}
    of_mesh = {_key(axis, ranks): (axis, ranks) for axis, ranks in capture.axes.items() if len(ranks) > 1}
    groups = {
        key: {"group_name": name, "group_rank": ranks.index(capture.rank), "global_ranks": list(ranks)}
        for key, (name, ranks) in {**of_mesh, **used}.items()
    }
    sizes = {name: len(capture.axes[axis]) for name, axis in SIZES.items() if axis in capture.axes}
    return {"parallel_group_info": groups, "distributed_args": sizes}


def _computing_rows(capture: Capture) -> Iterator[_Row]:
    """What of the graphs' time is left where the step stood still for collectives."""
    waits = _union((capture.ns(start_s), capture.ns(end_s)) for start_s, end_s in capture.waits_s)
    for phase in capture.phases:
        step = _step_at(capture, phase.start_s)
        if not phase.computes or step is None:
            continue
        at_ns, end_ns = capture.ns(phase.start_s), capture.ns(phase.end_s)
        first, stop = np.searchsorted(waits.ends, at_ns, side="right"), np.searchsorted(waits.starts, end_ns)
        for wait in range(int(first), int(stop)):
            if waits.starts[wait] > at_ns:
                yield _Row(name=phase.name, step=step, start_ns=at_ns, end_ns=int(waits.starts[wait]))
            at_ns = int(waits.ends[wait])
        if at_ns < end_ns:
            yield _Row(name=phase.name, step=step, start_ns=at_ns, end_ns=end_ns)


def _union(pairs: Iterable[tuple[int, int]]) -> Intervals:
    listed = list(pairs)
    return Intervals.union(array("q", [start for start, _ in listed]), array("q", [end for _, end in listed]))


def _parts_us(capture: Capture, rows: Sequence[_Row], calls: Sequence[_Call]) -> Iterator[tuple[Any, ...]]:
    """Rows of step_trace_time.csv: exposed is what no graph computes beside, free is neither."""
    computing = _union((row.start_ns, row.end_ns) for row in rows)
    communication = _union((each.start_ns, each.end_ns) for each in calls)
    either = _union(chain(_pairs(computing), _pairs(communication)))
    for number, start_s, end_s in capture.steps:
        window = np.array([capture.ns(start_s)]), np.array([capture.ns(end_s)])
        used, moved, busy = (int(each.common_ns(*window)[0]) for each in (computing, communication, either))
        length = int(window[1][0] - window[0][0])
        yield (number, *(ns / 1e3 for ns in (used, busy - used, used + moved - busy, moved, length - busy)))


def _pairs(intervals: Intervals) -> Iterator[tuple[int, int]]:
    return zip(intervals.starts.tolist(), intervals.ends.tolist(), strict=True)


def _kernel_row(row: _Row) -> tuple[Any, ...]:
    return row.step, row.name, row.name, "CPU", _us(row.start_ns), (row.end_ns - row.start_ns) / 1e3


def _call_row(each: _Call) -> tuple[Any, ...]:
    call, group = each.call, each.call.group
    duration_us = (each.end_ns - each.start_ns) / 1e3
    return each.step, call.verb, group.name, group.content, call.payload_bytes, _us(each.start_ns), duration_us


def _us(ns: int) -> str:
    """Exact: a double has no nanoseconds left beside 1970."""
    return f"{ns // 1000}.{ns % 1000:03}"


def _communication(calls: Sequence[_Call]) -> dict[str, Any]:
    """What communication.json holds, without parts of a call's time: nobody measured them."""
    steps: dict[str, dict[str, Any]] = {}
    for each in calls:
        buckets = steps.setdefault(f"step{each.step}", {"p2p": {}, "collective": {}})
        kind = KINDS.get(each.call.verb, each.call.verb)
        buckets["p2p" if is_p2p(kind) else "collective"][each.name] = {
            "Communication Time Info": {
                "Start Timestamp(us)": each.start_ns / 1e3,
                "Elapse Time(ms)": (each.end_ns - each.start_ns) / 1e6,
            },
            "Communication Bandwidth Info": {PAYLOAD: {"Transit Size(MB)": each.call.payload_bytes / 1e6}},
        }
    return steps


def _host_rows(capture: Capture) -> Iterator[tuple[Any, ...]]:
    """What the host did beside the graphs, added up by name."""
    times: dict[str, list[float]] = {}
    for phase in capture.phases:
        if not phase.computes:
            times.setdefault(phase.name, []).append((phase.end_s - phase.start_s) * 1e6)
    for name, each in times.items():
        yield "host", name, sum(each), len(each), sum(each) / len(each), min(each), max(each)


def _trace(capture: Capture, rows: Sequence[_Row], calls: Sequence[_Call]) -> Iterator[dict[str, Any]]:
    """Steps and phases, collectives by group, and what computes, for Perfetto."""
    for number, name in enumerate((HOST, COLLECTIVES[1], OVERLAP)):
        yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
    for step, start_s, end_s in capture.steps:
        yield _event(f"ProfilerStep#{step}", (0, 0), capture.ns(start_s), capture.ns(end_s))
    for phase in capture.phases:
        yield _event(phase.name, (0, 1), capture.ns(phase.start_s), capture.ns(phase.end_s))
    threads: dict[Group, int] = {}
    for each in calls:
        group = each.call.group.carrying("other")
        if group not in threads:
            threads[group] = len(threads)
            label = {"name": f"Group {group.name} Communication"}
            yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": threads[group], "args": label}
        event = _event(each.name, (1, threads[group]), each.start_ns, each.end_ns)
        yield {**event, "args": {"content": each.call.group.content, "payload_bytes": each.call.payload_bytes}}
    for row in rows:
        yield _event("Computing", (2, 0), row.start_ns, row.end_ns)


def _event(name: str, track: tuple[int, int], start_ns: int, end_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": track[0],
        "tid": track[1],
        "ts": _us(start_ns),
        "dur": (end_ns - start_ns) / 1e3,
    }


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
