"""How long what `Techniques` change takes: token rows to experts, and sums of gradients. Pure.

What codes cost is guessed from the memory that they read and write, at the rate of memory-bound operators.
"""

from collections.abc import Mapping
from types import MappingProxyType

from ascend_moe_train.parallel.expert_sizes import row_bytes
from ascend_moe_train.planner.collectives import Span, collective_s, span
from ascend_moe_train.planner.efficiency import Efficiency
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.layers import FP32_BYTES
from ascend_moe_train.planner.plan import Job, Plan
from ascend_moe_train.planner.sent import compressed

# Bytes that are read and written for an element of a compressed sum besides the collectives: what comes and was lost,
# what is lost, the result, and codes; of PowerSGD two products and one back besides.
CODED_BYTES: Mapping[str, int] = MappingProxyType({"int8": 18, "onebit_adam": 17, "powersgd": 36})
HALF_BYTES, SCALE_BYTES = 2, 4


def sums_early(job: Job, plan: Plan) -> bool:
    """Whether gradients are summed while the backward pass goes on (`zero.apply_zero`)."""
    techniques, is_shared = plan.techniques, plan.dp * plan.cp > 1 or plan.edp > 1
    if not techniques.overlap or techniques.is_compressed or techniques.reduce_dtype == "fp16" or not is_shared:
        return False
    return plan.pp == 1 and (plan.zero_stage == 2 or (plan.zero_stage < 2 and plan.num_micro(job) == 1))


def travels_beside(job: Job, plan: Plan) -> bool:
    """Whether shared experts are computed while rows travel (`expert.make_dispatcher`)."""
    moe, techniques = job.model.moe, plan.techniques
    is_plain = (
        techniques.expert_wire is None and techniques.expert_chunks == 1 and techniques.hierarchical_ranks is None
    )
    return techniques.overlap and is_plain and moe is not None and moe.shared_ffn > 0


def exchange_s(
    job: Job, cluster: Cluster, plan: Plan, size_bytes: float, efficiency: Efficiency, far_share: float
) -> float:
    """Seconds of rows of `size_bytes` as activations, once to experts or back: in chunks, in one step or two, each with
    its codes and their scales; `far_share`: see `collective_s`."""
    techniques, hidden, a = plan.techniques, job.model.hidden, job.activation_bytes
    of_row, wire = hidden * a, techniques.expert_wire
    sizes = [float(of_row)]
    if wire is not None:
        sizes = [row_bytes(hidden, a, wire)]
        if wire != "bf16":
            sizes = [sizes[0] - SCALE_BYTES, SCALE_BYTES]
    groups = exchange_groups(plan, cluster.devices_per_node)
    rows = size_bytes / of_row / techniques.expert_chunks
    sent_s = sum(
        collective_s("all_to_all", rows * size, group, cluster, efficiency, far_share=far_share)
        for size in sizes
        for group in groups
    )
    if wire is not None:
        touched = 2 * len(groups) * rows * (of_row + sum(sizes))
        sent_s += touched / (cluster.device.memory_bytes_per_s * efficiency.vector)
    return techniques.expert_chunks * sent_s


def exchange_groups(plan: Plan, devices_per_node: int) -> tuple[Span, ...]:
    """The groups that rows go through, one after the other: those of an ep group, or of it the ranks of a node of the
    run and those with the same place in each."""
    node = plan.techniques.hierarchical_ranks
    if node is None or plan.nodes is None:
        return (span(plan, "ep", devices_per_node),)
    inside, across = plan.nodes

    def of(size: int, stride: int) -> Span:
        return Span(size, min(size, max(1, devices_per_node // stride)))

    return of(inside, node // inside), of(across, node)


def gradients_s(
    job: Job, cluster: Cluster, plan: Plan, axis: str, parameters: float, calls: int, efficiency: Efficiency
) -> float:
    """Seconds of the sum of the gradients of so many parameters of a device, in so many calls."""
    techniques, group = plan.techniques, span(plan, axis, cluster.devices_per_node)
    if techniques.is_compressed and axis == "dp x cp" and group.size > 1:
        return _compressed_s(job, cluster, plan, parameters, group, efficiency)
    of_each = job.engine.gradient_bytes
    if techniques.reduce_dtype != "fp32":
        of_each = min(of_each, HALF_BYTES)
    verb = "reduce_scatter" if plan.zero_stage > 0 else "all_reduce"
    found = calls * collective_s(verb, of_each * parameters / calls, group, cluster, efficiency)
    if techniques.reduce_dtype == "fp16":  # the largest magnitude before each bucket
        buckets = -(-job.engine.gradient_bytes * parameters // techniques.bucket_bytes)
        found += buckets * collective_s("all_reduce", SCALE_BYTES, group, cluster, efficiency)
    return found + _into_buckets_s(job, cluster, plan, parameters, group, efficiency)


def _into_buckets_s(
    job: Job, cluster: Cluster, plan: Plan, parameters: float, group: Span, efficiency: Efficiency
) -> float:
    """Gradients are copied into buckets, and their sums out of them."""
    if group.size == 1 or not job.engine.copies_gradients:
        return 0.0
    shares = 1 + (1 / group.size if plan.zero_stage else 1)
    return 2 * shares * FP32_BYTES * parameters / (cluster.device.memory_bytes_per_s * efficiency.vector)


def _compressed_s(
    job: Job, cluster: Cluster, plan: Plan, parameters: float, group: Span, efficiency: Efficiency
) -> float:
    sent, _ = compressed(job, plan)
    found = CODED_BYTES[plan.techniques.compress.method] * parameters
    found /= cluster.device.memory_bytes_per_s * efficiency.vector
    for (verb, _, _), (calls, payload_bytes) in sent.items():
        made = payload_bytes * (group.size if verb == "all_gather" else 1)
        found += calls * collective_s(verb, made / calls, group, cluster, efficiency)
    return found
