"""A plan with what it is predicted to need; the plan that needs the least memory. Pure."""

import heapq
from dataclasses import dataclass, replace
from itertools import count

from ascend_moe_train.planner.bounds import least_bytes
from ascend_moe_train.planner.efficiency import Efficiency
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.layers import Slice
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
    """The plan that needs the least memory on a device, of those with the smallest micro-batches, even stages and 1F1B;
    None if no plan is possible whatever the memory. With `first_fit` the first that fits will do."""
    order = count()
    heap = [
        (min(least_bytes(job, cluster, space, cut, pp, each) for each in space.variants()), next(order), cut, pp)
        for cut in replace(space, micro=space.micro[:1]).cuts(job)
        for pp in space.stages(job, cut)
    ]
    heapq.heapify(heap)
    best: tuple[Plan, Memory] | None = None
    while heap and (best is None or heap[0][0] < best[1].peak_bytes):
        _, _, cut, pp = heapq.heappop(heap)
        for plan in _lean_plans(job, space, cut, pp):
            memory = memory_of(job, cluster, plan, imbalance)
            if (best is None or memory.peak_bytes < best[1].peak_bytes) and check(job, plan) is None:
                best = plan, memory
        if first_fit and best is not None and best[1].fits(cluster.device):
            break
    return best


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
            offload_optimizer=space.offload[-1],
            **cut._asdict(),
        )
        for layers in dict.fromkeys((even, even[::-1]))
        for zero in space.zero
    ]
