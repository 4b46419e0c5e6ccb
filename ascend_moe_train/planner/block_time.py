"""How long a micro-batch takes through one block, and through what comes before and after the blocks. Pure.

Matrix products and attention at a share of the peak that depends on their shape, other operators at the memory's rate,
collectives by `collectives`. See docs/planner.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ascend_moe_train.planner.collectives import Span, collective_s, span
from ascend_moe_train.planner.efficiency import Efficiency
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.layers import FP32_BYTES, ROUTED_AXES, BlockCost, Product, Slice, block_cost, tokens
from ascend_moe_train.planner.plan import Job, Plan

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

    @classmethod
    def of(cls, forward: Mapping[str, float], backward: Mapping[str, float], weight_s: float) -> Self:
        """From its parts."""
        return cls(
            forward_s=sum(forward.values()),
            backward_s=sum(backward.values()),
            weight_s=weight_s,
            forward_parts=forward,
            backward_parts=backward,
        )


def block_time(
    job: Job, cluster: Cluster, plan: Plan, imbalance: float, efficiency: Efficiency, kind: int, is_again: bool
) -> PassTime:
    """Of a block of a kind (`kind_of`); `is_again`: by the plan's policy, parts of it go forward once more."""
    cost = block_cost(job, Slice.of(plan), kind)
    forward = _compute(job, cluster, cost, imbalance, efficiency)
    moved = _communication(job, cluster, plan, cost, imbalance, efficiency)
    if job.engine.pairs_passes and "ep" in moved:
        moved["ep"] = max(0.0, moved["ep"] - PAIRED_SHARE * sum(forward.values()))
    core_s = job.engine.pace * _core_s(job, cluster, cost, efficiency)
    backward = {part: BACKWARD_PRODUCTS * value for part, value in forward.items()}
    backward["attention"] += (BACKWARD_CORE - BACKWARD_PRODUCTS) * core_s
    weight_s = sum(value for part, value in forward.items() if part != "other") - core_s
    add_parts(backward, moved)
    if is_again:
        again = sum(forward.values()) + sum(moved.values())
        if plan.recompute == "selective":
            again = forward["other"] + (0.0 if job.engine.flash else core_s)
        add_parts(backward, {"recompute": again})
    add_parts(forward, moved)
    return PassTime.of(forward, backward, weight_s)


def ends_time(
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


def product_s(product: Product, peak_flops_per_s: float, efficiency: Efficiency) -> float:
    """Seconds of a matrix product: `product` of the peak, less where a dimension is short."""
    knee = efficiency.product_knee
    share = efficiency.product
    for size in (product.m, product.n, product.k):
        share *= size / (size + knee)
    return product.flops / (peak_flops_per_s * share)


def _core_s(job: Job, cluster: Cluster, cost: BlockCost, efficiency: Efficiency) -> float:
    """Attention products are done in 16 bits where matrix products are done in 8."""
    peak = cluster.device.peak("bf16" if job.precision == "fp8" else job.precision)
    share = efficiency.core * job.seq_len / (job.seq_len + efficiency.core_knee)
    return job.engine.core_pace * cost.core_flops / (peak * share)


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


def add_parts(totals: dict[str, float], parts: Mapping[str, float], times: float = 1) -> None:
    """Onto `totals`, so many times."""
    for part, value in parts.items():
        totals[part] = totals.get(part, 0.0) + times * value
