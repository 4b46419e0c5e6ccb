"""Fitting the few efficiencies of each device class on published runs. Pure.

Nothing is fitted to one run: a class has ten numbers, each kept within what hardware can do, found on the training
part of the runs and judged on the others.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from types import MappingProxyType
from typing import TypeVar

from ascend_moe_train.planner.efficiency import Efficiency, Paces
from ascend_moe_train.planner.plan import Plan
from ascend_moe_train.planner.published import Published
from ascend_moe_train.planner.step_time import time_of

# Least and most of each parameter; the middle is where it is drawn to when runs do not say.
BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "product": (0.35, 0.98),
        "product_knee": (8.0, 1024.0),
        "core": (0.1, 0.85),
        "core_knee": (64.0, 8192.0),
        "vector": (0.2, 0.95),
        "inside": (0.2, 0.95),
        "across": (0.2, 0.95),
        "operator_s": (1e-6, 4e-5),
        "hidden": (0.3, 0.98),
        "slow": (0.005, 0.15),
    }
)
# Fields of models and plans that are younger than the split: no run may change sides for them.
AFTER_THE_SPLIT = frozenset({"recompute_kept", "techniques"})
PACE_BOUNDS = (0.6, 1.7)
ROUNDS = 2
LEAST_RUNS = 2
SOFTWARE_PULL = 0.1
PULL = 0.02  # how much an e-fold from the start counts, against a relative error of 1
FIRST_STEP, LAST_STEP = 0.4, 0.02
_Values = TypeVar("_Values", Efficiency, Paces)


def is_training(run: Published) -> bool:
    """Whether a run is of the part that is fitted on: half of them, by a hash of model and
    layout, so that what was published twice is not on both sides."""
    return split_digest(run)[0] % 2 == 0


def split_digest(run: Published) -> bytes:
    """SHA-256 of a run's model, sequence length, layout and device, as read when the runs were split."""
    old = [each.name for each in fields(Plan) if each.name not in AFTER_THE_SPLIT]
    layout = ", ".join(f"{name}={getattr(run.split_plan, name)!r}" for name in old)
    model = run.split_model.model_dump_json(exclude=set(AFTER_THE_SPLIT))
    text = f"{model} {run.job.seq_len} Plan({layout}) {run.cluster.device.name}"
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What was found: parameters of each device class, paces of each software on it."""

    devices: Mapping[str, Efficiency]
    software: Mapping[str, Paces]

    def log_error(self, run: Published) -> float:
        """ln(predicted / measured) of a run's step."""
        paces = self.software.get(run.software, self.software.get(_others(_class(run)), Paces()))
        return _log_error(_paced(run, paces), self.devices[run.cluster.device.efficiency])


def fit(runs: Sequence[Published], start: Mapping[str, Efficiency]) -> Fitted:
    """The parameters of every class that has runs, then the paces of every software with `LEAST_RUNS` or more, and both
    once more; other software takes the median of those on its class. Each is the least mean of
    |ln(predicted / measured)|, where a group of runs counts by the root of its size.
    """
    devices, software = dict(start), dict[str, Paces]()
    for _ in range(ROUNDS):
        for name in sorted({run.cluster.device.efficiency for run in runs}):
            mine = [_paced(run, software.get(run.software, Paces())) for run in runs if _class(run) == name]
            devices[name] = _fit_device(mine, devices[name], start[name])
        for name in sorted({run.software for run in runs}):
            mine = [run for run in runs if run.software == name]
            if len(mine) >= LEAST_RUNS:
                software[name] = _fit_paces(mine, devices[_class(mine[0])], software.get(name, Paces()))
    for name in devices:
        if own := [software[each] for each in {run.software for run in runs if _class(run) == name} & set(software)]:
            paces = Paces(pace=median(each.pace for each in own), core_pace=median(each.core_pace for each in own))
            software[_others(name)] = paces
    return Fitted(devices=devices, software=software)


def _fit_device(runs: Sequence[Published], best: Efficiency, start: Efficiency) -> Efficiency:
    weights = _weights(runs)

    def loss(candidate: Efficiency) -> float:
        total = math.fsum(weight * abs(_log_error(run, candidate)) for run, weight in zip(runs, weights, strict=True))
        first, now = asdict(start), asdict(candidate)
        return total / sum(weights) + PULL * sum(math.log(now[name] / first[name]) ** 2 for name in BOUNDS)

    return _search(best, loss, BOUNDS)


def _fit_paces(runs: Sequence[Published], efficiency: Efficiency, best: Paces) -> Paces:
    def loss(candidate: Paces) -> float:
        total = math.fsum(abs(_log_error(_paced(run, candidate), efficiency)) for run in runs)
        squares = sum(math.log(value) ** 2 for value in asdict(candidate).values())
        return total / len(runs) + SOFTWARE_PULL / len(runs) * squares

    return _search(best, loss, dict.fromkeys(("pace", "core_pace"), PACE_BOUNDS))


def _others(name: str) -> str:
    return f"others on {name}"


def _class(run: Published) -> str:
    return run.cluster.device.efficiency


def _paced(run: Published, paces: Paces) -> Published:
    engine = replace(run.job.engine, pace=paces.pace, core_pace=paces.core_pace)
    return replace(run, job=replace(run.job, engine=engine))


def _log_error(run: Published, efficiency: Efficiency) -> float:
    if run.step_s is None:
        raise ValueError(f"{run.name} has no measured time")
    predicted = time_of(run.job, run.cluster, run.plan, run.imbalance, efficiency)
    return math.log(predicted.step_s / run.step_s)


def _weights(runs: Sequence[Published]) -> list[float]:
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.group] = counts.get(run.group, 0) + 1
    return [counts[run.group] ** -0.5 for run in runs]


def _search(start: _Values, loss: Callable[[_Values], float], bounds: Mapping[str, tuple[float, float]]) -> _Values:
    """Coordinate search with steps that halve."""
    best, least, step = start, loss(start), FIRST_STEP
    while step > LAST_STEP:
        is_better = False
        for name, (low, high) in bounds.items():
            for factor in (math.exp(step), math.exp(-step)):
                value = min(high, max(low, asdict(best)[name] * factor))
                candidate = replace(best, **{name: value})
                if (found := loss(candidate)) < least - 1e-6:
                    best, least, is_better = candidate, found, True
                    break
        if not is_better:
            step /= 2
    return best
