"""The profiler of MindSpore 1.x, msprof's files of 2023 by iteration, and msprof op for one kernel. Pure."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ascend_moe_train.errors import ProfileError
from ascend_moe_train.profile.find import Source, iteration_of
from ascend_moe_train.profile.kernels import Kernels, plain_kind
from ascend_moe_train.profile.steps import US_PER_MS, step_of_intervals
from ascend_moe_train.profile.tables import CUBE_CORES, PIPES, Cache, Collective, KernelGroup, Rank, Step
from ascend_moe_train.profile.text import MISSING, Sheet, read_json
from ascend_moe_train.profile.trace_view import Trace, read_trace

TICK_US = 0.01
BASIC = "OpBasicInfo.csv"
_PIPELINE = re.compile(r"ascend_cluster_analyse_pipeline-parallel_(\d{1,6})_(\d{1,6})_")
_PARTS_MS = ("computation_time", "communication_alone_time")


def read_mindspore_1(source: Source) -> Rank:
    """Steps from ascend_cluster_analyse_*, their length from step_trace_raw_*, collectives from hccl_raw_*, operators
    from aicore_intermediate_*_type. Raises ProfileError."""
    steps: list[Step] = []
    iterations: list[float] = []
    collectives: list[Collective] = []
    kernels: list[KernelGroup] = []
    written: dict[str, float] = {}
    sources: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for path in source.files["old"]:
        name = path.name
        if name.startswith("ascend_cluster_analyse"):
            steps = _cluster_steps(path)
            if match := _PIPELINE.match(name):
                sizes = {"pp": int(match[1]), "world": int(match[2])}
            sources["steps"] = name
        elif name.startswith("step_trace_raw"):
            iterations = _iterations(path)
            sources["iterations"] = name
        elif name.startswith("hccl_raw"):
            collectives, costs = _old_collectives(path)
            written |= costs
            sources["collectives"] = name
        elif name.startswith("aicore_intermediate") and "_type" in name:
            kernels = _old_kernels(path)
            sources["kernels"] = name
        elif name.startswith("flops_summary"):
            written |= _numbers(path)
    if len(iterations) == len(steps):
        steps = [_with_free(step, time_us) for step, time_us in zip(steps, iterations, strict=True)]
    return Rank(
        rank=source.rank or 0,
        writer=source.writer,
        folder=source.folder.name,
        sizes=sizes,
        steps=tuple(steps),
        kernels=tuple(kernels),
        collectives=tuple(collectives),
        iterations_us=tuple(iterations),
        written=written,
        sources=sources,
    )


def _cluster_steps(path: Path) -> list[Step]:
    """A row a step, in milliseconds; `receive_alone_time` is the bubble as written there."""
    sheet = Sheet(path)
    places = [sheet.need(name) for name in _PARTS_MS]
    receive = sheet.find("receive_alone_time")
    stage = sheet.find("stage_time")
    found: list[Step] = []
    for row, cells in sheet.rows():
        computing, exposed = (sheet.number(cells, row, place, "time") or 0.0 for place in places)
        bubble, span = sheet.number(cells, row, receive, "receive"), sheet.number(cells, row, stage, "stage_time")
        found.append(
            Step(
                step=str(len(found) + 1),
                computing_us=computing * US_PER_MS,
                exposed_us=exposed * US_PER_MS,
                overlapped_us=0.0,
                free_us=0.0,
                source=path.name,
                bubble_written_us=None if bubble is None else bubble * US_PER_MS,
                stage_written_us=None if span is None else span * US_PER_MS,
            )
        )
    return found


def _with_free(step: Step, time_us: float) -> Step:
    return replace(step, free_us=max(0.0, time_us - step.computing_us - step.exposed_us))


def _iterations(path: Path) -> list[float]:
    """Totals in ticks of 10 ns; the last row, -, is their mean."""
    sheet = Sheet(path)
    step, total = sheet.need("step_num"), sheet.need("total")
    return [
        (sheet.number(cells, row, total, "total") or 0.0) * TICK_US
        for row, cells in sheet.rows()
        if cells[step].strip() not in MISSING
    ]


def _old_collectives(path: Path) -> tuple[list[Collective], dict[str, float]]:
    """A row a step, with a JSON of all its operators: name -> [step, communication ms, wait ms, links]."""
    sheet = Sheet(path)
    step_at, ops_at = sheet.need("step_num"), sheet.need("communication_operator_cost")
    costs = {name: sheet.need(name) for name in ("communication_cost", "wait_cost")}
    sums = dict.fromkeys(costs, 0.0)
    count = 0
    found: list[Collective] = []
    for row, cells in sheet.rows():
        if not (step := cells[step_at].strip()).isdecimal():
            continue
        count += 1
        for name, place in costs.items():
            sums[name] += sheet.number(cells, row, place, name) or 0.0
        try:
            ops = json.loads(cells[ops_at])
            found += [_old_collective(step, str(name), values) for name, values in ops.items()]
        except (ValueError, TypeError, IndexError, AttributeError, RecursionError):
            raise ProfileError(f"{path}: row {row}, column 'communication_operator_cost': is not as expected") from None
    means = {f"{name}_ms": total / count for name, total in sums.items()} if count else {}
    return found, means


def _old_collective(step: str, name: str, values: Sequence[Any]) -> Collective:
    moving_ms, waiting_ms = float(values[1]), float(values[2])
    if not (0 <= moving_ms < 1e10 and 0 <= waiting_ms < 1e10):
        raise ValueError
    links: dict[str, tuple[float, float]] = {}
    for by_transport in values[3].values():
        for transport, (time_ms, size_kb, *_) in by_transport.items():
            before = links.get(transport, (0.0, 0.0))
            links[transport] = (before[0] + float(size_kb) / 1e3, before[1] + float(time_ms))
    return Collective(
        step=step,
        name=name,
        kind=plain_kind(name),
        group="",
        start_ns=0,
        elapse_ms=moving_ms + waiting_ms,
        transit_ms=moving_ms,
        wait_ms=waiting_ms,
        links=links,
    )


def _old_kernels(path: Path) -> list[KernelGroup]:
    """Totals in milliseconds by type."""
    sheet = Sheet(path)
    kind, total, count = (sheet.need(name) for name in ("kernel_type", "total_time", "execution_frequency"))
    found = []
    for row, cells in sheet.rows():
        time_us = (sheet.number(cells, row, total, "total_time") or 0.0) * US_PER_MS
        times = int(sheet.number(cells, row, count, "execution_frequency") or 0)
        mean_us = time_us / max(1, times)
        found.append(
            KernelGroup(
                type=cells[kind],
                core="AI_CORE",
                shapes="",
                dtypes="",
                count=times,
                total_us=time_us,
                min_us=mean_us,
                max_us=mean_us,
                wait_us=0.0,
            )
        )
    return sorted(found, key=lambda each: -each.total_us)


def _numbers(path: Path) -> dict[str, float]:
    value = read_json(path)
    pairs = value.items() if isinstance(value, dict) else ()
    return {str(key): float(each) for key, each in pairs if isinstance(each, int | float) and abs(each) < 1e30}


def read_iterations(source: Source) -> tuple[list[Step], list[float], Kernels, Trace | None]:
    """Traces of 2023, one for each iteration: its parts from the overlap track, or from the intervals themselves."""
    steps: list[Step] = []
    times: dict[int, float] = {}
    kernels = Kernels()
    last = None
    for path in source.files.get("trace", ()):
        trace = last = read_trace(path)
        times |= trace.iterations_us
        steps += [step for step in [step_of_trace(trace, str(iteration_of(path)))] if step is not None]
        for name, start_ns, duration_us in trace.collectives:
            kernels.add_collective(name, str(iteration_of(path)), start_ns, duration_us)
        kernels.take(trace.kernels)
    for path in source.files.get("iterations", ()):
        times |= read_trace(path).iterations_us
    return steps, [times[place] for place in sorted(times)], kernels, last


def step_of_trace(trace: Trace, step: str) -> Step | None:
    """One step from the overlap track of a trace, or from its kernels."""
    parts = trace.parts_us
    if "Computing" in parts or "Communication" in parts:
        exposed = parts.get("Communication(Not Overlapped)", 0.0)
        return Step(
            step=step,
            computing_us=parts.get("Computing", 0.0),
            exposed_us=exposed,
            overlapped_us=max(0.0, parts.get("Communication", 0.0) - exposed),
            free_us=parts.get("Free", 0.0),
            source=f"{trace.path.name}: Overlap Analysis",
        )
    return step_of_intervals(trace.computing(), trace.communication(), f"{trace.path.name}: union of its events", step)


def read_opprof(source: Source) -> Rank:
    """One kernel by msprof op: its duration, pipes weighted by cycles, pooled cache counters. Raises ProfileError."""
    paths = {path.name: path for path in source.files["kernel"]}
    cache = _pooled(paths["L2Cache.csv"]) if "L2Cache.csv" in paths else None
    return Rank(
        rank=source.rank or 0,
        writer=source.writer,
        folder=source.folder.name,
        kernels=_one_kernel(paths[BASIC], paths.get("PipeUtilization.csv")) if BASIC in paths else (),
        caches=(cache,) if cache else (),
        sources={"kernels": BASIC} if BASIC in paths else {},
    )


def _one_kernel(path: Path, pipes_path: Path | None) -> tuple[KernelGroup, ...]:
    """What OpBasicInfo.csv says of the kernel, with the mean of its pipes."""
    sheet = Sheet(path)
    name, kind, duration = sheet.need("Op Name"), sheet.find("Op Type"), sheet.need("Task Duration(us)")
    time_us, title, core = 0.0, "", ""
    for row, cells in sheet.rows():
        time_us += sheet.number(cells, row, duration, "Task Duration(us)") or 0.0
        title, core = cells[name], cells[kind].strip().upper() if kind is not None else ""
    core = {"CUBE": "AI_CORE", "VECTOR": "AI_VECTOR_CORE", "MIX": "MIX_AIC"}.get(core, core)
    pipes = _pipes(pipes_path, core) if pipes_path is not None else ()
    group = KernelGroup(
        type=title,
        core=core,
        shapes="",
        dtypes="",
        count=1,
        total_us=time_us,
        min_us=time_us,
        max_us=time_us,
        wait_us=0.0,
        measured_us=time_us if pipes else 0.0,
        pipes_us=tuple(share * time_us for share in pipes),
    )
    return (group,)


def _pipes(path: Path, core: str) -> tuple[float, ...]:
    """Of each pipe the mean over blocks, weighted by their cycles."""
    sheet = Sheet(path)
    prefix = "aic" if core in CUBE_CORES else "aiv"
    cycles_at = sheet.find(f"{prefix}_total_cycles")
    places = [sheet.find(f"{prefix}_{pipe}_ratio") for pipe in PIPES]
    sums, total = [0.0] * len(PIPES), 0.0
    for row, cells in sheet.rows():
        cycles = sheet.number(cells, row, cycles_at, "cycles") if cycles_at is not None else 1.0
        for index, place in enumerate(places):
            sums[index] += (cycles or 0.0) * (sheet.number(cells, row, place, PIPES[index]) or 0.0)
        total += cycles or 0.0
    return tuple(each / total for each in sums) if total else ()


def _pooled(path: Path) -> Cache | None:
    """Hits through accesses, over all blocks and kinds: rates are not averaged."""
    sheet = Sheet(path)
    pairs = []
    for name, place in sheet.columns.items():
        plain = re.sub(r"\W*$", "", name)
        miss = sheet.find(f"{plain.removesuffix('_hit')}_miss_allocate")
        if plain.endswith("_hit") and miss is not None:
            pairs.append((place, miss))
    hits = misses = 0.0
    rows = 0
    for row, cells in sheet.rows():
        hits += sum(sheet.number(cells, row, hit, "hit") or 0.0 for hit, _ in pairs)
        misses += sum(sheet.number(cells, row, miss, "miss_allocate") or 0.0 for _, miss in pairs)
        rows += 1
    return pooled_cache(hits, misses, rows, path.name)


def pooled_cache(hits: float, misses: float, rows: int, source: str) -> Cache | None:
    """Counters as a rate; None without accesses."""
    if hits + misses <= 0:
        return None
    rate = hits / (hits + misses)
    return Cache(kind="L2", samples=rows, mean=rate, low=rate, high=rate, weighted=rate, source=source)
