"""How long a step of a plan takes, item by item. Pure.

Passes through blocks by `block_time`, the pipeline in closed form, then gradients, weights and the optimizer. See
docs/planner.md.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import log, sqrt
from typing import NamedTuple

from ascend_moe_train.model.counts import training_flops_per_token
from ascend_moe_train.parallel.config import ScheduleName
from ascend_moe_train.planner.block_time import PassTime, add_parts, block_time, ends_time
from ascend_moe_train.planner.collectives import collective_s, send_s, span
from ascend_moe_train.planner.efficiency import Efficiency, efficiency_of
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.layers import FP32_BYTES, ROUTED_AXES, Slice, kinds_of, tokens
from ascend_moe_train.planner.memory import stage_parameters
from ascend_moe_train.planner.plan import TYPICAL, Imbalance, Job, Plan, among_ranks
from ascend_moe_train.planner.wires import gradients_s, sums_early


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """`items` add up to `step_s`: the passes of the busiest stage by part, `bubble`, `gradients`, `weights`,
    `optimizer`, `straggler`; communication is what is exposed of it. `passes` are those of every virtual stage in the
    order of depth, `send_s` a message between stages."""

    items: Mapping[str, float]
    passes: tuple[PassTime, ...]
    send_s: float
    tokens_per_step: int
    num_devices: int
    model_flops: float
    peak_flops_per_s: float

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.items.values())

    @property
    def tokens_per_s(self) -> float:
        """Of the whole cluster."""
        return self.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs (causal, nothing recomputed) through what all devices could do (Chowdhery et al., 2022)."""
        return self.model_flops / (self.step_s * self.num_devices * self.peak_flops_per_s)

    @property
    def bubble_share(self) -> float:
        """Of the step."""
        return self.items["bubble"] / self.step_s

    @property
    def exposed(self) -> Mapping[str, float]:
        """Seconds of communication that nothing hides, by kind."""
        return {name: value for name, value in self.items.items() if name in COMMUNICATION}


KEPT_PIPELINES = 256
SUM_ACCESSES = 3  # a gradient and its sum are read, the sum is written
COMMUNICATION = ("tp", "cp", *ROUTED_AXES, "pp", "gradients", "weights")


def time_of(
    job: Job,
    cluster: Cluster,
    plan: Plan,
    imbalance: Imbalance = TYPICAL,
    efficiency: Efficiency | None = None,
) -> StepTime:
    """The step of a plan that `check` has nothing against. Without `efficiency`, that of the device's class."""
    return StepTimes(job, cluster, imbalance, efficiency).of(plan)


class StepTimes:
    """`time_of` for many plans of a job on a cluster: what they have in common is worked out once."""

    def __init__(
        self, job: Job, cluster: Cluster, imbalance: Imbalance = TYPICAL, efficiency: Efficiency | None = None
    ) -> None:
        self._job, self._cluster, self._imbalance = job, cluster, imbalance
        device = cluster.device
        own = efficiency_of(device.efficiency, device.own_efficiency)
        self._efficiency = efficiency if efficiency is not None else own
        self._kinds = kinds_of(job)
        self._blocks: dict[tuple[object, ...], PassTime] = {}
        self._stages: dict[tuple[object, ...], PassTime] = {}
        self._updates: dict[tuple[object, ...], dict[str, float]] = {}
        self._pipelines: dict[tuple[object, ...], _Passed] = {}

    def of(self, plan: Plan) -> StepTime:
        """The step of a plan that `check` has nothing against."""
        job, passed = self._job, self._passed(plan)
        items = passed.items | self._between(plan, passed.items)
        items["straggler"] = self._efficiency.slow * sqrt(2 * log(max(2, plan.num_devices))) / 3 * sum(items.values())
        return StepTime(
            items=items,
            passes=passed.passes,
            send_s=passed.send_s,
            tokens_per_step=job.tokens_per_step,
            num_devices=plan.num_devices,
            model_flops=float(_model_flops(job)) * job.tokens_per_step,
            peak_flops_per_s=self._cluster.device.peak(job.precision),
        )

    def _passed(self, plan: Plan) -> "_Passed":
        """It does not depend on how states are kept."""
        policy = plan.recompute, plan.recompute_layers, plan.recompute_kept
        key = (Slice.of(plan), plan.num_devices, plan.pp, plan.schedule, plan.stage_layers, policy, plan.techniques)
        if key not in self._pipelines:
            if len(self._pipelines) >= KEPT_PIPELINES:  # plans of one pipeline are asked for together
                self._pipelines.clear()
            passes = self._passes(plan)
            items, message_s = _pipeline(self._job, self._cluster, plan, passes, self._efficiency)
            self._pipelines[key] = _Passed(items, passes, message_s)
        return self._pipelines[key]

    def _passes(self, plan: Plan) -> tuple[PassTime, ...]:
        """Of every virtual stage."""
        found, first = [], 0
        cut, last = Slice.of(plan), len(plan.stage_layers) - 1
        policy = plan.recompute, plan.recompute_layers, plan.recompute_kept
        common = (cut, plan.pp > 1, plan.schedule, policy, plan.techniques)
        for place, size in enumerate(plan.stage_layers):
            kinds = self._kinds[first : first + size]
            first += size
            key = (common, kinds, place == 0, place == last)
            if key not in self._stages:
                self._stages[key] = self._virtual_stage(plan, cut, *key[1:])
            found.append(self._stages[key])
        return tuple(found)

    def _virtual_stage(self, plan: Plan, cut: Slice, kinds: tuple[int, ...], is_first: bool, is_last: bool) -> PassTime:
        forward: dict[str, float] = {}
        backward: dict[str, float] = {}
        weight_s = repeated_s = 0.0
        extra = self._kinds[self._job.model.num_layers :] if is_last else ()
        repeats = 0  # of the forward pass, before gradients of the input and in zero_bubble again before the weights'
        if plan.pp > 1 and self._job.engine.keeps == "inputs":
            repeats = (not is_last) + (plan.schedule == "zero_bubble" and not is_first)
        most = 0 if plan.recompute == "none" else plan.recompute_layers
        counts = Counter((kind, most is None or index < most) for index, kind in enumerate((*kinds, *extra)))
        for (kind, is_again), count in counts.items():
            each = self._block(plan, cut, kind, is_again)
            weight_s += count * each.weight_s
            add_parts(forward, each.forward_parts, count)
            add_parts(backward, each.backward_parts, count)
            # a block whose input is kept goes forward only where it runs again, in zero_bubble twice
            is_kept = repeats > 0 and is_again and plan.recompute_kept == "block_inputs" and not is_last
            repeated_s += count * (repeats - is_kept) * each.forward_s
        num_heads = 1 + len(extra) if is_last else 0
        ends, ends_back = ends_time(self._job, self._cluster, plan, self._efficiency, is_first, num_heads)
        add_parts(forward, ends)
        add_parts(backward, ends_back)
        if repeats:
            add_parts(backward, {"recompute": repeated_s + repeats * sum(ends.values())})
        return PassTime.of(forward, backward, weight_s)

    def _block(self, plan: Plan, cut: Slice, kind: int, is_again: bool) -> PassTime:
        key = (cut, plan.recompute, kind, is_again, plan.techniques)
        if key not in self._blocks:
            imbalance = among_ranks(plan, self._imbalance.expected)
            self._blocks[key] = block_time(self._job, self._cluster, plan, imbalance, self._efficiency, kind, is_again)
        return self._blocks[key]

    def _between(self, plan: Plan, items: Mapping[str, float]) -> dict[str, float]:
        """What comes after the passes: gradients summed, weights updated and given back."""
        ends = [self._of_parameters(plan, stage) for stage in {0, plan.pp - 1}]
        largest = max(ends, key=_total).copy()
        num_micro = plan.num_micro(self._job)
        if plan.zero_stage >= 2:
            largest["gradients"] *= num_micro
        if plan.zero_stage == 3:
            largest["weights"] *= 2 * num_micro
        if self._job.engine.copies_gradients and (num_micro > 1 or plan.pp > 1):
            largest["gradients"] += num_micro * self._added_s(plan)
        window = sum(value for part, value in items.items() if part not in ("pp", "bubble")) / (
            1 if plan.zero_stage >= 2 else num_micro
        )
        overlaps = self._job.engine.overlaps | ({"gradients"} if sums_early(self._job, plan) else frozenset())
        for part in ("gradients", "weights"):
            if part in overlaps:
                largest[part] -= self._efficiency.hidden * min(largest[part], window / 2)
        return largest

    def _added_s(self, plan: Plan) -> float:
        """Of a micro-batch's gradients, read and added to the sums."""
        parameters: float = max(sum(stage_parameters(self._job, plan, stage)) for stage in {0, plan.pp - 1})
        if plan.zero_stage >= 2:
            parameters /= plan.dp * plan.cp
        device = self._cluster.device
        return SUM_ACCESSES * FP32_BYTES * parameters / (device.memory_bytes_per_s * self._efficiency.vector)

    def _of_parameters(self, plan: Plan, stage: int) -> dict[str, float]:
        counts = stage_parameters(self._job, plan, stage)
        calls = max(plan.stage_layers) * plan.chunks if plan.zero_stage == 3 else 1
        key = (counts, plan.sizes, calls, plan.zero_stage, plan.offload_optimizer, plan.techniques)
        if key not in self._updates:
            self._updates[key] = _of_parameters(self._job, self._cluster, plan, self._efficiency, calls, *counts)
        return self._updates[key]


class _Passed(NamedTuple):
    """A plan's `items` before its gradients are summed, its passes, and the seconds of a message between stages."""

    items: dict[str, float]
    passes: tuple[PassTime, ...]
    send_s: float


def _total(items: Mapping[str, float]) -> float:
    return sum(items.values())


@lru_cache(maxsize=64)
def _model_flops(job: Job) -> int:
    return training_flops_per_token(job.model, job.seq_len)


class Pipeline(NamedTuple):
    """How long the busiest stage computes in a step, how long it is idle, and which it is."""

    busy_s: float
    bubble_s: float
    busiest: int


def pipeline_s(schedule: ScheduleName, passes: Sequence[PassTime], pp: int, num_micro: int) -> Pipeline:
    """The busiest stage's passes, and as bubble each other stage's once, which fill and drain the pipeline (Narayanan
    et al., 2021, section 2.2), a chunk's at a time when interleaved; zero_bubble fills it with the weights' gradients
    (Qi et al., 2024, table 1)."""
    chunks = len(passes) // pp
    stages = [passes[stage::pp] for stage in range(pp)]
    busy = [sum(each.forward_s + each.backward_s for each in stage) for stage in stages]
    busiest = max(range(pp), key=busy.__getitem__)
    bubble_s = (sum(busy) - busy[busiest]) / chunks
    if schedule == "zero_bubble":
        bubble_s -= 2 * sum(each.weight_s for each in passes) * (pp - 1) / pp
    return Pipeline(num_micro * busy[busiest], max(0.0, bubble_s), busiest)


def _pipeline(
    job: Job, cluster: Cluster, plan: Plan, passes: tuple[PassTime, ...], efficiency: Efficiency
) -> tuple[dict[str, float], float]:
    """The busiest stage's passes by part, the bubble, and messages where nothing else is done; one message."""
    num_micro = plan.num_micro(job)
    found = pipeline_s(plan.schedule, passes, plan.pp, num_micro)
    items: dict[str, float] = {}
    for each in passes[found.busiest :: plan.pp]:
        for parts in (each.forward_parts, each.backward_parts):
            add_parts(items, {part: num_micro * value for part, value in parts.items()})
    if plan.pp == 1:
        return {**items, "bubble": 0.0}, 0.0
    size_bytes = tokens(job, Slice.of(plan)) * job.model.hidden * job.activation_bytes / plan.tp
    message_s = send_s(size_bytes, span(plan, "pp", cluster.devices_per_node), cluster, efficiency)
    waiting_s = 2 * message_s * (plan.pp - 1 + plan.chunks)
    return {**items, "pp": waiting_s, "bubble": found.bubble_s}, message_s


def _of_parameters(
    job: Job, cluster: Cluster, plan: Plan, efficiency: Efficiency, calls: int, dense: int, expert: int
) -> dict[str, float]:
    """Once each: gradients summed and weights given back, in so many calls, and what the optimizer reads and writes."""
    engine, device = job.engine, cluster.device
    is_gathered = plan.zero_stage == 3
    weight_bytes = min(engine.weight_bytes, job.activation_bytes) if is_gathered else engine.weight_bytes
    found = {"gradients": 0.0, "weights": 0.0, "optimizer": 0.0}
    for axis, parameters in (("dp x cp", dense), ("edp", expert)):
        if parameters == 0:
            continue
        group = span(plan, axis, cluster.devices_per_node)
        is_cut = plan.zero_stage > 0 and group.size > 1
        found["gradients"] += gradients_s(job, cluster, plan, axis, parameters, calls, efficiency)
        if is_cut:
            gathered_bytes = weight_bytes * parameters / calls
            found["weights"] += calls * collective_s("all_gather", gathered_bytes, group, cluster, efficiency)
        touched = 2 * (engine.gradient_bytes + engine.sharded_state_bytes) * parameters
        rate = device.host_bytes_per_s if plan.offload_optimizer else device.memory_bytes_per_s * efficiency.vector
        found["optimizer"] += touched / (group.size if is_cut else 1) / rate
    return found
