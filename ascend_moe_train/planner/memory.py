"""How much memory each pipeline stage of a plan needs, item by item. Pure.

Static items are closed forms of Rajbhandari et al. (2020, arXiv 1910.02054) with the experts' own data parallel size;
activations those of Korthikanti et al. (2022, arXiv 2205.05198). See docs/planner.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ascend_moe_train.parallel.config import ScheduleName
from ascend_moe_train.parallel.expert_sizes import row_bytes
from ascend_moe_train.planner.cpu_graph import graph_bytes
from ascend_moe_train.planner.hardware import Cluster, Device
from ascend_moe_train.planner.layers import (
    AXES,
    FP32_BYTES,
    ROUTED_AXES,
    Slice,
    block_cost,
    block_parameters,
    kind_of,
    tokens,
)
from ascend_moe_train.planner.plan import TYPICAL, Imbalance, Job, Plan, among_ranks
from ascend_moe_train.planner.sent import compressed
from ascend_moe_train.planner.summing import early_bytes, reduced_bytes, summed_bytes

HEAD_SHARE = 0.75  # of the head's gradient, still there at the fullest moment
# of "cpu" Python, MindSpore, and what a compiled graph takes that has no layers (see cpu_graph.py)
CONTEXT_BYTES: Mapping[str, float] = {"npu": 4.0e9, "gpu": 1.5e9, "cpu": 0.273e9}
GROUP_BUFFER_BYTES: Mapping[str, float] = {"npu": 200e6, "gpu": 100e6, "cpu": 1e6}
RESERVE_SHARE = 0.02  # lost between pieces of what is handed out and taken back
KEPT_STAGES = 4096
CACHE_BYTES: Mapping[str, float] = {"npu": 0.0, "gpu": 6.0e9, "cpu": 0.0}
CACHE_SHARE = 0.08  # of what comes and goes, where anything is cached
LOOSE_SHARE = 0.16  # of weights and gradients that are not in buffers


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one device of a pipeline stage at the fullest moment of a step, by item. `cached_bytes` more are what
    the device's own tool shows: libraries' workspaces, and what a caching allocator holds until it is needed."""

    items: Mapping[str, float]
    cached_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Of all items."""
        return sum(self.items.values())


@dataclass(frozen=True, kw_only=True)
class Memory:
    """`host_bytes` is what optimizer states take in host memory for each device, on the fullest stage."""

    stages: tuple[StageMemory, ...]
    host_bytes: float

    @property
    def peak_bytes(self) -> float:
        """Of the fullest stage."""
        return max(stage.total_bytes for stage in self.stages)

    @property
    def fullest(self) -> int:
        """The stage that needs the most."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total_bytes)

    def fits(self, device: Device) -> bool:
        """Whether every stage has room."""
        return self.peak_bytes <= device.memory_bytes and self.host_bytes <= device.host_memory_bytes


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of weights, gradients and optimizer states of some parameters on one device."""

    weights: float
    gradients: float
    optimizer: float
    host: float = 0.0


def states_of(job: Job, parameters: float, size: int, zero_stage: int, *, offload: bool = False) -> States:
    """P parameters of a device whose data parallel group has d ranks; w, g, o bytes of `Engine`:

        stage   weights   gradients   optimizer
        0       w P       g P         o P (whole)
        1       w P       g P         o P / d
        2       w P       g P / d     o P / d
        3       w P / d   g P / d     o P / d

    With w 2, g 2, o 12 these are 16, 4 + 12 / d, 2 + 14 / d and 16 / d bytes (Rajbhandari et al., 2020, figure 1).
    """
    engine = job.engine
    is_sharded = zero_stage > 0 and size > 1
    state = engine.sharded_state_bytes / size if is_sharded else engine.state_bytes
    is_own = engine.sharded_state_bytes != engine.state_bytes and zero_stage == 3 and is_sharded
    if is_own:
        state = engine.state_bytes / size
    return States(
        weights=engine.weight_bytes * parameters / (size if zero_stage == 3 else 1),
        gradients=engine.gradient_bytes * parameters / (size if zero_stage >= 2 else 1),
        optimizer=0.0 if offload else state * parameters,
        host=(engine.sharded_state_bytes if is_sharded else 12.0) * parameters / (size if is_sharded else 1)
        if offload
        else 0.0,
    )


def stage_parameters(job: Job, plan: Plan, stage: int) -> tuple[int, int]:
    """(dense, expert) parameters on one device of a stage: its blocks, and at the ends embedding, head, norm and
    multi-token prediction."""
    model, cut = job.model, Slice.of(plan)
    dense = expert = 0
    for kind, count in _kinds_on(job, plan.stage_layers, plan.pp, stage):
        of_dense, of_expert = block_parameters(job, cut, kind)
        dense, expert = dense + count * of_dense, expert + count * of_expert
    table = -(-model.vocab_size * model.hidden // plan.tp)
    is_last = stage == plan.pp - 1
    if stage == 0:
        dense += table
    if is_last:
        dense += model.hidden
        needs_own = not model.tie_embeddings or plan.pp > 1
        dense += table if needs_own else 0
        if model.mtp is not None:
            dense += table if plan.pp > 1 and not model.tie_embeddings else 0
            for depth in range(model.mtp.depth):
                of_dense, of_expert = block_parameters(job, cut, model.num_layers + depth)
                dense += of_dense + 2 * model.hidden * model.hidden + 3 * model.hidden
                expert += of_expert
    return dense, expert


@lru_cache(maxsize=65536)
def _kinds_on(job: Job, stage_layers: tuple[int, ...], pp: int, stage: int) -> tuple[tuple[int, int], ...]:
    """(kind, how many) of the blocks of a stage."""
    counts: dict[int, int] = {}
    first = 0
    for place, size in enumerate(stage_layers):
        if place % pp == stage:
            for layer in range(first, first + size):
                kind = kind_of(job, layer)
                counts[kind] = counts.get(kind, 0) + 1
        first += size
    return tuple(counts.items())


def in_flight_bound(schedule: ScheduleName, pp: int, num_micro: int, chunks: int, stage: int) -> int:
    """Most (micro-batch, chunk) pairs alive on a stage: `schedule.bounds` of that stage alone."""
    after = pp - stage - 1
    if schedule == "gpipe":
        warm_up = num_micro
    else:
        warm_up = 2 * after + (chunks - 1) * pp if schedule == "interleaved" else after
    return min(warm_up + 1, num_micro * chunks)


def memory_of(job: Job, cluster: Cluster, plan: Plan, imbalance: Imbalance = TYPICAL) -> Memory:
    """The memory of every stage; `check` has nothing against the plan."""
    return Memories(job, cluster, imbalance).of(plan)


class Peak(NamedTuple):
    """What the fullest stage needs on a device and, on the stage where that is most, in host memory."""

    size_bytes: float
    stage: int
    host_bytes: float

    def fits(self, device: Device) -> bool:
        """As `Memory.fits`."""
        return self.size_bytes <= device.memory_bytes and self.host_bytes <= device.host_memory_bytes


class _Held(NamedTuple):
    """Bytes that do not depend on what is recomputed. `reduced` are gradients of one micro-batch and what sums them,
    where they come as activations go; `gradients` then only what is kept beyond that."""

    weights: float
    gradients: float
    reduced: float
    optimizer: float
    gathered: float
    runtime: float
    host: float


class Memories:
    """`memory_of` for many plans of a job on a cluster: what they have in common is worked out once."""

    def __init__(self, job: Job, cluster: Cluster, imbalance: Imbalance = TYPICAL) -> None:
        self._job, self._cluster, self._imbalance = job, cluster, imbalance.worst
        self._of_stage: dict[tuple[object, ...], _Held] = {}

    def of(self, plan: Plan) -> Memory:
        """The memory of every stage; `check` has nothing against the plan."""
        stages, kind = [], self._cluster.device.kind
        for stage in range(plan.pp):
            items = self._items(plan, stage)
            cached = min(_cached(self._job, kind, items), self._cluster.device.memory_bytes - sum(items.values()))
            stages.append(StageMemory(items=items, cached_bytes=max(0.0, cached)))
        return Memory(stages=tuple(stages), host_bytes=max(self._held(plan, stage).host for stage in range(plan.pp)))

    def peak(self, plan: Plan) -> Peak:
        """That of `of`, from the stages alone that can be the fullest."""
        size_bytes = host_bytes = 0.0
        fullest = 0
        exchange = _exchange(self._job, plan, self._imbalance)
        for stage in _candidates(self._job, plan.stage_layers, plan.pp):
            held = self._held(plan, stage)
            found = activations(self._job, plan, stage, self._imbalance)
            passes = found["activations"] + max(exchange, found["working"] + found["loss"] + found["recomputed"])
            handed_out = held.weights + held.gradients + held.gathered + max(passes, held.reduced)
            size = (1 + RESERVE_SHARE) * handed_out + held.optimizer + held.runtime
            host_bytes = max(host_bytes, held.host)
            if size > size_bytes:
                size_bytes, fullest = size, stage
        return Peak(size_bytes, fullest, host_bytes)

    def _items(self, plan: Plan, stage: int) -> dict[str, float]:
        held = self._held(plan, stage)
        items = {"weights": held.weights, "gradients": held.gradients, "optimizer": held.optimizer}
        items |= activations(self._job, plan, stage, self._imbalance)
        at_once = items["working"] + items["loss"] + items["recomputed"]
        items["exchange"] = max(0.0, _exchange(self._job, plan, self._imbalance) - at_once)
        items["gradients"] += max(0.0, held.reduced - items["activations"] - at_once - items["exchange"])
        items["gathered"], items["runtime"] = held.gathered, held.runtime
        items["reserve"] = RESERVE_SHARE * _handed_out(items)
        return items

    def _held(self, plan: Plan, stage: int) -> _Held:
        policy = plan.recompute, plan.recompute_layers, plan.micro_sequences
        key = (stage, plan.sizes, plan.stage_layers, plan.zero_stage, plan.offload_optimizer, plan.techniques, policy)
        if key not in self._of_stage:
            if len(self._of_stage) >= KEPT_STAGES:  # plans of one pipeline are asked for together
                self._of_stage.clear()
            self._of_stage[key] = _held(self._job, self._cluster, plan, stage, self._imbalance)
        return self._of_stage[key]


@lru_cache(maxsize=4096)
def _candidates(job: Job, stage_layers: tuple[int, ...], pp: int) -> tuple[int, ...]:
    """Of stages between the ends that have the same blocks the first, with most micro-batches in flight; and the
    ends."""
    first = {_kinds_on(job, stage_layers, pp, stage): stage for stage in reversed(range(1, pp - 1))}
    return tuple(sorted({0, pp - 1, *first.values()}))


def _held(job: Job, cluster: Cluster, plan: Plan, stage: int, imbalance: float) -> _Held:
    counts = stage_parameters(job, plan, stage)
    zero, offload = plan.zero_stage, plan.offload_optimizer
    of_dense = states_of(job, counts[0], plan.dp * plan.cp, zero, offload=offload)
    of_expert = states_of(job, counts[1], plan.edp, zero, offload=offload)
    groups = sum(getattr(plan, axis) > 1 for axis in AXES)
    lost = compressed(job, plan)[1] if plan.techniques.is_compressed else 0
    kind = cluster.device.kind
    gradients, gathered, reduced, graph = (
        of_dense.gradients + of_expert.gradients,
        _gathered(job, plan, stage),
        0.0,
        0.0,
    )
    if kind == "cpu" and job.engine.keeps == "inputs":
        reduced = reduced_bytes(plan, *counts, _largest_block_bytes(job, plan, stage, imbalance))
        gradients *= plan.pp > 1 or plan.num_micro(job) > 1
        gathered = summed_bytes(job, plan, *counts)
        layers = sum(count for _, count in _kinds_on(job, plan.stage_layers, plan.pp, stage))
        graph = graph_bytes(plan, layers, _recomputed(plan, layers))
    return _Held(
        weights=of_dense.weights + of_expert.weights,
        gradients=gradients,
        reduced=reduced,
        optimizer=of_dense.optimizer + of_expert.optimizer + lost,
        gathered=gathered + early_bytes(job, plan, *counts),
        runtime=CONTEXT_BYTES[kind] + graph + groups * GROUP_BUFFER_BYTES[kind] + job.engine.buffer_bytes,
        host=of_dense.host + of_expert.host,
    )


def _largest_block_bytes(job: Job, plan: Plan, stage: int, imbalance: float) -> float:
    """What the backward pass of one block needs, nothing of it recomputed."""
    costs = [block_cost(job, Slice.of(plan), kind) for kind, _ in _kinds_on(job, plan.stage_layers, plan.pp, stage)]
    rows = among_ranks(plan, imbalance)
    return max(each.kept_bytes["none"] + rows * each.routed_bytes["none"] + each.working_bytes for each in costs)


def _handed_out(items: Mapping[str, float]) -> float:
    """What comes and goes, or is made again, during a step."""
    return sum(size for name, size in items.items() if name not in ("runtime", "optimizer"))


def _cached(job: Job, kind: str, items: Mapping[str, float]) -> float:
    """Before the device is full: then a caching allocator gives back what it holds."""
    if not CACHE_BYTES[kind]:
        return 0.0
    fixed = items["weights"] + items["gradients"]
    loose = 0.0 if job.engine.has_buffers else fixed
    return CACHE_BYTES[kind] + CACHE_SHARE * (_handed_out(items) - fixed) + LOOSE_SHARE * loose


def activations(job: Job, plan: Plan, stage: int, imbalance: float) -> dict[str, float]:
    """Bytes kept for the micro-batches in flight, at work in one block, of the loss, and what a recomputed block makes
    again beyond the loss, which is gone by then."""
    cut, num_micro, imbalance = Slice.of(plan), plan.num_micro(job), among_ranks(plan, imbalance)
    alive = in_flight_bound(plan.schedule, plan.pp, num_micro, plan.chunks, stage)
    one = of_blocks = working = again = 0.0
    for kind, count in _kinds_on(job, plan.stage_layers, plan.pp, stage):
        cost = block_cost(job, cut, kind)
        many = _recomputed(plan, count)
        everything = cost.kept_bytes["none"] + imbalance * cost.routed_bytes["none"]
        left = cost.kept_bytes[plan.recompute] + imbalance * cost.routed_bytes[plan.recompute]
        one += many * left + (count - many) * everything
        of_blocks += many * left
        working = max(working, cost.working_bytes)
        again = max(again, everything - left if many else 0.0)
    kept = alive * one / plan.chunks
    stream = tokens(job, cut) * job.model.hidden * job.activation_bytes / (plan.tp if plan.sequence_parallel else 1)
    if plan.pp > 1 and job.engine.keeps == "inputs":
        kept = alive * stream + one / plan.chunks
        if plan.recompute_kept == "block_inputs":
            # the last chunk of all goes forward only in its backward pass
            share = (plan.chunks - (stage == plan.pp - 1)) / plan.chunks
            kept += (alive - 1) * share * of_blocks / plan.chunks
    if job.engine.keeps_outputs and stage < plan.pp - 1:
        kept += alive * stream
    loss = _loss(job, plan) if stage == plan.pp - 1 else 0.0
    return {"activations": kept, "working": working, "loss": loss, "recomputed": max(0.0, again - loss)}


def _loss(job: Job, plan: Plan) -> float:
    """Logits and their gradient, where they are not fused also in fp32, with the softmax; the head's gradient before it
    is summed; of each block of multi-token prediction its own logits."""
    model = job.model
    logits = tokens(job, Slice.of(plan)) * model.vocab_size / plan.tp
    depth = 1 + (model.mtp.depth if model.mtp is not None else 0)
    of_head = HEAD_SHARE * model.vocab_size * model.hidden * job.engine.weight_bytes / plan.tp
    return depth * logits * _logit_bytes(job, plan) + of_head


def _logit_bytes(job: Job, plan: Plan) -> int:
    a, copies = job.activation_bytes, job.engine.fp32_logits[plan.tp > 1]
    # in fp32 they are what the product makes, and only their gradient comes to them
    return a + copies * FP32_BYTES if copies and job.precision != "fp32" else 2 * a


def _recomputed(plan: Plan, count: int) -> int:
    if plan.recompute == "none":
        return 0
    return count if plan.recompute_layers is None else min(count, plan.recompute_layers * plan.chunks)


def _exchange(job: Job, plan: Plan, imbalance: float) -> float:
    """Rows on their way to experts and back: a buffer to send from, which in chunks has room for the worst of each, one
    to receive into, and one in the middle of two steps; and their codes."""
    moe, techniques = job.model.moe, plan.techniques
    if moe is None or all(getattr(plan, axis) == 1 for axis in ROUTED_AXES):
        return 0.0
    chunks, of_row = techniques.expert_chunks, job.model.hidden * job.activation_bytes
    sent = chunks * min(moe.top_k, moe.num_experts // chunks) / moe.top_k
    buffers = max(sent, imbalance) + imbalance
    if plan.nodes is not None:
        inside, across = plan.nodes
        if techniques.dedup_tokens is None:
            buffers += min(inside, across * imbalance)
        else:  # what is sent once, what comes, and its copies
            buffers += (min(moe.top_k, across) + across) / moe.top_k + min(across, inside * imbalance)
    if techniques.expert_wire is not None:
        of_row += row_bytes(job.model.hidden, job.activation_bytes, techniques.expert_wire)
    return buffers * tokens(job, Slice.of(plan)) / plan.tp * moe.top_k * of_row


def _gathered(job: Job, plan: Plan, stage: int) -> float:
    """Whole weights of two blocks under stage 3 (the one at work and the next), and buckets of gradients."""
    if plan.dp * plan.cp == 1:
        return 0.0
    found = float(plan.techniques.bucket_bytes)
    if plan.zero_stage == 3 and job.engine.gathers_stages and plan.pp > 1:
        whole = sum(stage_parameters(job, plan, stage))
        return found + (whole + _largest(job, plan, stage)) * (job.activation_bytes + job.engine.gradient_bytes)
    if plan.zero_stage == 3:
        largest = _largest(job, plan, stage)
        found += 2 * largest * job.activation_bytes
    return found


def _largest(job: Job, plan: Plan, stage: int) -> int:
    """Parameters of the largest block of a stage."""
    cut = Slice.of(plan)
    return max(sum(block_parameters(job, cut, kind)) for kind, _ in _kinds_on(job, plan.stage_layers, plan.pp, stage))
