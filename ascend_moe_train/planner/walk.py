"""The walk through the space, best first. Pure.

Every cut of a block has a least time that costs microseconds (`bounds`). Cuts are opened in that order to numbers of
stages, these to schedules and stage splits, each with a least time of its own; only what could still be among the best
is evaluated. What a bound leaves out is therefore not better than what is kept.
"""

import heapq
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from ascend_moe_train.parallel.config import ScheduleName
from ascend_moe_train.planner.bounds import (
    PassTimes,
    busy_s,
    least_bubble,
    least_bytes,
    least_step_s,
    splits,
)
from ascend_moe_train.planner.efficiency import Efficiency
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.layers import Slice, effective
from ascend_moe_train.planner.memory import Memories, Peak
from ascend_moe_train.planner.plan import Imbalance, Job, Plan, check
from ascend_moe_train.planner.rejections import Rejections
from ascend_moe_train.planner.scored import Scored
from ascend_moe_train.planner.space import Space, Variant, Zero
from ascend_moe_train.planner.step_time import StepTime, StepTimes

NEAREST = 24  # plans without room that are looked at


class _Node(NamedTuple):
    """What is still to be opened: a cut, with `pp` also a number of stages, with `chunks` a schedule, and with
    `stage_layers` a whole pipeline."""

    least_s: float
    order: int
    cut: Slice
    pp: int = 0
    schedule: ScheduleName = "1f1b"
    chunks: int = 0
    stage_layers: tuple[int, ...] = ()


class Walk:
    """Keeps the best plan of each layout. With `limit_s` steps may be so long, and the plan of a layout is the one that
    needs the least memory; without it, the fastest."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        imbalance: Imbalance,
        efficiency: Efficiency | None,
        space: Space,
        top: int,
        limit_s: float | None = None,
    ) -> None:
        self._job, self._cluster, self._imbalance = job, cluster, imbalance
        self._top, self._limit_s, self._top_s = top, limit_s, float("inf")
        self._repeats = job.engine.keeps == "inputs"
        self._times = PassTimes(job, cluster, imbalance, efficiency, space.techniques)
        self._memories = Memories(job, cluster, imbalance)
        self._steps = StepTimes(job, cluster, imbalance, efficiency)
        self._heap: list[_Node] = []
        self._order = count()
        self._lean: dict[tuple[Slice, int], tuple[Variant, ...]] = {}
        self._refused: dict[tuple[int, int], dict[Zero, str]] = {}
        self.rejections = Rejections()
        self.best: dict[tuple[int, ...], Scored] = {}
        self.seen: list[Scored] = []
        self._too_big: list[tuple[float, int, Plan]] = []
        self.num_plans = self.num_evaluated = 0
        self.space, refused = space.without_impossible(job)
        for label, reason in refused.items():
            self.rejections.add("impossible", label, reason)
        self._policies = {pp: space.policies(job, pp) for pp in space.pp}
        self._variants = {pp: len(space.zero) * len(each) * len(space.offload) for pp, each in self._policies.items()}
        self._plans_of = {
            pp: count * len(list(space.pipelines(pp, job.model.num_layers))) for pp, count in self._variants.items()
        }

    def run(self) -> None:
        """Until nothing that is left can be among the best."""
        for cut in self.space.cuts(self._job):
            self._heap.append(_Node(self._times.whole_s(cut) * self._rounds(cut), next(self._order), cut))
            self.num_plans += sum(self._plans_of[pp] for pp in self.space.stages(self._job, cut))
        heapq.heapify(self._heap)
        while self._heap and self._heap[0].least_s < self.limit_s:
            node = heapq.heappop(self._heap)
            if not node.pp:
                self._open_cut(node)
            elif not node.chunks:
                self._open_stages(node)
            elif not node.stage_layers:
                self._open_pipeline(node)
            else:
                self._evaluate(node)

    @property
    def limit_s(self) -> float:
        """What a step must be shorter than to be of interest."""
        return self._limit_s if self._limit_s is not None else self._top_s

    def stages(self, cut: Slice) -> Iterator[int]:
        """Numbers of stages that go with a cut."""
        return self.space.stages(self._job, cut)

    def nearest_too_big(self, step_s: float) -> Scored | None:
        """A plan that does not fit and whose step is shorter, the one that needs the least memory of those that came
        nearest to having room with all recomputed."""
        nearest = heapq.nsmallest(NEAREST, self._too_big)
        found = [Scored(plan=plan, memory=self._memories.of(plan), time=self._time(plan)) for _, _, plan in nearest]
        for each in sorted(found, key=lambda each: each.memory.peak_bytes):
            is_faster = each.time.step_s < step_s and not each.memory.fits(self._cluster.device)
            if is_faster and check(self._job, each.plan) is None:
                return each
        return None

    def left(self) -> Iterator[tuple[Slice, int, float, int]]:
        """What was not opened, as cut, pp (0: all), least time and number of plans."""
        for node in self._heap:
            if not node.pp:
                of_cut = sum(self._plans_of[pp] for pp in self.space.stages(self._job, node.cut))
                yield node.cut, 0, node.least_s, of_cut
            elif not node.chunks:
                yield node.cut, node.pp, node.least_s, self._plans_of[node.pp]
            elif not node.stage_layers:
                yield node.cut, node.pp, node.least_s, self._variants[node.pp]

    def _rounds(self, cut: Slice) -> float:
        """Micro-batches of a step through pp: how often a device does its part of one, on average over the stages."""
        return self._job.global_sequences * cut.cp * cut.tp / (self.space.num_devices * cut.micro_sequences)

    def _open_cut(self, node: _Node) -> None:
        room = self._cluster.device.memory_bytes
        passes = self._times.of(node.cut)
        for pp in self.space.stages(self._job, node.cut):
            least = {
                each: least_bytes(self._job, self._cluster, self.space, node.cut, pp, each)
                for each in self.space.variants()
            }
            if min(least.values()) > room:
                self.rejections.too_big(_family(node.cut, pp), 0, min(least.values()), room, count=self._plans_of[pp])
                continue
            self._lean[node.cut, pp] = tuple(each for each, size in least.items() if size <= room)
            again = 0.0
            if self._repeats and pp > 1:  # all but the last virtual stage, which has no more than these layers
                most = 3 * self._job.model.num_layers // (2 * pp) + 2
                again = passes.forward_s[max(0, self._job.model.num_layers - most)]
            least_s = node.least_s + passes.slow * again * self._rounds(node.cut)
            heapq.heappush(self._heap, _Node(least_s, next(self._order), node.cut, pp))

    def _open_stages(self, node: _Node) -> None:
        num_micro = round(self._rounds(node.cut) * node.pp)
        for schedule, chunks in self.space.pipelines(node.pp, self._job.model.num_layers):
            least_s = node.least_s * least_bubble(node.pp, num_micro, chunks, schedule)
            rest = node.cut, node.pp, schedule, chunks
            heapq.heappush(self._heap, _Node(least_s, next(self._order), *rest))

    def _open_pipeline(self, node: _Node) -> None:
        passes = self._times.of(node.cut)
        num_micro = round(self._rounds(node.cut) * node.pp)
        repeats = self._repeats and node.pp > 1
        for layers in splits(passes, node.pp, node.chunks, repeats=repeats):
            busy = busy_s(passes, layers, node.pp, repeats=repeats)
            least_s = least_step_s(busy, num_micro, node.chunks, node.schedule, passes.slow)
            rest = node.cut, node.pp, node.schedule, node.chunks, layers
            heapq.heappush(self._heap, _Node(max(least_s, node.least_s), next(self._order), *rest))

    def _evaluate(self, node: _Node) -> None:
        """Every way to keep weights and states that may have room; of each, the least recomputation that fits."""
        refused = self._refused_variants(node)
        allowed = []
        for zero, offload in self._lean[node.cut, node.pp]:
            if zero in refused:
                self.rejections.add("impossible", f"ZeRO-{zero}, {node.schedule}", refused[zero])
            else:
                allowed.append(self._plan(node, zero_stage=zero, offload_optimizer=offload))
        if not allowed:
            return
        leanest = max(allowed, key=lambda plan: (plan.zero_stage, plan.offload_optimizer))
        leanest = replace(leanest, recompute=self.space.recompute[-1])
        peak = self._memories.peak(leanest)
        if not self._has_room(leanest, peak, count=len(allowed) * len(self._policies[node.pp])):
            self._too_big.append((peak.size_bytes, next(self._order), allowed[0]))
            return
        beaten = (float("inf"), float("inf"))
        for plan in allowed:
            time = self._time(plan)
            if time.step_s >= self.limit_s:
                continue
            pair = time.step_s, self._memories.peak(plan).size_bytes
            if pair[0] >= beaten[0] and pair[1] >= beaten[1]:
                continue  # longer and larger with nothing recomputed, and so with anything
            beaten = min(beaten, pair)
            if (found := self._least_recomputed(plan, time)) is not None:
                self._keep(found)

    def _refused_variants(self, node: _Node) -> dict[Zero, str]:
        key = node.pp, node.chunks
        if key not in self._refused:
            self._refused[key] = self.space.refused_variants(self._job, *key)
        return self._refused[key]

    def _plan(self, node: _Node, **choices: Any) -> Plan:
        return Plan(
            num_devices=self.space.num_devices,
            pp=node.pp,
            schedule=node.schedule,
            chunks=node.chunks,
            stage_layers=node.stage_layers,
            techniques=effective(self.space.techniques, node.cut),
            **node.cut._asdict(),
            **choices,
        )

    def _time(self, plan: Plan) -> StepTime:
        self.num_evaluated += 1
        return self._steps.of(plan)

    def _least_recomputed(self, plan: Plan, time: StepTime) -> Scored | None:
        """The fastest of a plan's policies that fits, or None."""
        options = []
        for policy, kept in self._policies[plan.pp]:
            each = replace(plan, recompute=policy, recompute_kept=kept)
            found = self._of_policy(each, time if policy == "none" else None)
            if found is not None:
                options.append(found)
                if policy == "none":
                    break
        if self._limit_s is not None:
            options = [each for each in options if each.time.step_s <= self._limit_s]
            return min(options, key=lambda each: each.memory.peak_bytes, default=None)
        return min(options, key=lambda each: each.time.step_s, default=None)

    def _of_policy(self, plan: Plan, time: StepTime | None) -> Scored | None:
        if time is None and self._time(replace(plan, recompute_layers=1)).step_s >= self.limit_s:
            return None
        is_least = plan.recompute != "none" and self._limit_s is None
        if is_least and plan.recompute_kept == "block_inputs":
            plan = self._fewest_kept(plan)
        peak = self._memories.peak(plan)
        if not self._has_room(plan, peak):
            if plan.recompute == "none":
                self._too_big.append((peak.size_bytes, next(self._order), plan))
            return None
        if is_least and plan.recompute_kept == "stage_input":
            plan = self._fewest(plan)
        time = time if time is not None else self._time(plan)
        return Scored(plan=plan, memory=self._memories.of(plan), time=time)

    def _fewest(self, plan: Plan) -> Plan:
        """With as few recomputed layers as fit; with all of them it fits."""
        most = max(plan.stage_layers)
        low, high = 0, most  # layers: too few, enough
        while high - low > 1:
            middle = (low + high) // 2
            if self._memories.peak(replace(plan, recompute_layers=middle)).fits(self._cluster.device):
                high = middle
            else:
                low = middle
        return replace(plan, recompute_layers=high) if high < most else plan

    def _fewest_kept(self, plan: Plan) -> Plan:
        """The same where their inputs are kept: each layer takes room away and gives some, so that more need not fit
        where fewer do. The plan itself if none fits."""
        for layers in range(1, max(plan.stage_layers)):
            fewer = replace(plan, recompute_layers=layers)
            if self._memories.peak(fewer).fits(self._cluster.device):
                return fewer
        return plan

    def _has_room(self, plan: Plan, peak: Peak, count: int = 1) -> bool:
        """Whether a plan fits; if not, it is counted, `count` times."""
        device = self._cluster.device
        if peak.fits(device):
            return True
        needs, room = peak.size_bytes, device.memory_bytes
        if needs <= room:
            needs, room = peak.host_bytes, device.host_memory_bytes
        self.rejections.too_big(_family(plan, plan.pp), peak.stage, needs, room, count=count)
        return False

    def _keep(self, found: Scored) -> bool:
        """Whether the plan is possible; kept if it is the best of its layout."""
        if (reason := check(self._job, found.plan)) is not None:
            self.rejections.add("impossible", _family(found.plan, found.plan.pp), reason)
            return False
        self.seen.append(found)
        before = self.best.get(found.layout)
        if before is None or self._rank(found) < self._rank(before):
            self.best[found.layout] = found
            if len(self.best) >= self._top:
                self._top_s = sorted(each.time.step_s for each in self.best.values())[self._top - 1]
        return True

    def _rank(self, found: Scored) -> tuple[float, float]:
        pair = found.time.step_s, found.memory.peak_bytes
        return pair if self._limit_s is None else pair[::-1]


def _family(cut: Slice | Plan, pp: int) -> str:
    return f"pp {pp} x tp {cut.tp}"
