"""How long a micro-batch takes through one block, and through what comes before and after the blocks. Pure.

Matrix products and attention at a share of the peak that depends on their shape, other operators at the memory's rate,
collectives by `collectives`. See docs/planner.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from ascend_moe_train.parallel.expert_sizes import expected_nodes
from ascend_moe_train.planner.collectives import Span, collective_s, span
from ascend_moe_train.planner.efficiency import Efficiency
from ascend_moe_train.planner.hardware import Cluster, Device
from ascend_moe_train.planner.layers import FP32_BYTES, ROUTED_AXES, BlockCost, Product, Slice, block_cost, tokens
from ascend_moe_train.planner.plan import Engine, Job, Plan
from ascend_moe_train.planner.wires import exchange_s, travels_beside

TILE = 128 * 256  # of a result, that a core makes at a time: what libraries take for large products
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


class _Compute(NamedTuple):
    """Seconds by part of a block's passes, of the gradients of its weights, and of attention products once."""

    forward: dict[str, float]
    backward: dict[str, float]
    weight_s: float
    core_s: float


def block_time(
    job: Job, cluster: Cluster, plan: Plan, imbalance: float, efficiency: Efficiency, kind: int, is_again: bool
) -> PassTime:
    """Of a block of a kind (`kind_of`); `is_again`: by the plan's policy, parts of it go forward once more."""
    cost = block_cost(job, Slice.of(plan), kind)
    computed = _compute(job, cluster, plan, cost, imbalance, efficiency)
    forward, backward = computed.forward, computed.backward
    moved = _communication(job, cluster, plan, cost, imbalance, efficiency)
    if job.engine.pairs_passes and "ep" in moved:
        moved["ep"] = max(0.0, moved["ep"] - PAIRED_SHARE * sum(forward.values()))
    add_parts(backward, moved)
    if is_again:
        again = sum(forward.values()) + sum(moved.values())
        if plan.recompute == "selective":
            again = _selected_s(job.engine, computed, moved)
        add_parts(backward, {"recompute": again})
    add_parts(forward, moved)
    return PassTime.of(forward, backward, computed.weight_s)


def _selected_s(engine: Engine, computed: _Compute, moved: Mapping[str, float]) -> float:
    """What a selective policy makes again: see `Engine.selective`."""
    forward, names = computed.forward, engine.selective
    again = computed.core_s if "core" in names or not engine.flash else 0.0
    if "experts" in names:
        again += forward["experts"] + sum(moved.get(axis, 0.0) for axis in ROUTED_AXES)
    if "products" in names:
        again += (sum(forward.values()) - forward["other"] - computed.core_s) / 2
    return again + (forward["other"] if names & {"activations", "norms", "products", "latents"} else 0.0)


def ends_time(
    job: Job, cluster: Cluster, plan: Plan, efficiency: Efficiency, is_first: bool, num_heads: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Forward and backward pass of the embedding and of `num_heads` heads with their loss."""
    cut, device, pace = Slice.of(plan), cluster.device, job.engine.pace
    t, D, V = tokens(job, cut), job.model.hidden, job.model.vocab_size
    rate = device.memory_bytes_per_s * efficiency.vector
    forward: dict[str, float] = {}
    other = 3 * t * D * job.activation_bytes if is_first else 0.0
    other += num_heads * 4 * t * V / plan.tp * FP32_BYTES
    if other:
        forward["other"] = pace * other / rate
    backward = {part: 2 * value for part, value in forward.items()}
    if num_heads:
        peak = device.peak("bf16" if job.precision == "fp8" else job.precision)
        head = Product("head", t, V / plan.tp, D)
        made, *gradients = (pace * num_heads * product_s(each, device, peak, efficiency) for each in head.passes)
        forward["head"], backward["head"] = made, sum(gradients)
    return forward, backward


def product_s(product: Product, device: Device, peak_flops_per_s: float, efficiency: Efficiency) -> float:
    """Seconds of a matrix product: `product` of the peak, less where a dimension is short, and where the tiles of the
    result are not many more than the cores, which are idle for half a round at the end (NVIDIA, Matrix Multiplication
    Background, wave quantization). One core is never idle while another works."""
    knee = efficiency.product_knee
    share = efficiency.product
    for size in (product.m, product.n, product.k):
        share *= size / (size + knee)
    rounds = product.m * product.n * product.times / (TILE * device.num_cores)
    idle_rounds = 0.5 if device.num_cores > 1 else 0.0
    return product.flops * (1 + idle_rounds / rounds) / (peak_flops_per_s * share)


def _core_s(job: Job, cluster: Cluster, plan: Plan, cost: BlockCost, efficiency: Efficiency) -> float:
    """Attention products are done in 16 bits where matrix products are done in 8; in a ring with the keys of one rank
    at a time."""
    peak = cluster.device.peak("bf16" if job.precision == "fp8" else job.precision)
    keys = job.seq_len / (plan.cp if plan.context == "ring" else 1)
    share = efficiency.core * keys / (keys + efficiency.core_knee)
    return job.engine.core_pace * cost.core_flops / (peak * share)


def _compute(
    job: Job, cluster: Cluster, plan: Plan, cost: BlockCost, imbalance: float, efficiency: Efficiency
) -> _Compute:
    device, pace = cluster.device, job.engine.pace
    peak, rate = device.peak(job.precision), device.memory_bytes_per_s * efficiency.vector
    core_s = pace * _core_s(job, cluster, plan, cost, efficiency)
    sorted_s = pace * imbalance * cost.routed_vector_bytes / rate
    other_s = pace * (cost.vector_bytes / rate + cost.num_operators * efficiency.operator_s)
    forward = {"attention": core_s, "feed-forward": 0.0, "experts": sorted_s, "other": other_s}
    backward = {"attention": BACKWARD_CORE * core_s, "feed-forward": 0.0}
    summed = 0 if job.engine.has_buffers else cost.dense + cost.expert
    added_s = pace * 2 * job.engine.gradient_bytes * summed / rate
    backward |= {"experts": 2 * sorted_s, "other": 2 * other_s + added_s}
    weight_s = sorted_s + added_s
    for product in cost.products:
        is_routed = product.part == "experts"
        factor = pace * (imbalance / efficiency.grouped if is_routed else 1.0)
        launch_s = pace * product.times * efficiency.operator_s if is_routed else 0.0
        made, of_input, of_weight = (
            factor * product_s(each, device, peak, efficiency) + launch_s for each in product.passes
        )
        forward[product.part] += made
        backward[product.part] += of_input + of_weight
        weight_s += of_weight
    return _Compute(forward, backward, weight_s, core_s)


def _communication(
    job: Job, cluster: Cluster, plan: Plan, cost: BlockCost, imbalance: float, efficiency: Efficiency
) -> dict[str, float]:
    """Exposed, by axis: of what the engine overlaps, the share that is not hidden. Ring attention runs beside its
    products."""
    found: dict[str, float] = {}
    overlaps = job.engine.overlaps | ({"cp"} if plan.context == "ring" else frozenset())
    peak = cluster.device.peak(job.precision)
    for move in cost.moves:
        group = span(plan, move.axis, cluster.devices_per_node)
        size_bytes = move.size_bytes * (imbalance if move.axis in ROUTED_AXES else 1.0)
        if move.axis == "ep":
            value = exchange_s(job, cluster, plan, size_bytes, efficiency, _far_share(job, plan, group))
        else:
            value = collective_s(move.verb, size_bytes, group, cluster, efficiency)
        if move.axis in overlaps:
            behind_s = value
            if move.beside is not None:
                behind_s = min(value, job.engine.pace * product_s(move.beside, cluster.device, peak, efficiency))
            value -= efficiency.hidden * behind_s
        found[move.axis] = found.get(move.axis, 0.0) + value
    if "ep" in found and travels_beside(job, plan):
        shared = [product for product in cost.products if product.part == "feed-forward"]
        behind_s = sum(job.engine.pace * product_s(each, cluster.device, peak, efficiency) for each in shared)
        found["ep"] -= efficiency.hidden * min(found["ep"], behind_s)
    return found


def _far_share(job: Job, plan: Plan, group: Span) -> float:
    """Of K rows of a token the share that crosses where each node gets it once; of ours one half if only copies do."""
    moe, how = job.model.moe, plan.techniques.dedup_tokens
    if moe is None or not (job.engine.sends_once or how):
        return 1.0
    nodes = plan.nodes[1] if plan.nodes is not None else group.size / group.inside
    share = expected_nodes(moe.num_experts, moe.top_k, nodes) / moe.top_k
    return (1 + share) / 2 if how == "copies" else share


def add_parts(totals: dict[str, float], parts: Mapping[str, float], times: float = 1) -> None:
    """Onto `totals`, so many times."""
    for part, value in parts.items():
        totals[part] = totals.get(part, 0.0) + times * value
