"""Fitting the few efficiencies of each device class on published runs. Pure.

Nothing is fitted to one run: a class has nine numbers, each kept within what hardware can do, found on the runs whose
name falls into the training part and judged on the others.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType

from ascend_moe_train.planner.efficiency import Efficiency
from ascend_moe_train.planner.published import Published
from ascend_moe_train.planner.step_time import time_of

# Least and most of each parameter; the middle is where it is drawn to when runs do not say.
BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "product": (0.35, 0.98),
        "product_knee": (8.0, 1024.0),
        "core": (0.1, 0.8),
        "vector": (0.2, 0.95),
        "inside": (0.2, 0.95),
        "across": (0.2, 0.95),
        "operator_s": (1e-6, 4e-5),
        "hidden": (0.3, 0.98),
        "slow": (0.005, 0.15),
    }
)
PULL = 0.004  # how much an e-fold from the start counts, against a relative error of 1
FIRST_STEP, LAST_STEP = 0.4, 0.02


def is_training(name: str) -> bool:
    """Whether a run is of the part that is fitted on: half of them, by a hash of the name."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


def fit(runs: Sequence[Published], start: Efficiency) -> Efficiency:
    """Coordinate search from `start` for the least mean of |ln(predicted / measured)|, each family of runs (framework's
    group) counting by the root of its size."""
    if not runs:
        return start
    weights = _weights(runs)

    def loss(candidate: Efficiency) -> float:
        total = math.fsum(weight * abs(log_error(run, candidate)) for run, weight in zip(runs, weights, strict=True))
        first, now = asdict(start), asdict(candidate)
        return total / sum(weights) + PULL * sum(math.log(now[name] / first[name]) ** 2 for name in BOUNDS)

    return _search(start, loss)


def log_error(run: Published, efficiency: Efficiency | None = None) -> float:
    """ln(predicted / measured) of a run's step."""
    if run.step_s is None:
        raise ValueError(f"{run.name} has no measured time")
    predicted = time_of(run.job, run.cluster, run.plan, run.imbalance, efficiency)
    return math.log(predicted.step_s / run.step_s)


def _weights(runs: Sequence[Published]) -> list[float]:
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.group] = counts.get(run.group, 0) + 1
    return [counts[run.group] ** -0.5 for run in runs]


def _search(start: Efficiency, loss: Callable[[Efficiency], float]) -> Efficiency:
    best, least, step = start, loss(start), FIRST_STEP
    while step > LAST_STEP:
        is_better = False
        for name, (low, high) in BOUNDS.items():
            for factor in (math.exp(step), math.exp(-step)):
                value = min(high, max(low, asdict(best)[name] * factor))
                candidate = replace(best, **{name: value})
                if (found := loss(candidate)) < least - 1e-6:
                    best, least, is_better = candidate, found, True
                    break
        if not is_better:
            step /= 2
    return best
