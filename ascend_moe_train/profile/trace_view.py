"""What a trace says beside the tables: overlap, collectives, cache counters, launches. Pure."""

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ascend_moe_train.errors import ProfileError
from ascend_moe_train.profile.intervals import Intervals
from ascend_moe_train.profile.kernels import Kernels
from ascend_moe_train.profile.tables import Cache, Launch
from ascend_moe_train.profile.text import MAX_US
from ascend_moe_train.profile.trace_stream import events

HARDWARE, OVERLAP, LLC = "Ascend Hardware", "Overlap Analysis", "LLC"
DEVICE = (HARDWARE, "Step Trace")
COLLECTIVES = ("HCCL", "Communication")
MAX_CALLS = 200_000
MAX_COUNTERS = 1000
NO_KERNELS = ("Step Trace", "Model")


@dataclass
class Trace:
    """What was collected of one or several files of a rank. Times are nanoseconds."""

    path: Path
    pairs: dict[str, tuple["array[int]", "array[int]"]] = field(default_factory=dict)
    parts_us: Counter[str] = field(default_factory=Counter)
    collectives: list[tuple[str, int, float]] = field(default_factory=list)
    kernels: Kernels = field(default_factory=Kernels)
    hits: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    loads: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    launched: tuple["array[int]", "array[int]"] = field(default_factory=lambda: (array("q"), array("q")))
    steps: list[tuple[str, int, int]] = field(default_factory=list)
    iterations_us: dict[int, float] = field(default_factory=dict)

    def computing(self) -> Intervals:
        """The intervals called Computing on the overlap track; without it, those of the kernels."""
        return Intervals.union(*self.pairs.get("Computing", (self.kernels.starts, self.kernels.ends)))

    def communication(self) -> Intervals:
        """The intervals of the collectives."""
        starts = array("q", [start_ns for _, start_ns, _ in self.collectives])
        ends = array("q", [start_ns + round(us * 1000) for _, start_ns, us in self.collectives])
        return Intervals.union(starts, ends)


def read_trace(path: Path) -> Trace:
    """Goes through the whole file once. Raises ProfileError."""
    trace = Trace(path)
    processes: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], str] = {}
    for number, event in enumerate(events(path), 1):
        try:
            phase = event.get("ph")
            if phase == "X":
                _complete(trace, event, processes, threads)
            elif phase == "C":
                _counter(trace, event, processes)
            elif phase in ("s", "f", "t"):
                _flow(trace, event, processes)
            elif phase == "M":
                _named(event, processes, threads)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
            name = str(event.get("name", ""))[:40]
            raise ProfileError(f"{path}: event {number} ({name!r}) has fields that cannot be") from None
    return trace


def to_ns(value: Any) -> int:
    """A time stamp in microseconds, as text or as a number, in nanoseconds. Raises ValueError."""
    if isinstance(value, str):
        whole, _, part = value.strip().partition(".")
        found = int(whole) * 1000 + int((part + "000")[:3])
    elif isinstance(value, bool):
        raise ValueError("no time stamp")
    else:
        found = int(value) * 1000 + round((value - int(value)) * 1000)
    if not 0 <= found < 2**62:
        raise ValueError("no time stamp")
    return found


def _duration_us(event: Mapping[str, Any]) -> float:
    value = float(event.get("dur", 0.0))
    if not 0 <= value < MAX_US:
        raise ValueError("no duration")
    return value


def _named(event: Mapping[str, Any], processes: dict[Any, str], threads: dict[tuple[Any, Any], str]) -> None:
    if event.get("name") == "process_name":
        processes[event.get("pid")] = str(event["args"]["name"])
    elif event.get("name") == "thread_name":
        threads[event.get("pid"), event.get("tid")] = str(event["args"]["name"])


def _complete(
    trace: Trace, event: Mapping[str, Any], processes: Mapping[Any, str], threads: Mapping[tuple[Any, Any], str]
) -> None:
    name, pid = event.get("name", ""), event.get("pid")
    process = processes.get(pid, "")
    if process == OVERLAP:
        start_ns, duration_us = to_ns(event["ts"]), _duration_us(event)
        starts, ends = trace.pairs.setdefault(str(name), (array("q"), array("q")))
        starts.append(start_ns)
        ends.append(start_ns + round(duration_us * 1000))
        trace.parts_us[str(name)] += duration_us  # type: ignore[assignment]  # a Counter of floats
    elif process in COLLECTIVES:
        thread = threads.get((pid, event.get("tid")), "")
        if _is_collective(str(name), thread):
            trace.collectives.append((str(name), to_ns(event["ts"]), _duration_us(event)))
    elif process in DEVICE:
        thread = threads.get((pid, event.get("tid")), "")
        arguments = event.get("args") or {}
        if thread.startswith(NO_KERNELS):
            _iteration(trace, str(name), event, arguments)
        else:
            _kernel(trace.kernels, str(name), event)
    elif isinstance(name, str) and name.startswith("ProfilerStep#"):
        start_ns = to_ns(event["ts"])
        trace.steps.append((name.removeprefix("ProfilerStep#"), start_ns, start_ns + round(_duration_us(event) * 1000)))


def _kernel(kernels: Kernels, name: str, event: Mapping[str, Any]) -> None:
    """A task of the device. Its type is in its name, as in `Default/network/MatMul-op3`; else the name is."""
    kind = name.rpartition("/")[2]
    kernels.add((kind.partition("-op")[0], "", "", ""), name, to_ns(event["ts"]), _duration_us(event))


def _is_collective(name: str, thread: str) -> bool:
    return not thread.startswith("Plane") and (thread.endswith("Communication") or "hcom_" in name or "-op" in name)


def _iteration(trace: Trace, name: str, event: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    if name.startswith("Iteration ") and "Iteration Time(ns)" in arguments:
        time_us = float(arguments["Iteration Time(ns)"]) / 1e3
        if not 0 <= time_us < MAX_US:
            raise ValueError("no duration")
        trace.iterations_us[int(arguments["Iteration ID"])] = time_us


def _counter(trace: Trace, event: Mapping[str, Any], processes: Mapping[Any, str]) -> None:
    if processes.get(event.get("pid")) != LLC:
        return
    track, _, what = str(event.get("name", "")).rpartition("/")
    table = trace.hits if what == "Hit Rate" else trace.loads if what == "Throughput" else None
    if table is None or (track not in table and len(table) >= MAX_COUNTERS):
        return
    value = float(next(iter(event["args"].values())))
    if not 0 <= value < 1e12:
        raise ValueError("no counter")
    table.setdefault(track, []).append((to_ns(event["ts"]), value))


def _flow(trace: Trace, event: Mapping[str, Any], processes: Mapping[Any, str]) -> None:
    """From the host's launch to the device's start; both have an id."""
    if event.get("cat") != "HostToDevice":
        return
    key, at_ns = str(event["id"]), to_ns(event["ts"])
    if event["ph"] == "s":
        if len(trace.launches) < MAX_CALLS:
            trace.launches[key] = at_ns
    elif processes.get(event.get("pid")) == HARDWARE:
        launched_ns = trace.launches.pop(key, None)
        if launched_ns is not None:
            trace.launched[0].append(launched_ns)
            trace.launched[1].append(at_ns)


def caches_of(trace: Trace) -> tuple[Cache, ...]:
    """Last-level cache by counter. The json has fractions though its argument is called a percentage."""
    found = []
    for track, samples in sorted(trace.hits.items()):
        values = np.array([value for _, value in samples])
        if values.max() > 1.5:
            values = values / 100
        loads = dict(trace.loads.get(track, []))
        weights = np.array([loads.get(at_ns, 0.0) for at_ns, _ in samples])
        found.append(
            Cache(
                kind=track,
                samples=len(values),
                mean=float(values.mean()),
                low=float(values.min()),
                high=float(values.max()),
                weighted=float((values * weights).sum() / weights.sum()) if weights.sum() > 0 else None,
                source=trace.path.name,
            )
        )
    return tuple(found)


def launch_of(trace: Trace, busy: Intervals) -> Launch | None:
    """Of the gaps in which the device did nothing: those that ended with a kernel which the host had not yet launched
    when the gap began, from then to its launch."""
    if not trace.launched[0] or len(busy.starts) < 2:
        return None
    order = np.argsort(np.frombuffer(trace.launched[1], np.int64), kind="stable")
    launched = np.frombuffer(trace.launched[0], np.int64)[order]
    started = np.frombuffer(trace.launched[1], np.int64)[order]
    gap_starts, gap_ends = busy.ends[:-1], busy.starts[1:]
    nearest = np.searchsorted(started, gap_ends - 1000)
    is_known = (nearest < len(started)) & (np.abs(started[np.minimum(nearest, len(started) - 1)] - gap_ends) <= 1000)
    launch = launched[np.minimum(nearest, len(started) - 1)]
    bound = np.where(is_known, np.clip(np.minimum(launch, gap_ends) - gap_starts, 0, None), 0)
    return Launch(
        kernels=len(started),
        gaps_us=float((gap_ends - gap_starts).sum()) / 1e3,
        host_bound_us=float(bound.sum()) / 1e3,
        delay_us=float(np.median(started - launched)) / 1e3,
        source=trace.path.name,
    )
