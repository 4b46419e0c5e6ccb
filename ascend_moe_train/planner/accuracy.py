"""How far the planner is from published runs, beside a floor that it must beat. Pure.

Floor: FLOPs of all devices through devices x peak x one efficiency of the device class (found on the training part),
times the pipeline's bubble (p - 1) / (v m): no memory, no network.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ascend_moe_train.model.counts import training_flops_per_token
from ascend_moe_train.planner.fit import Fitted, is_training
from ascend_moe_train.planner.memory import Memory, StageMemory, memory_of
from ascend_moe_train.planner.published import Published, Runs

ERROR_BARS = Path(__file__).parent / "data" / "error_bars.json"
RECOMPUTED = {"none": 1.0, "selective": 1.0, "full": 4 / 3}
LEAST_LAYOUTS = 3
_MEASURED: Mapping[str, Callable[[StageMemory], float]] = {
    "allocated": lambda stage: stage.total_bytes - stage.items["runtime"] - stage.items["reserve"],
    "reserved": lambda stage: stage.total_bytes - stage.items["runtime"],
    "device": lambda stage: stage.total_bytes + stage.cached_bytes,
    "first step": lambda stage: _first_step_bytes(stage.items),
}


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """Mean absolute error of the planner over published runs of a class, as a share, and over how many; None without
    any."""

    time: float | None
    num_time: int
    memory: float | None
    num_memory: int


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Relative errors of one group: of the planner and of the floor, on the training part and on the rest."""

    group: str
    training: tuple[float, ...]
    judged: tuple[float, ...]
    floor: tuple[float, ...]


def error_bar(family: str) -> ErrorBar:
    """Of a class of runs (`gpu dense`, `gpu MoE`, `npu dense`, `npu MoE`), as judged when the planner was made; empty
    for one without published runs."""
    tree: dict[str, dict[str, Any]] = json.loads(ERROR_BARS.read_text(encoding="utf-8"))["families"]
    none = {"time": None, "num_time": 0, "memory": None, "num_memory": 0}
    return ErrorBar(**tree.get(family, none))


def timed(runs: Iterable[Published], trust: str = "AB") -> list[Published]:
    """Runs whose time can be compared."""
    return [run for run in runs if run.step_s is not None and run.trust in trust and "time" in run.uses]


def group_of(run: Published) -> str:
    """The group that a run is judged in."""
    if "Selective" in run.group:
        return "Korthikanti 2022"
    if "B200" in run.group:
        return "B200 sweep"
    if run.family == "gpu dense":
        return "GPU dense, several nodes" if run.cluster.num_nodes > 1 else "GPU dense, one node"
    return {"gpu MoE": "GPU MoE", "npu dense": "Ascend dense", "npu MoE": "Ascend MoE"}.get(run.family, run.family)


def judge_time(runs: Sequence[Published], fitted: Fitted, by: Callable[[Published], str]) -> list[Judged]:
    """Errors of the step time, in groups by name."""
    shares = floor_shares([run for run in runs if is_training(run)])
    groups: dict[str, list[Published]] = {}
    for run in runs:
        groups.setdefault(by(run), []).append(run)
    found = []
    for name, members in sorted(groups.items()):
        errors = {run.name: math.expm1(fitted.log_error(run)) for run in members}
        rest = [run for run in members if not is_training(run)]
        found.append(
            Judged(
                group=name,
                training=tuple(errors[run.name] for run in members if is_training(run)),
                judged=tuple(errors[run.name] for run in rest),
                floor=tuple(floor_s(run, shares) / _measured_s(run) - 1 for run in rest),
            )
        )
    return found


def floor_shares(runs: Sequence[Published]) -> Mapping[str, float]:
    """The one efficiency of each device class: the median of what its runs reach."""
    reached: dict[str, list[float]] = {}
    for run in runs:
        reached.setdefault(run.cluster.device.efficiency, []).append(_ideal_s(run) / _measured_s(run))
    return {name: median(values) for name, values in reached.items()}


def floor_s(run: Published, shares: Mapping[str, float]) -> float:
    """Seconds of a step by the floor; a class without training runs has the median of the others."""
    return _ideal_s(run) / shares.get(run.cluster.device.efficiency, median(shares.values()))


def _ideal_s(run: Published) -> float:
    job, plan = run.job, run.plan
    flops = training_flops_per_token(job.model, job.seq_len) * job.tokens_per_step * RECOMPUTED[plan.recompute]
    bubble = 1 + (plan.pp - 1) / (plan.chunks * plan.num_micro(job))
    return flops * bubble / (plan.num_devices * run.cluster.device.peak("bf16"))


def _measured_s(run: Published) -> float:
    if run.step_s is None:
        raise ValueError(f"{run.name} has no measured time")
    return run.step_s


def memory_errors(runs: Iterable[Published], by: Callable[[Published], str]) -> Mapping[str, tuple[float, ...]]:
    """Relative errors of the peak, in groups, of complete runs of trust A and B; compared is what the tool of each run
    counts: what is allocated, that with the allocator's reserve, or what the device shows."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run.peak_bytes is None or not run.is_complete or run.trust not in "AB":
            continue
        predicted = max(map(_MEASURED[run.tool], _memory(run).stages))
        found.setdefault(by(run), []).append(predicted / run.peak_bytes - 1)
    return {name: tuple(errors) for name, errors in sorted(found.items())}


def _memory(run: Published) -> Memory:
    return memory_of(run.job, run.cluster, run.plan, run.imbalance)


def _first_step_bytes(items: Mapping[str, float]) -> float:
    """Peak of the first step, whose moments do not exist before its update."""
    states = items["weights"] + items["gradients"] + items["optimizer"]
    everything = sum(size for name, size in items.items() if name not in ("runtime", "reserve"))
    return max(states, everything - items["optimizer"] * 2 / 3)


def acceptance(runs: Iterable[Published]) -> tuple[int, int, int, int]:
    """Runs out of memory that are rejected, all of those, complete runs that ran and are accepted, all of those."""
    rejected = failed = accepted = ran = 0
    for run in runs:
        if run.is_oom:
            failed += 1
            rejected += not _memory(run).fits(run.cluster.device)
        elif run.is_complete and run.trust in "AB":
            ran += 1
            accepted += _memory(run).fits(run.cluster.device)
    return rejected, failed, accepted, ran


def orders(runs: Sequence[Published], fitted: Fitted) -> Mapping[str, tuple[float, int]]:
    """Kendall's tau between predicted and measured times of layouts of the same job on the same cluster, and how many
    there are, for each set of three or more that differ."""
    sets: dict[tuple[object, ...], list[Published]] = {}
    for run in runs:
        job = (run.job.model, run.job.seq_len, run.job.global_sequences, run.job.precision)
        key = (run.software, run.cluster.num_devices, run.cluster.device.name, str(job))
        sets.setdefault(key, []).append(run)
    found = {}
    for members in sets.values():
        plans = {run.plan: run for run in members}
        if len(plans) < LEAST_LAYOUTS:
            continue
        distinct = list(plans.values())
        measured = [_measured_s(run) for run in distinct]
        predicted = [_measured_s(run) * math.exp(fitted.log_error(run)) for run in distinct]
        found[f"{distinct[0].name} and {len(distinct) - 1} more"] = kendall(predicted, measured), len(distinct)
    return found


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """(pairs in the same order - pairs in the other) / pairs; those that are equal in one count as neither."""
    signs = [
        math.copysign(1, (first[i] - first[j]) * (second[i] - second[j]))
        if first[i] != first[j] and second[i] != second[j]
        else 0.0
        for i in range(len(first))
        for j in range(i)
    ]
    return fmean(signs) if signs else 0.0


def error_bars(runs: Runs, fitted: Fitted) -> Mapping[str, ErrorBar]:
    """Of each family: of the judged part's times, and of all peaks."""
    times = {each.group: each.judged for each in judge_time(timed(runs.runs), fitted, lambda run: run.family)}
    peaks = memory_errors(runs.runs, lambda run: run.family)
    return {
        family: ErrorBar(
            time=mean_size(times.get(family, ())),
            num_time=len(times.get(family, ())),
            memory=mean_size(peaks.get(family, ())),
            num_memory=len(peaks.get(family, ())),
        )
        for family in sorted({*times, *peaks})
    }


def mean_size(errors: Sequence[float]) -> float | None:
    """Mean absolute error; None of none."""
    return fmean(map(abs, errors)) if errors else None
