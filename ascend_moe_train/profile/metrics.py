"""Figures of one rank, each with its formula and the file that it is from; what was not collected says how to. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from ascend_moe_train.profile.find import OWN
from ascend_moe_train.profile.groups import is_p2p
from ascend_moe_train.profile.tables import CUBE_CORES, PIPES, VECTOR_CORES, KernelGroup, Rank

SHARE, MS, MB = "share", "ms", "MB"
NO_RATIOS = "not collected: set profiler_level=Level1 and aic_metrics=PipeUtilization"
NO_COLLECTIVES = "not collected: set profiler_level=Level1"
NO_CACHE = "not collected: set aic_metrics=L2Cache (a run of its own), or sys options of msprof for LLC"
NO_MEMORY = "not collected: set profile_memory=True"
NOT_ON_CPU = "not there in the profile of a run on CPUs"
NO_STEPS = "not collected: no step_trace_time.csv, no Overlap Analysis track and no kernels"
NO_TRACE = "not collected: set activities CPU and NPU, and keep trace_view.json"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A value of a rank; None with the reason in `missing`. Shares are fractions."""

    name: str
    rank: int
    value: float | None
    unit: str
    formula: str
    source: str
    missing: str = ""


def figures(rank: Rank) -> list[Figure]:
    """All of one rank, the mean over its steps."""
    return [*_steps(rank), *_collectives(rank), *_kernels(rank), *_caches(rank), *_host(rank), *_memory(rank)]


def _figure(rank: Rank, name: str, value: float | None, unit: str, formula: str, source: str, missing: str) -> Figure:
    return Figure(
        name=name,
        rank=rank.rank,
        value=value,
        unit=unit,
        formula=formula,
        source=source if value is not None else "",
        missing="" if value is not None else NOT_ON_CPU if rank.writer == OWN else missing,
    )


def _steps(rank: Rank) -> Iterator[Figure]:
    source = rank.sources.get("steps", "")
    e2e_us = rank.e2e_us
    parts = {
        "computing": (rank.computing_us, "Computing"),
        "exposed_comm": (rank.exposed_us, "Communication(Not Overlapped)"),
        "free": (rank.free_us, "Free"),
    }
    has = bool(rank.steps) and e2e_us > 0
    yield _figure(
        rank,
        "step",
        e2e_us / 1e3 if has else None,
        MS,
        "Computing + Communication(Not Overlapped) + Free, mean over steps",
        source,
        NO_STEPS,
    )
    for name, (value, title) in parts.items():
        share = value / e2e_us if has else None
        yield _figure(rank, name, share, SHARE, f"{title} / step", source, NO_STEPS)
    total = rank.exposed_us + rank.overlapped_us
    yield _figure(rank, "comm", total / e2e_us if has else None, SHARE, "Communication / step", source, NO_STEPS)
    hidden = rank.overlapped_us / total if has and total > 0 else None
    yield _figure(rank, "overlap", hidden, SHARE, "Overlapped / Communication", source, "no communication in any step")
    ready = [each.preparing_us for each in rank.steps if each.preparing_us is not None]
    yield _figure(
        rank,
        "preparing",
        mean(ready) / 1e3 if ready else None,
        MS,
        "Preparing: start of the step on the host to the first start on the device; not part of the step",
        source,
        "not collected: set activities CPU and NPU",
    )
    times = [each.e2e_us for each in rank.steps]
    noise = stdev(times) / mean(times) if len(times) > 1 and mean(times) > 0 else None
    yield _figure(
        rank, "noise", noise, SHARE, "standard deviation of steps / their mean", source, "less than two steps"
    )


def _collectives(rank: Rank) -> Iterator[Figure]:
    source = rank.sources.get("collectives", "")
    messages = [each for each in rank.collectives if is_p2p(each.kind)]
    p2p = sum(each.elapse_ms for each in messages) / rank.num_steps
    exposed = [each.exposed_ms for each in messages]
    known = None if any(each is None for each in exposed) else sum(each or 0.0 for each in exposed) / rank.num_steps
    has = bool(rank.collectives)
    e2e_ms = rank.e2e_us / 1e3
    formula = "sum of the times of send, receive and batchSendRecv, by their names"
    yield _figure(rank, "p2p", p2p if has else None, MS, formula, source, NO_COLLECTIVES)
    written = [each.bubble_written_us for each in rank.steps if each.bubble_written_us is not None]
    # operators on several streams at once may add up to more than there was time
    shown = min(known if known is not None else p2p, rank.exposed_us / 1e3)
    bubble = shown / e2e_ms if has and e2e_ms > 0 else None
    hidden = "less what kernels cover" if known is not None else "an upper bound: what kernels cover is not known"
    hidden += ", at most the exposed communication"
    formula = f"{formula}, {hidden}, / step"
    if rank.writer == "MindSpore 1.x" and written and e2e_ms > 0:
        bubble, formula, source = mean(written) / 1e3 / e2e_ms, "receive_alone_time / step", rank.sources["steps"]
    yield _figure(rank, "p2p_exposed", bubble, SHARE, formula, source, NO_COLLECTIVES)
    yield _figure(
        rank,
        "bubble_written",
        mean(written) / 1e3 if written else None,
        MS,
        "column Bubble, as written: of torch_npu only hcom_receive; not used",
        rank.sources.get("steps", ""),
        NO_STEPS,
    )


def weighted(groups: Sequence[KernelGroup], pipe: str) -> float | None:
    """A pipe's ratio over kernels, weighted by their durations; None without any."""
    total = sum(each.measured_us for each in groups)
    place = PIPES.index(pipe)
    return sum(each.pipes_us[place] for each in groups if each.pipes_us) / total if total > 0 else None


def cube_utilisation(groups: Sequence[KernelGroup]) -> float | None:
    """How long cube cores were occupied, weighted by durations; None without any."""
    total = sum(each.cube_measured_us for each in groups)
    return sum(each.cube_us for each in groups) / total if total > 0 else None


def memory_bound_share(groups: Sequence[KernelGroup]) -> float | None:
    """Of the time of kernels with ratios, that of groups whose mte2 ratio is above mac and vec."""
    measured = [each for each in groups if each.measured_us and each.pipes_us]
    total = sum(each.measured_us for each in measured)
    mac, vec, mte2 = PIPES.index("mac"), PIPES.index("vec"), PIPES.index("mte2")
    bound = [each for each in measured if each.pipes_us[mte2] > max(each.pipes_us[mac], each.pipes_us[vec])]
    return sum(each.measured_us for each in bound) / total if total > 0 else None


def _kernels(rank: Rank) -> Iterator[Figure]:
    source = rank.sources.get("kernels", "")
    cube = [each for each in rank.kernels if each.core in CUBE_CORES]
    vector = [each for each in rank.kernels if each.core in VECTOR_CORES]
    over = "ratio x Duration over"
    rows = (
        ("cube_utilisation", cube_utilisation(cube), "cube_utilization(%) x Duration over AI_CORE and MIX_AIC kernels"),
        ("cube_mac", weighted(cube, "mac"), f"aic_mac {over} AI_CORE and MIX_AIC kernels"),
        ("cube_mte2", weighted(cube, "mte2"), f"aic_mte2 {over} AI_CORE and MIX_AIC kernels"),
        ("vector_vec", weighted(vector, "vec"), f"aiv_vec {over} AI_VECTOR_CORE and MIX_AIV kernels"),
        ("vector_mte2", weighted(vector, "mte2"), f"aiv_mte2 {over} AI_VECTOR_CORE and MIX_AIV kernels"),
        ("vector_mte3", weighted(vector, "mte3"), f"aiv_mte3 {over} AI_VECTOR_CORE and MIX_AIV kernels"),
        ("memory_bound", memory_bound_share(rank.kernels), "time of kernels with mte2 > max(mac, vec) / time of all"),
    )
    for name, value, formula in rows:
        yield _figure(rank, name, value, SHARE, formula, source, NO_RATIOS)


def _caches(rank: Rank) -> Iterator[Figure]:
    best = next((each for each in rank.caches if each.kind == "L2"), None)
    best = best or next((each for each in rank.caches if "Read" in each.kind), None)
    what = "hits / (hits + misses), counters pooled" if best and best.kind == "L2" else "mean of samples of the device"
    missing = NO_CACHE
    if "l2_cache_rows" in rank.written and "l2_hit_rate_mean_of_rows" not in rank.written:
        missing = f"{NO_CACHE}; l2_cache.csv has no hit rate on this chip"
    name = f"{best.kind}: {what}" if best else "hits / (hits + misses)"
    yield _figure(rank, "cache_hit", best.mean if best else None, SHARE, name, best.source if best else "", missing)


def _host(rank: Rank) -> Iterator[Figure]:
    launch, e2e_us = rank.launch, rank.e2e_us * rank.num_steps
    share = launch.host_bound_us / e2e_us if launch and e2e_us > 0 else None
    source = launch.source if launch else ""
    yield _figure(
        rank, "host_bound", share, SHARE, "gaps until a launch that came after they began / step", source, NO_TRACE
    )
    delay = launch.delay_us / 1e3 if launch else None
    yield _figure(rank, "launch_delay", delay, MS, "median of start on the device - launch", source, NO_TRACE)


def _memory(rank: Rank) -> Iterator[Figure]:
    peak = max((each.peak_reserved_mb for each in rank.memory), default=None)
    formula = "largest Total Reserved of any component"
    yield _figure(rank, "memory_peak", peak, MB, formula, rank.sources.get("memory", ""), NO_MEMORY)
