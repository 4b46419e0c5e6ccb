"""Everything of one rank, from whatever its folder has. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ascend_moe_train.profile.communication import read_communication, read_matrix
from ascend_moe_train.profile.database import Database, opened
from ascend_moe_train.profile.find import Source
from ascend_moe_train.profile.groups import groups_of, sizes_of
from ascend_moe_train.profile.intervals import Intervals
from ascend_moe_train.profile.kernels import Kernels, check_sums, plain_kind, read_kernels
from ascend_moe_train.profile.memory import peak_ns, read_memory, read_owners
from ascend_moe_train.profile.older import (
    pooled_cache,
    read_iterations,
    read_mindspore_1,
    read_opprof,
    step_of_trace,
)
from ascend_moe_train.profile.settings import level_of, metrics_of, versions_of
from ascend_moe_train.profile.spans import lane_of, spans_of
from ascend_moe_train.profile.statistics import read_host, read_l2, read_operators
from ascend_moe_train.profile.steps import read_step_trace, step_of_kernels
from ascend_moe_train.profile.tables import Cache, Collective, Launch, Link, Memory, Rank, Step
from ascend_moe_train.profile.trace_view import Trace, caches_of, launch_of, read_trace

MAX_COLLECTIVES = 200_000
WHOLE_SHARE = 0.98  # kernels that cover less of the computing time that the steps have are not all of them


@dataclass
class _Found:
    """What has been read so far."""

    kernels: Kernels = field(default_factory=Kernels)
    steps: list[Step] = field(default_factory=list)
    iterations_us: list[float] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    memory: tuple[Memory, ...] = ()
    trace: Trace | None = None
    launch: Launch | None = None
    written: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_rank(source: Source) -> Rank:
    """Reads all files of a source. Raises ProfileError naming file, row and column of what cannot be."""
    if source.writer == "MindSpore 1.x":
        return read_mindspore_1(source)
    if source.writer == "msprof op":
        return read_opprof(source)
    found = _Found()
    _read_kernels(source, found)
    _read_traces(source, found)
    _read_steps(source, found)
    _read_communication(source, found)
    _read_databases(source, found)
    _fill_up(found)
    return _rank(source, found)


def _read_kernels(source: Source, found: _Found) -> None:
    if paths := source.files.get("kernels"):
        read_kernels(paths, found.kernels, source.device)
        check_sums(found.kernels, paths[0])
        found.sources["kernels"] = paths[0].name
        _keep_counters(found, paths[0].name)


def _keep_counters(found: _Found, name: str) -> None:
    kernels = found.kernels
    cache = pooled_cache(kernels.cache_hits, kernels.cache_misses, kernels.rows, name)
    if cache is not None:
        found.caches.append(cache)


def _read_traces(source: Source, found: _Found) -> None:
    if source.writer == "msprof, per iteration":
        found.steps, found.iterations_us, kernels, found.trace = read_iterations(source)
        found.sources["steps"] = "msprof_*.json: Overlap Analysis, one for each iteration"
        if not found.kernels.rows:
            found.kernels = kernels
            found.sources["kernels"] = "msprof_*.json: Ascend Hardware"
        return
    for path in source.files.get("trace", ()):
        found.trace = read_trace(path)
        found.caches += caches_of(found.trace)
        found.launch = launch_of(found.trace, _busy(found)) or found.launch
        if not found.kernels.rows:
            found.kernels.take(found.trace.kernels)
            found.sources["kernels"] = f"{path.name}: Ascend Hardware"
    for path in source.files.get("iterations", ()):
        if path.name.partition(".")[2].startswith("json"):
            times = read_trace(path).iterations_us
            found.iterations_us = [times[place] for place in sorted(times)]
            found.sources["iterations"] = path.name


def _busy(found: _Found) -> Intervals:
    kernels = found.kernels
    if kernels.starts or kernels.comm_starts:
        return Intervals.union(kernels.starts + kernels.comm_starts, kernels.ends + kernels.comm_ends)
    assert found.trace is not None
    return found.trace.computing()


def _read_steps(source: Source, found: _Found) -> None:
    for path in source.files.get("steps", ()):
        found.steps += read_step_trace(path, source.device)
        found.sources["steps"] = path.name


def _read_communication(source: Source, found: _Found) -> None:
    for path in source.files.get("communication", ()):
        found.collectives += read_communication(path)
        found.sources["collectives"] = path.name
    for path in source.files.get("matrix", ()):
        found.links += read_matrix(path)
        found.sources["links"] = path.name
    for path in source.files.get("memory", ()):
        found.memory = read_memory(path, source.device)
        found.sources["memory"] = path.name


def _read_databases(source: Source, found: _Found) -> None:
    """Text first: what is there is not read again from a database beside it."""
    for path in (*source.files.get("database", ()), *source.files.get("collectives_database", ())):
        with opened(path) as database:
            _read_database(database, found)


def _read_database(database: Database, found: _Found) -> None:
    name = database.path.name
    if not found.steps and database.has("StepTraceTime"):
        found.steps = database.steps()
        found.sources["steps"] = f"{name}: StepTraceTime"
    if not found.kernels.rows and database.has("COMPUTE_TASK_INFO", "TASK", "STRING_IDS"):
        database.read_kernels(found.kernels)
        found.sources["kernels"] = f"{name}: TASK"
    if not found.collectives and database.has("CommAnalyzerTime"):
        found.collectives = database.collectives()
        found.sources["collectives"] = f"{name}: CommAnalyzerTime"
    if not found.links and database.has("CommAnalyzerMatrix"):
        found.links = database.links()
        found.sources["links"] = f"{name}: CommAnalyzerMatrix"
    if not found.caches and database.has("LLC", "STRING_IDS"):
        found.caches += database.caches()


def _fill_up(found: _Found) -> None:
    """Steps and collectives from events, where no file has them; then what of each collective nothing hides."""
    kernels, trace = found.kernels, found.trace
    if not found.steps and trace is not None and (step := step_of_trace(trace, "")) is not None:
        found.steps = [step]
        found.sources["steps"] = step.source
    if not found.steps and (step := step_of_kernels(kernels, f"{found.sources.get('kernels', '')}: union of its rows")):
        found.steps = [step]
        found.sources["steps"] = step.source
    if not found.collectives:
        found.collectives = list(_collectives_of(kernels, trace))
        if found.collectives:
            found.sources["collectives"] = found.sources.get("kernels", "") if kernels.comm_starts else "trace"
    if len(found.collectives) > MAX_COLLECTIVES:
        found.warnings.append(f"only the first {MAX_COLLECTIVES} collectives were compared")
        found.collectives = found.collectives[:MAX_COLLECTIVES]
    found.collectives = _with_exposed(found)


def _collectives_of(kernels: Kernels, trace: Trace | None) -> Iterator[Collective]:
    if kernels.comm_starts:
        rows = zip(kernels.comm_names, kernels.comm_steps, kernels.comm_starts, kernels.comm_ends, strict=True)
        named = ((kernels.name_list[name], step, start, end) for name, step, start, end in rows)
    else:
        events = trace.collectives if trace is not None else []
        named = ((name, "", start, start + round(duration_us * 1000)) for name, start, duration_us in events)
    for name, step, start_ns, end_ns in named:
        yield Collective(
            step=step,
            name=name,
            kind=plain_kind(name),
            group=name.partition("@")[2],
            start_ns=start_ns,
            elapse_ms=(end_ns - start_ns) / 1e6,
        )


def _with_exposed(found: _Found) -> list[Collective]:
    """Exposed is what no compute kernel covers: from intervals, or all of it where nothing overlaps in any step."""
    overlapped = sum(step.overlapped_us for step in found.steps)
    if found.steps and overlapped == 0:
        return [replace(each, exposed_ms=each.elapse_ms) for each in found.collectives]
    kernels = found.kernels
    computing = Intervals.union(kernels.starts, kernels.ends)
    if not len(computing.starts) and found.trace is not None:
        computing = found.trace.computing()
    if not len(computing.starts) or not found.collectives or not all(each.start_ns for each in found.collectives):
        return found.collectives
    written_us = sum(step.computing_us for step in found.steps)
    if computing.total_ns / 1e3 < WHOLE_SHARE * written_us:
        found.warnings.append(
            f"{found.sources.get('kernels', '')}: its kernels cover {computing.total_ns / 1e6:.1f} ms of "
            f"{written_us / 1e3:.1f} ms of computing: it is not whole, and what of each collective is exposed not known"
        )
        return found.collectives
    starts = np.array([each.start_ns for each in found.collectives], np.int64)
    ends = starts + np.array([round(each.elapse_ms * 1e6) for each in found.collectives], np.int64)
    hidden = computing.common_ns(starts, ends)
    return [
        replace(each, exposed_ms=max(0.0, each.elapse_ms - ns / 1e6))
        for each, ns in zip(found.collectives, hidden.tolist(), strict=True)
    ]


def _rank(source: Source, found: _Found) -> Rank:
    kernels = found.kernels
    table = kernels.table()
    if not table:
        for path in source.files.get("operators", ()):
            table = read_operators(path, source.device)
            found.sources["kernels"] = path.name
    for path in source.files.get("l2_cache", ()):
        found.written |= read_l2(path, source.device)
    host = [call for path in source.files.get("host", ()) for call in read_host(path)]
    modules = [each for path in source.files.get("modules", ()) for each in read_memory(path, source.device)]
    at_ns = peak_ns(found.memory)
    owners = (
        [each for path in source.files.get("owners", ()) for each in read_owners(path, at_ns or 0)] if at_ns else []
    )
    return Rank(
        rank=source.rank or 0,
        writer=source.writer,
        folder=source.folder.name,
        level=level_of(source.info),
        metrics=metrics_of(source.info),
        versions=versions_of(source.info),
        sizes=sizes_of(source.metadata),
        groups=groups_of(source.metadata),
        steps=tuple(found.steps),
        kernels=table,
        collectives=tuple(found.collectives),
        links=tuple(found.links),
        memory=found.memory,
        modules=tuple(modules),
        owners=tuple(owners),
        caches=tuple(found.caches),
        launch=found.launch,
        host_calls=tuple(host),
        spans=spans_of(kernels, found.collectives),
        lane=lane_of(kernels, found.collectives),
        sources=found.sources,
        warnings=tuple(found.warnings),
        iterations_us=tuple(found.iterations_us),
        written=found.written,
    )
