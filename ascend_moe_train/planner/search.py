"""The best plans for a job on a cluster, and why all others are not. Pure."""

from dataclasses import dataclass
from typing import Literal, get_args

from ascend_moe_train.errors import ConfigError
from ascend_moe_train.planner.efficiency import Efficiency
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.layers import Slice
from ascend_moe_train.planner.plan import Imbalance, Job
from ascend_moe_train.planner.rejections import Rejections
from ascend_moe_train.planner.scored import Scored, leanest, scored
from ascend_moe_train.planner.space import Space
from ascend_moe_train.planner.walk import Walk

Objective = Literal["throughput", "memory"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
HEAD_ROOM_SLACK = 1.1  # how much longer than the fastest a step may be that leaves more memory free


@dataclass(frozen=True, kw_only=True)
class Found:
    """`best` of each layout, best first; none where nothing fits, and then `too_big` needs the least memory. Otherwise
    that is the fastest plan that was evaluated and does not fit, if any. `seen` are all evaluated that fit. `num_plans`
    are possible whatever the memory."""

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
    found = sorted(walk.best.values(), key=lambda each: (each.time.step_s, each.memory.peak_bytes))
    if objective == "memory" and found:
        walk = Walk(job, cluster, imbalance, efficiency, whole, top, limit_s=found[0].time.step_s * HEAD_ROOM_SLACK)
        walk.run()
        found = sorted(walk.best.values(), key=lambda each: (each.memory.peak_bytes, each.time.step_s))
    if found:
        _count_slower(walk, found[0])
    return Found(
        best=tuple(found[:top]),
        seen=tuple(walk.seen),
        too_big=walk.too_big,
        rejections=walk.rejections,
        num_plans=walk.num_plans,
        num_evaluated=walk.num_evaluated,
    )


def _count_slower(walk: Walk, best: Scored) -> None:
    """What was not opened, by the first axis on which it differs from the best plan."""
    for cut, pp, least_s, count in walk.left():
        walk.rejections.slower(_difference(cut, pp, best), least_s, count=count)


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
