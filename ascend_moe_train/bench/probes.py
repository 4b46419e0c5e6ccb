"""What ranks measure of a machine by itself, and what of it a hardware file for the planner holds. Pure.

The formulas are the planner's own (`planner.collectives`, `planner.block_time`), solved for what stands in the file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from ascend_moe_train.bench.wire import sent_bytes
from ascend_moe_train.errors import MetricsError
from ascend_moe_train.planner.collectives import HOP_SHARE
from ascend_moe_train.train.metrics import first_problem

PROBE_MODULE = "ascend_moe_train.bench.probe_rank"
PLANNED_VERBS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # those that the planner predicts
WITHOUT_PAYLOAD = ("barrier", "split")
VERBS = (*PLANNED_VERBS, "all_to_all_v", "broadcast", "send", *WITHOUT_PAYLOAD)  # to `send` belongs `recv`
SMALLEST_KNEE_BYTES = 1.0
_KNEES = np.linspace(0.0, 256.0, 513)
_LONG_KNEES = np.linspace(0.0, 4096.0, 1025)


@dataclass(frozen=True, kw_only=True)
class CommTime:
    """Of one call of a verb in groups of `size` ranks, all groups at once: each round's seconds of the slowest rank."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    verb: str
    size: int
    payload_bytes: int
    rounds_s: tuple[float, ...]

    @property
    def best_s(self) -> float:
        """Of the round that other jobs held up least."""
        return min(self.rounds_s)

    @property
    def moved_bytes(self) -> float:
        """What leaves a rank."""
        return sent_bytes(self.verb, self.payload_bytes, self.size)


@dataclass(frozen=True, kw_only=True)
class WorkTime:
    """Of one operator: `kind` is `product` (shape m, n, k), `grouped` (the same of each expert), `attention` (tokens,
    heads, head size), `vector`, `operator`, or of a layer of experts `experts` or `rows` (shape as `DispatchSizes`);
    `work` is FLOPs of products and attention, bytes read and written of `vector` and `rows`. Likewise the slowest
    rank's."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    kind: str
    name: str
    shape: tuple[int, ...]
    work: float
    rounds_s: tuple[float, ...]

    @property
    def best_s(self) -> float:
        """Of the round that other jobs held up least."""
        return min(self.rounds_s)


@dataclass(frozen=True, kw_only=True)
class DispatchSizes:
    """A layer of experts, and the tokens that a rank has for it."""

    tokens: int
    top_k: int
    num_experts: int
    hidden: int
    ffn: int


@dataclass(frozen=True, kw_only=True)
class Probed:
    """All that was asked for. `copy_bytes_per_s` and `memory_bytes` are of each rank, with all ranks at work."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    ranks: int
    threads: int
    kernels: str
    memory_bytes: int
    copy_bytes_per_s: float
    comm: tuple[CommTime, ...] = ()
    work: tuple[WorkTime, ...] = ()


_PROBED = TypeAdapter(Probed)


def probed_json(probed: Probed) -> bytes:
    """What `read_probed` reads."""
    return _PROBED.dump_json(probed)


def read_probed(path: Path) -> Probed:
    """Raises MetricsError: nothing there, or something else."""
    try:
        return _PROBED.validate_json(path.read_bytes())
    except OSError as error:
        raise MetricsError(f"{path}: {error.strerror or error}") from None
    except ValidationError as error:
        raise MetricsError(f"{path}: {first_problem(error)}") from None


def group_sizes(ranks: int) -> list[int]:
    """Of the groups that are measured: powers of two that divide the ranks, and all of them."""
    return [size for size in range(2, ranks + 1) if size == ranks or (ranks % size == 0 and size & (size - 1) == 0)]


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(a, b) of a + b x nearest to y, neither below zero, each distance taken relative to y."""
    return _fitted(np.ones(len(xs)), np.asarray(xs, np.float64), np.asarray(ys, np.float64))


def alpha_beta(times: Sequence[CommTime]) -> tuple[float, float]:
    """(seconds of a call, seconds of each byte that leaves a rank) of one verb in groups of one size."""
    return line([each.moved_bytes for each in times], [each.best_s for each in times])


def link(times: Sequence[CommTime]) -> tuple[float, float]:
    """(latency_s, bytes_per_s) with which the planner's formula is nearest to what the verbs took that it predicts."""
    own = [each for each in times if each.verb in PLANNED_VERBS]
    hops = np.array([1 + HOP_SHARE * (each.size - 1) for each in own])
    moved = np.array([each.moved_bytes for each in own])
    latency_s, byte_s = _fitted(hops, moved, np.array([each.best_s for each in own]))
    return latency_s, 1 / max(byte_s, 1e-15)


def best_flops_per_s(work: Sequence[WorkTime]) -> float:
    """The fastest product of all."""
    return max(each.work / each.best_s for each in work if each.kind in ("product", "grouped"))


def product_share(work: Sequence[WorkTime], peak_flops_per_s: float, operator_s: float = 0.0) -> tuple[float, float]:
    """(product, product_knee) of `planner.efficiency.Efficiency`, for a device of one core, beside what every operator
    takes at the least. More than 1 if even the largest product is far from what ever larger ones would come to."""
    sizes, ideal_s, taken_s = _products(work, peak_flops_per_s, operator_s, "product")
    return _nearest(lambda knee: np.prod(sizes / (sizes + knee), axis=1), ideal_s, taken_s, _KNEES)


def grouped_share(work: Sequence[WorkTime], peak_flops_per_s: float, operator_s: float, knee: float) -> float:
    """What products of experts reach of the peak where no size is short, with that knee."""
    sizes, ideal_s, taken_s = _products(work, peak_flops_per_s, operator_s, "grouped")
    return _nearest(lambda knee: np.prod(sizes / (sizes + knee), axis=1), ideal_s, taken_s, np.array([knee]))[0]


def _products(
    work: Sequence[WorkTime], peak_flops_per_s: float, operator_s: float, kind: str
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Sizes (n, 3), seconds at the peak, and seconds taken."""
    own = [each for each in work if each.kind == kind]
    sizes = np.array([each.shape for each in own], np.float64)
    ideal_s = np.array([each.work for each in own]) / peak_flops_per_s
    taken_s = np.array([max(each.best_s - operator_s, 0.1 * each.best_s) for each in own])
    return sizes, ideal_s, taken_s


def core_share(work: Sequence[WorkTime], peak_flops_per_s: float) -> tuple[float, float]:
    """(core, core_knee) of `Efficiency`."""
    own = [each for each in work if each.kind == "attention"]
    keys = np.array([each.shape[0] for each in own], np.float64)
    ideal_s = np.array([each.work for each in own]) / peak_flops_per_s
    taken_s = np.array([each.best_s for each in own])
    return _nearest(lambda knee: keys / (keys + knee), ideal_s, taken_s, _LONG_KNEES, most=1.0)


def entry(probed: Probed) -> dict[str, Any]:
    """The machine as an own device of `planner.hardware.catalogue`: one rank with its share of cores and memory."""
    found: dict[str, Any] = {
        "like": "cpu",
        "memory_bytes": probed.memory_bytes,
        "memory_bytes_per_s": probed.copy_bytes_per_s,
        "devices_per_node": probed.ranks,
    }
    shares: dict[str, float] = {}
    if probed.comm:
        latency_s, bytes_per_s = link(probed.comm)
        found["inside"] = {
            "latency_s": max(latency_s, 1e-9),
            "bytes_per_s": bytes_per_s,
            "knee_bytes": SMALLEST_KNEE_BYTES,
        }
        shares["inside"] = 1.0
    if probed.work:
        peak = best_flops_per_s(probed.work)
        shares["operator_s"] = min(each.best_s for each in probed.work if each.kind == "operator")
        product, shares["product_knee"] = product_share(probed.work, peak, shares["operator_s"])
        if any(each.kind == "grouped" for each in probed.work):
            of_experts = grouped_share(probed.work, peak, shares["operator_s"], shares["product_knee"])
            shares["grouped"] = of_experts / product
        peak *= max(1.0, product)
        found["peak_flops_per_s"], shares["product"] = {"fp32": peak}, min(1.0, product)
        core, shares["core_knee"] = core_share(probed.work, peak)
        shares["core"] = min(1.0, core)
        rates = [each.work / each.best_s for each in probed.work if each.kind == "vector"]
        # a copy is by one thread: operators that have several may be faster than memory then seems to be
        found["memory_bytes_per_s"] = max(probed.copy_bytes_per_s, median(rates))
        shares["vector"] = median(rates) / found["memory_bytes_per_s"]
    return found | {"efficiency": {name: float(f"{value:.4g}") for name, value in shares.items()}}


def _fitted(ones: Any, xs: Any, ys: Any) -> tuple[float, float]:
    """Coefficients, none below zero, of two columns, each row counted relative to y."""
    columns = np.stack([ones, xs], axis=1) / ys[:, None]
    a, b = np.linalg.lstsq(columns, np.ones(len(ys)), rcond=None)[0]
    if a < 0 or b < 0:
        # the least of a sum of squares with a bound lies on the bound
        alone = [float(np.dot(column, np.ones(len(ys))) / np.dot(column, column)) for column in columns.T]
        a, b = (0.0, alone[1]) if a < 0 else (alone[0], 0.0)
    return float(a), float(b)


def _nearest(
    share: Callable[[float], Any], ideal_s: Any, taken_s: Any, knees: Any, most: float = np.inf
) -> tuple[float, float]:
    """Of ideal / (height * share(knee)) nearest to taken: (height, knee), by the logarithm of the ratio; the height at
    most so much."""
    best: Mapping[str, float] = {"miss": np.inf}
    for knee in knees.tolist():
        ratios = np.log(ideal_s / (share(knee) * taken_s))
        height = min(most, float(np.exp(np.mean(ratios))))
        miss = float(np.sum((ratios - np.log(height)) ** 2))
        if miss < best["miss"]:
            best = {"miss": miss, "height": height, "knee": knee}
    return best["height"], best["knee"]
