"""A plan with what it is predicted to need; the plan that needs the least memory. Pure."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from ascend_moe_train.planner.bounds import least_bytes
from ascend_moe_train.planner.efficiency import Efficiency
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.layers import Slice, effective
from ascend_moe_train.planner.memory import Memory, memory_of
from ascend_moe_train.planner.plan import Imbalance, Job, Plan, check, even_layers
from ascend_moe_train.planner.space import Space
from ascend_moe_train.planner.step_time import StepTime, time_of


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A plan, its memory and its time."""

    plan: Plan
    memory: Memory
    time: StepTime

    @property
    def layout(self) -> tuple[int, ...]:
        """Plans that differ in no axis of the mesh are variants of one layout."""
        plan = self.plan
        return plan.tp, plan.cp, plan.pp, plan.ep, plan.dp, plan.edp


def scored(
    job: Job, cluster: Cluster, plan: Plan, imbalance: Imbalance, efficiency: Efficiency | None = None
) -> Scored:
    """A plan that `check` has nothing against, evaluated."""
    memory = memory_of(job, cluster, plan, imbalance)
    return Scored(plan=plan, memory=memory, time=time_of(job, cluster, plan, imbalance, efficiency))


def leanest(
    job: Job, cluster: Cluster, space: Space, imbalance: Imbalance, *, first_fit: bool = False
) -> tuple[Plan, Memory] | None:
    """The plan that needs the least memory on a device, of those with the smallest micro-batches, even stages, 1F1B and
    for each cut of the experts and number of stages as much tp and cp as go with it; None if no plan is possible
    whatever the memory. With `first_fit` the first that fits will do."""
    order = count()
    heap = [
        (min(least_bytes(job, cluster, space, cut, pp, each) for each in space.variants()), next(order), cut, pp)
        for cut, pp in _finest(job, space)
    ]
    heapq.heapify(heap)
    room = cluster.device.memory_bytes
    best: tuple[Plan, Memory] | None = None
    while heap and (best is None or heap[0][0] < best[1].peak_bytes):
        least, _, cut, pp = heapq.heappop(heap)
        if first_fit and best is not None and (best[1].fits(cluster.device) or least > room):
            break
        for plan in _lean_plans(job, space, cut, pp):
            memory = memory_of(job, cluster, plan, imbalance)
            if (best is None or _needs(memory, cluster) < _needs(best[1], cluster)) and check(job, plan) is None:
                best = plan, memory
    return best


def _needs(memory: Memory, cluster: Cluster) -> tuple[bool, float]:
    return not memory.fits(cluster.device), memory.peak_bytes


def _finest(job: Job, space: Space) -> Iterator[tuple[Slice, int]]:
    """For each number of stages and cut of the experts, the largest tp, and with it the largest cp, that divide."""
    found: set[tuple[int, int, int]] = set()
    ordered = replace(space, tp=space.tp[::-1], cp=space.cp[::-1], micro=space.micro[:1], contexts=("ring",))
    for cut in replace(ordered, sequence_parallel=ordered.sequence_parallel[:1]).cuts(job):
        for pp in space.stages(job, cut):
            key = pp, cut.ep, cut.etp
            if key not in found and _is_possible(job, space, cut, pp):
                found.add(key)
                yield cut, pp


def _is_possible(job: Job, space: Space, cut: Slice, pp: int) -> bool:
    layers = even_layers(job.model.num_layers, pp)
    plan = Plan(num_devices=space.num_devices, stage_layers=layers, pp=pp, **cut._asdict())
    return check(job, plan) is None


def _lean_plans(job: Job, space: Space, cut: Slice, pp: int) -> list[Plan]:
    """With all recomputed, or nothing where there is no choice."""
    even = even_layers(job.model.num_layers, pp)
    return [
        Plan(
            num_devices=space.num_devices,
            stage_layers=layers,
            pp=pp,
            zero_stage=zero,
            recompute=space.recompute[-1],
            offload_optimizer=offload,
            techniques=effective(space.techniques, cut),
            **cut._asdict(),
        )
        for layers in dict.fromkeys((even, even[::-1]))
        for zero in space.zero
        for offload in space.offload
    ]
