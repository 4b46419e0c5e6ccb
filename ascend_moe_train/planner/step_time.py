"""How long a step of a plan takes, item by item. Pure.

Matrix products and attention at a share of the peak that depends on their shape, other operators at the memory's rate,
collectives by `collectives`, the pipeline in closed form. See docs/planner.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log, sqrt
from typing import NamedTuple

from ascend_moe_train.model.counts import training_flops_per_token
from ascend_moe_train.parallel.config import ScheduleName
from ascend_moe_train.planner.collectives import Span, collective_s, send_s, span
from ascend_moe_train.planner.efficiency import Efficiency, efficiencies
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.layers import (
    FP32_BYTES,
    ROUTED_AXES,
    BlockCost,
    Product,
    Slice,
    block_cost,
    kind_of,
    tokens,
)
from ascend_moe_train.planner.memory import stage_parameters
from ascend_moe_train.planner.plan import TYPICAL, Imbalance, Job, Plan

BACKWARD_PRODUCTS = 2  # of each product, one for the gradient of each factor
PAIRED_SHARE = 0.9  # of the other pass's computation that an exchange can hide behind
BACKWARD_CORE = 2.5  # flash attention computes the scores over again (Dao, 2023, section 3.1)


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Of a micro-batch through a virtual stage; `weight_s` is the part of `backward_s` that zero_bubble does later.
    `forward_parts` and `backward_parts` share them out over compute and exposed communication by kind."""

    forward_s: float
    backward_s: float
    weight_s: float
    forward_parts: Mapping[str, float]
    backward_parts: Mapping[str, float]


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

    @property
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


COMMUNICATION = ("tp", "cp", *ROUTED_AXES, "pp", "gradients", "weights")


def time_of(
    job: Job,
    cluster: Cluster,
    plan: Plan,
    imbalance: Imbalance = TYPICAL,
    efficiency: Efficiency | None = None,
) -> StepTime:
    """The step of a plan that `check` has nothing against. Without `efficiency`, that of the device's class."""
    found = efficiency if efficiency is not None else efficiencies()[cluster.device.efficiency]
    passes = _passes(job, cluster, plan, imbalance.expected, found)
    items, message_s = _pipeline(job, cluster, plan, passes, found)
    items |= _between(job, cluster, plan, found, items)
    items["straggler"] = found.slow * sqrt(2 * log(max(2, plan.num_devices))) / 3 * sum(items.values())
    return StepTime(
        items=items,
        passes=passes,
        send_s=message_s,
        tokens_per_step=job.tokens_per_step,
        num_devices=plan.num_devices,
        model_flops=float(_model_flops(job)) * job.tokens_per_step,
        peak_flops_per_s=cluster.device.peak(job.precision),
    )


@lru_cache(maxsize=64)
def _model_flops(job: Job) -> int:
    return training_flops_per_token(job.model, job.seq_len)


def _passes(job: Job, cluster: Cluster, plan: Plan, imbalance: float, efficiency: Efficiency) -> tuple[PassTime, ...]:
    blocks: dict[tuple[int, int], PassTime] = {}
    found: dict[tuple[tuple[int, ...], bool, bool], PassTime] = {}
    passes, first = [], 0
    for place, size in enumerate(plan.stage_layers):
        kinds = tuple(kind_of(job, layer) for layer in range(first, first + size))
        first += size
        key = (kinds, place == 0, place == len(plan.stage_layers) - 1)
        if key not in found:
            found[key] = _virtual_stage(job, cluster, plan, imbalance, efficiency, blocks, *key)
        passes.append(found[key])
    return tuple(passes)


def _virtual_stage(
    job: Job,
    cluster: Cluster,
    plan: Plan,
    imbalance: float,
    efficiency: Efficiency,
    blocks: dict[tuple[int, int], PassTime],
    kinds: tuple[int, ...],
    is_first: bool,
    is_last: bool,
) -> PassTime:
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    weight_s = repeated_s = 0.0
    depth = job.model.mtp.depth if job.model.mtp is not None and is_last else 0
    extra = tuple(job.model.num_layers + each for each in range(depth))
    repeats = 0  # of the forward pass, before gradients of the input and in zero_bubble again before those of weights
    if plan.pp > 1 and job.engine.keeps == "inputs":
        repeats = (not is_last) + (plan.schedule == "zero_bubble" and not is_first)
    for index, kind in enumerate((*kinds, *(kind_of(job, layer) for layer in extra))):
        is_again = plan.recompute != "none" and (plan.recompute_layers is None or index < plan.recompute_layers)
        key = (kind, int(is_again))
        if key not in blocks:
            blocks[key] = _block(job, cluster, plan, imbalance, efficiency, kind, is_again)
        each = blocks[key]
        weight_s += each.weight_s
        _add(forward, each.forward_parts)
        _add(backward, each.backward_parts)
        # a block whose input is kept goes forward only where it runs again, in zero_bubble twice
        is_kept = repeats > 0 and is_again and plan.recompute_kept == "block_inputs" and not is_last
        repeated_s += (repeats - is_kept) * each.forward_s
    ends = _ends(job, cluster, plan, efficiency, is_first, (1 + depth) if is_last else 0)
    _add(forward, ends)
    _add(backward, {part: 2 * value for part, value in ends.items()})
    if repeats:
        _add(backward, {"recompute": repeated_s + repeats * sum(ends.values())})
    return PassTime(
        forward_s=sum(forward.values()),
        backward_s=sum(backward.values()),
        weight_s=weight_s,
        forward_parts=forward,
        backward_parts=backward,
    )


def _block(
    job: Job, cluster: Cluster, plan: Plan, imbalance: float, efficiency: Efficiency, kind: int, is_again: bool
) -> PassTime:
    cost = block_cost(job, Slice.of(plan), kind)
    forward = _compute(job, cluster, cost, imbalance, efficiency)
    moved = _communication(job, cluster, plan, cost, imbalance, efficiency)
    if job.engine.pairs_passes and "ep" in moved:
        moved["ep"] = max(0.0, moved["ep"] - PAIRED_SHARE * sum(forward.values()))
    core_s = job.engine.pace * _core_s(job, cluster, cost, efficiency)
    backward = {part: BACKWARD_PRODUCTS * value for part, value in forward.items()}
    backward["attention"] += (BACKWARD_CORE - BACKWARD_PRODUCTS) * core_s
    weight_s = sum(value for part, value in forward.items() if part != "other") - core_s
    _add(backward, moved)
    if is_again:
        again = sum(forward.values()) + sum(moved.values())
        if plan.recompute == "selective":
            again = forward["other"] + (0.0 if job.engine.flash else core_s)
        _add(backward, {"recompute": again})
    _add(forward, moved)
    return PassTime(
        forward_s=sum(forward.values()),
        backward_s=sum(backward.values()),
        weight_s=weight_s,
        forward_parts=forward,
        backward_parts=backward,
    )


def _core_s(job: Job, cluster: Cluster, cost: BlockCost, efficiency: Efficiency) -> float:
    """Attention products are done in 16 bits where matrix products are done in 8."""
    peak = cluster.device.peak("bf16" if job.precision == "fp8" else job.precision)
    share = efficiency.core * job.seq_len / (job.seq_len + efficiency.core_knee)
    return job.engine.core_pace * cost.core_flops / (peak * share)


def product_s(product: Product, peak_flops_per_s: float, efficiency: Efficiency) -> float:
    """Seconds of a matrix product: `product` of the peak, less where a dimension is short."""
    knee = efficiency.product_knee
    share = efficiency.product
    for size in (product.m, product.n, product.k):
        share *= size / (size + knee)
    return product.flops / (peak_flops_per_s * share)


def _compute(job: Job, cluster: Cluster, cost: BlockCost, imbalance: float, efficiency: Efficiency) -> dict[str, float]:
    peak = cluster.device.peak(job.precision)
    parts = {"attention": _core_s(job, cluster, cost, efficiency), "feed-forward": 0.0, "experts": 0.0}
    for product in cost.products:
        is_routed = product.part == "experts"
        parts[product.part] += (imbalance if is_routed else 1.0) * product_s(product, peak, efficiency)
        parts[product.part] += product.times * efficiency.operator_s if is_routed else 0.0
    rate = cluster.device.memory_bytes_per_s * efficiency.vector
    parts["experts"] += imbalance * cost.routed_vector_bytes / rate
    parts["other"] = cost.vector_bytes / rate + cost.num_operators * efficiency.operator_s
    return {part: job.engine.pace * value for part, value in parts.items()}


def _communication(
    job: Job, cluster: Cluster, plan: Plan, cost: BlockCost, imbalance: float, efficiency: Efficiency
) -> dict[str, float]:
    """Exposed, by axis: of what the engine overlaps, the share that is not hidden. Ring attention runs beside its
    products."""
    found: dict[str, float] = {}
    for move in cost.moves:
        group = span(plan, move.axis, cluster.devices_per_node)
        size_bytes = move.size_bytes * (imbalance if move.axis in ROUTED_AXES else 1.0)
        far_share = _far_share(job, group) if move.axis == "ep" else 1.0
        value = collective_s(move.verb, size_bytes, group, cluster, efficiency, far_share=far_share)
        found[move.axis] = found.get(move.axis, 0.0) + value
    overlaps = job.engine.overlaps | ({"cp"} if plan.context == "ring" else frozenset())
    return {axis: value * (1 - efficiency.hidden) if axis in overlaps else value for axis, value in found.items()}


def _far_share(job: Job, group: Span) -> float:
    """Of K rows of a token the expected number of nodes that they go to, through K, where each node gets it once."""
    moe = job.model.moe
    if moe is None or not job.engine.sends_once:
        return 1.0
    nodes = group.size / group.inside
    return nodes * (1 - (1 - 1 / nodes) ** moe.top_k) / moe.top_k


def _ends(
    job: Job, cluster: Cluster, plan: Plan, efficiency: Efficiency, is_first: bool, num_heads: int
) -> dict[str, float]:
    """Forward pass of the embedding and of `num_heads` heads with their loss."""
    cut = Slice.of(plan)
    t, D, V = tokens(job, cut), job.model.hidden, job.model.vocab_size
    rate = cluster.device.memory_bytes_per_s * efficiency.vector
    found: dict[str, float] = {}
    if is_first:
        found["other"] = 3 * t * D * job.activation_bytes / rate
    if num_heads:
        product = Product("head", t, V / plan.tp, D)
        peak = cluster.device.peak("bf16" if job.precision == "fp8" else job.precision)
        found["head"] = num_heads * product_s(product, peak, efficiency)
        found["other"] = found.get("other", 0.0) + num_heads * 4 * t * V / plan.tp * FP32_BYTES / rate
    return {part: job.engine.pace * value for part, value in found.items()}


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
            _add(items, {part: num_micro * value for part, value in parts.items()})
    if plan.pp == 1:
        return {**items, "bubble": 0.0}, 0.0
    size_bytes = tokens(job, Slice.of(plan)) * job.model.hidden * job.activation_bytes / plan.tp
    message_s = send_s(size_bytes, span(plan, "pp", cluster.devices_per_node), cluster, efficiency)
    waiting_s = 2 * message_s * (plan.pp - 1 + plan.chunks)
    return {**items, "pp": waiting_s, "bubble": found.bubble_s}, message_s


def _between(
    job: Job, cluster: Cluster, plan: Plan, efficiency: Efficiency, items: Mapping[str, float]
) -> dict[str, float]:
    """What comes after the passes: gradients summed, weights updated and given back."""
    largest: dict[str, float] = {}
    for stage in {0, plan.pp - 1}:
        found = _of_parameters(job, cluster, plan, efficiency, *stage_parameters(job, plan, stage))
        if sum(found.values()) > sum(largest.values()):
            largest = found
    num_micro = plan.num_micro(job)
    if plan.zero_stage >= 2:
        largest["gradients"] *= num_micro
    if plan.zero_stage == 3:
        largest["weights"] *= 2 * num_micro
    window = sum(value for part, value in items.items() if part not in ("pp", "bubble")) / (
        1 if plan.zero_stage >= 2 else num_micro
    )
    for part in ("gradients", "weights"):
        if part in job.engine.overlaps:
            hidden = efficiency.hidden * min(largest[part], window / 2)
            largest[part] -= hidden
    return largest


def _of_parameters(
    job: Job, cluster: Cluster, plan: Plan, efficiency: Efficiency, dense: int, expert: int
) -> dict[str, float]:
    """Once each: gradients summed, weights given back (gathered, in stage 3 as often as they are used), and what the
    optimizer reads and writes."""
    engine, device = job.engine, cluster.device
    is_gathered = plan.zero_stage == 3
    weight_bytes = min(engine.weight_bytes, job.activation_bytes) if is_gathered else engine.weight_bytes
    calls = max(plan.stage_layers) * plan.chunks if is_gathered else 1
    found = {"gradients": 0.0, "weights": 0.0, "optimizer": 0.0}
    for axis, parameters in (("dp x cp", dense), ("edp", expert)):
        if parameters == 0:
            continue
        group = span(plan, axis, cluster.devices_per_node)
        is_cut = plan.zero_stage > 0 and group.size > 1
        gradient_bytes, gathered_bytes = engine.gradient_bytes * parameters / calls, weight_bytes * parameters / calls
        verb = "reduce_scatter" if is_cut else "all_reduce"
        found["gradients"] += calls * collective_s(verb, gradient_bytes, group, cluster, efficiency)
        if is_cut:
            found["weights"] += calls * collective_s("all_gather", gathered_bytes, group, cluster, efficiency)
        touched = 2 * (engine.gradient_bytes + engine.sharded_state_bytes) * parameters
        rate = device.host_bytes_per_s if plan.offload_optimizer else device.memory_bytes_per_s * efficiency.vector
        found["optimizer"] += touched / (group.size if is_cut else 1) / rate
    return found


def _add(totals: dict[str, float], parts: Mapping[str, float]) -> None:
    for part, value in parts.items():
        totals[part] = totals.get(part, 0.0) + value
