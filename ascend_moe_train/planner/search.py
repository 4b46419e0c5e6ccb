"""The best plans for a job on a cluster, and why all others are not. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ascend_moe_train.errors import ConfigError
from ascend_moe_train.planner.collectives import span
from ascend_moe_train.planner.efficiency import Efficiency
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.layers import Slice
from ascend_moe_train.planner.plan import TYPICAL, Imbalance, Job, Plan, even_layers
from ascend_moe_train.planner.rejections import Rejections
from ascend_moe_train.planner.scored import Scored, leanest, scored
from ascend_moe_train.planner.space import Space
from ascend_moe_train.planner.step_time import StepTime, time_of
from ascend_moe_train.planner.techniques import Techniques
from ascend_moe_train.planner.walk import Walk
from ascend_moe_train.units import format_seconds

Objective = Literal["throughput", "memory"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
HEAD_ROOM_SLACK = 1.1  # how much longer than the fastest a step may be that leaves more memory free


@dataclass(frozen=True, kw_only=True)
class Found:
    """`best` of each layout, best first; none where nothing fits. `too_big` does not fit, needs the least memory of
    such, and is faster than the best. `seen` are all evaluated that fit. `num_plans` are possible whatever the
    memory."""

    best: tuple[Scored, ...]
    seen: tuple[Scored, ...]
    too_big: Scored | None
    rejections: Rejections
    num_plans: int
    num_evaluated: int


def search(
    job: Job,
    cluster: Cluster,
    *,
    objective: Objective = "throughput",
    imbalance: Imbalance = Imbalance(),  # noqa: B008  # it is frozen
    efficiency: Efficiency | None = None,
    space: Space | None = None,
    top: int = 5,
) -> Found:
    """The `top` best layouts: with the shortest steps, or with the most memory left free among those whose steps are at
    most a tenth longer than the shortest. Raises ConfigError if no plan is possible whatever the memory."""
    whole = space if space is not None else Space.of(job, cluster)
    possible, _ = whole.without_impossible(job)
    lean = leanest(job, cluster, possible, imbalance, first_fit=True)
    if lean is None:
        raise ConfigError(_nothing(job, cluster))
    if not lean[1].fits(cluster.device):
        too_big = scored(job, cluster, lean[0], imbalance, efficiency)
        return Found(best=(), seen=(), too_big=too_big, rejections=Rejections(), num_plans=0, num_evaluated=1)
    walk = Walk(job, cluster, imbalance, efficiency, whole, top)
    walk.run()
    found = sorted(walk.best.values(), key=_by_time)
    if objective == "memory" and found:
        walk = Walk(job, cluster, imbalance, efficiency, whole, top, limit_s=found[0].time.step_s * HEAD_ROOM_SLACK)
        walk.run()
        found = sorted(walk.best.values(), key=_by_memory)
    if found:
        _count_slower(walk, found[0], lambda plan: time_of(job, cluster, plan, imbalance, efficiency), cluster)
    return Found(
        best=tuple(found[:top]),
        seen=tuple(walk.seen),
        too_big=walk.nearest_too_big(found[0].time.step_s if found else float("inf")),
        rejections=walk.rejections,
        num_plans=walk.num_plans,
        num_evaluated=walk.num_evaluated,
    )


def search_among(
    job: Job,
    cluster: Cluster,
    alternatives: Sequence[Techniques],
    *,
    objective: Objective = "throughput",
    imbalance: Imbalance = TYPICAL,
    space: Space | None = None,
    top: int = 5,
) -> Found:
    """The best layouts with any of some techniques. The first are those of a run where nothing else is allowed: what is
    said of plans that are out is of plans with these. Raises ConfigError as `search` does for them."""
    whole = space if space is not None else Space.of(job, cluster)
    found = []
    for techniques in alternatives:
        try:
            limited = Space.of(job, cluster, **vars(whole) | {"techniques": techniques})
            found.append(search(job, cluster, objective=objective, imbalance=imbalance, space=limited, top=top))
        except ConfigError:
            if not found:
                raise
    first = found[0]
    everything = [each for one in found for each in one.best]
    limit_s = HEAD_ROOM_SLACK * min((each.time.step_s for each in everything), default=0.0)
    rank = _by_time if objective == "throughput" else _by_memory
    best: dict[tuple[int, ...], Scored] = {}
    for each in sorted(everything, key=rank):
        if objective == "throughput" or each.time.step_s <= limit_s:
            best.setdefault(each.layout, each)
    is_faster = first.too_big is not None and best and first.too_big.time.step_s < min(map(_by_time, best.values()))[0]
    return replace(
        first,
        best=tuple(best.values())[:top],
        seen=tuple(each for one in found for each in one.seen),
        too_big=first.too_big if is_faster or not best else None,
        num_plans=sum(each.num_plans for each in found),
        num_evaluated=sum(each.num_evaluated for each in found),
    )


def _by_time(each: Scored) -> tuple[float, float]:
    return each.time.step_s, each.memory.peak_bytes


def _by_memory(each: Scored) -> tuple[float, float]:
    return _by_time(each)[::-1]


def _count_slower(walk: Walk, best: Scored, timed: Callable[[Plan], StepTime], cluster: Cluster) -> None:
    """What was not opened, by the first axis on which it differs from the best plan; of each the nearest, with what it
    spends most on communication."""
    nearest: dict[str, tuple[float, Slice, int]] = {}
    counts: Counter[str] = Counter()
    for cut, pp, least_s, count in walk.left():
        label = _difference(cut, pp, best)
        counts[label] += count
        if label not in nearest or least_s < nearest[label][0]:
            nearest[label] = least_s, cut, pp
    for label, (least_s, cut, pp) in nearest.items():
        words = _most_moved(walk, best, timed, cluster, cut, pp)
        reason = f"at least {format_seconds(least_s)} a step{words}"
        walk.rejections.add("slower", label, reason, count=counts[label], closeness=least_s)


def _most_moved(
    walk: Walk, best: Scored, timed: Callable[[Plan], StepTime], cluster: Cluster, cut: Slice, pp: int
) -> str:
    """What a cut's largest share of communication is, where it is more than a tenth of the step."""
    stages = pp or next(walk.stages(cut))
    layers = even_layers(sum(best.plan.stage_layers), stages)
    plan = Plan(num_devices=best.plan.num_devices, pp=stages, stage_layers=layers, zero_stage=1, **cut._asdict())
    time = timed(plan)
    kind, value = max(time.exposed.items(), key=lambda pair: pair[1], default=("", 0.0))
    if value < 0.1 * time.step_s:
        return ""
    crosses = kind in Slice._fields and span(plan, kind, cluster.devices_per_node).is_across
    return f", with pp {stages} {format_seconds(value)} of it for {kind}{' across nodes' if crosses else ''}"


def _difference(cut: Slice, pp: int, best: Scored) -> str:
    plan = best.plan
    if pp and pp != plan.pp:
        return f"pp {pp}"
    for name, size in cut._asdict().items():
        if size != getattr(plan, name):
            return f"{name} {size}".replace("_", " ")
    return "same cut, other pipelines"


def _nothing(job: Job, cluster: Cluster) -> str:
    return (
        f"no plan shares out {job.global_sequences:,} sequences a step and {job.model.num_layers} layers to "
        f"{cluster.num_devices:,} devices: use a multiple of the devices as global sequences"
    )
