"""What a search found, in words and tables: the best plans, what binds them, what is out and why. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ascend_moe_train.model.counts import num_active_parameters, num_parameters
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.layers import Slice
from ascend_moe_train.planner.plan import Imbalance, Job, Plan
from ascend_moe_train.planner.rejections import Family
from ascend_moe_train.planner.scored import Scored, scored
from ascend_moe_train.planner.search import Found
from ascend_moe_train.planner.sizes import Fit, largest_model, parameters_of, smallest_cluster
from ascend_moe_train.planner.step_time import StepTime
from ascend_moe_train.units import format_bytes, format_count, format_seconds, format_share

AXES = ("dp", "pp", *(name for name in Slice._fields if len(name) < 4), "edp")
KINDS = {"impossible": "impossible", "too_big": "too big", "slower": "slower"}
MAX_FAMILIES = 6
# words for the parts of a step
PARTS: Mapping[str, str] = {
    "ep": "all-to-all of the experts",
    "tp": "collectives of tp",
    "cp": "collectives of cp",
    "pp": "messages between stages",
    "gradients": "summing gradients",
    "weights": "gathering weights",
    "recompute": "forward passes over again",
    "bubble": "the pipeline's bubble",
    "straggler": "waiting for the slowest device",
    "other": "memory-bound operators",
    "optimizer": "the optimizer",
}


def job_line(job: Job, cluster: Cluster, name: str) -> str:
    """What is planned, in one line."""
    model = job.model
    sizes = f"{format_count(num_parameters(model))} parameters ({format_count(num_active_parameters(model))} active)"
    return (
        f"{name}: {sizes}, {job.global_sequences:,} sequences of {job.seq_len:,} tokens a step, {job.precision}, "
        f"{job.engine.name}, on {cluster.name}"
    )


def table(best: Sequence[Scored], job: Job) -> list[str]:
    """A line for each plan, with a heading, in columns."""
    heads = [
        "#",
        *AXES,
        "schedule",
        "zero",
        "micro",
        "recompute",
        "memory",
        "step",
        "tokens/s",
        "MFU",
        "bubble",
        "exposed",
    ]
    rows = [heads, *(_row(number, each, job) for number, each in enumerate(best, 1))]
    words = [", ".join(each.plan.techniques.words) for each in best]
    if any(words):
        rows = [[*row[:-1], cell, row[-1]] for row, cell in zip(rows, ("techniques", *words), strict=True)]
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns, all but the last to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell if column == len(row) - 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(number: int, each: Scored, job: Job) -> list[str]:
    plan, time = each.plan, each.time
    schedule = "-" if plan.pp == 1 else plan.schedule + (f" x{plan.chunks}" if plan.chunks > 1 else "")
    exposed = ", ".join(f"{kind} {format_share(value / time.step_s)}" for kind, value in _exposed(time)) or "none"
    return [
        str(number),
        *(str(getattr(plan, axis)) for axis in AXES),
        schedule,
        f"{plan.zero_stage}{'+host' if plan.offload_optimizer else ''}",
        f"{plan.micro_sequences} x{plan.num_micro(job)}",
        recompute_words(plan),
        format_bytes(each.memory.peak_bytes),
        format_seconds(time.step_s),
        format_count(time.tokens_per_s),
        format_share(time.mfu),
        format_share(time.bubble_share),
        exposed,
    ]


def recompute_words(plan: Plan) -> str:
    """`full`, or of how many layers of each virtual stage."""
    kept = ", inputs kept" if plan.recompute_kept == "block_inputs" else ""
    return plan.recompute + (f" {plan.recompute_layers}" if plan.recompute_layers is not None else "") + kept


def _exposed(time: StepTime) -> list[tuple[str, float]]:
    """Kinds of communication by what of it is exposed, the most first, and none that is next to nothing."""
    found = sorted(time.exposed.items(), key=lambda pair: -pair[1])
    return [(kind, value) for kind, value in found if value >= 0.0005 * time.step_s]


def stage_table(best: Scored) -> list[str]:
    """Memory of each stage of a plan by item, equal neighbours in one line."""
    names = list(dict.fromkeys(name for stage in best.memory.stages for name in stage.items))
    names = [name for name in names if any(stage.items.get(name) for stage in best.memory.stages)]
    rows = [["stage", "layers", *names, "together"]]
    start = 0
    stages = [_stage_cells(best, stage, names) for stage in range(best.plan.pp)]
    for stage in range(1, best.plan.pp + 1):
        if stage == best.plan.pp or stages[stage] != stages[start]:
            rows.append([f"{start}" if stage == start + 1 else f"{start}-{stage - 1}", *stages[start]])
            start = stage
    return aligned(rows)


def _stage_cells(best: Scored, stage: int, names: Sequence[str]) -> list[str]:
    layers = "+".join(str(best.plan.stage_layers[chunk * best.plan.pp + stage]) for chunk in range(best.plan.chunks))
    memory = best.memory.stages[stage]
    return [layers, *(format_bytes(memory.items.get(name, 0.0)) for name in names), format_bytes(memory.total_bytes)]


def binding(best: Scored, cluster: Cluster) -> str:
    """What most of a step and of the memory is."""
    time, memory = best.time, best.memory
    parts = sorted(time.items.items(), key=lambda pair: -pair[1])[:4]
    words = ", ".join(f"{PARTS.get(part, part)} {format_share(value / time.step_s)}" for part, value in parts)
    fullest = memory.stages[memory.fullest]
    items = sorted(fullest.items.items(), key=lambda pair: -pair[1])[:3]
    sizes = ", ".join(f"{name} {format_bytes(value)}" for name, value in items)
    room = format_bytes(cluster.device.memory_bytes)
    return (
        f"bound by: {words}; memory of stage {memory.fullest}, {format_bytes(fullest.total_bytes)} of {room}: {sizes}"
    )


def changes(job: Job, cluster: Cluster, imbalance: Imbalance, found: Found) -> list[str]:
    """What would make the best plan faster, by how much, the most first."""
    best, device = found.best[0], cluster.device
    step_s = best.time.step_s
    across = replace(device.across, bytes_per_s=2 * device.across.bytes_per_s)
    inside = replace(device.inside, bytes_per_s=2 * device.inside.bytes_per_s)
    even = Imbalance(expected=1.0, worst=imbalance.worst)
    more = replace(job, global_sequences=2 * job.global_sequences)
    options = {
        "links between nodes twice as fast": scored(
            job, replace(cluster, device=replace(device, across=across)), best.plan, imbalance
        ).time.step_s,
        "links inside a node twice as fast": scored(
            job, replace(cluster, device=replace(device, inside=inside)), best.plan, imbalance
        ).time.step_s,
        "experts in perfect balance": scored(job, cluster, best.plan, even).time.step_s,
        "twice as many sequences a step": scored(more, cluster, best.plan, imbalance).time.step_s / 2,
    }
    gains = sorted((1 - new_s / step_s, words) for words, new_s in options.items())[::-1]
    lines = [f"{words}: {format_share(gain)} less time for each token" for gain, words in gains if gain >= 0.002]
    if found.too_big is not None:
        lines.append(_more_memory(found.too_big, best, cluster))
    return lines


def _more_memory(big: Scored, best: Scored, cluster: Cluster) -> str:
    gain = format_share(1 - big.time.step_s / best.time.step_s)
    return (
        f"{format_bytes(big.memory.peak_bytes)} on each device instead of "
        f"{format_bytes(cluster.device.memory_bytes)}: {gain} less, with {plan_words(big.plan)}"
    )


def plan_words(plan: Plan) -> str:
    """The axes above 1, and what else is not plain."""
    words = [f"{axis} {getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) > 1]
    words += [plan.schedule + (f" x {plan.chunks} chunks" if plan.chunks > 1 else "")] if plan.pp > 1 else []
    words += [f"zero {plan.zero_stage}"] if plan.zero_stage else []
    words += [f"micro-batches of {plan.micro_sequences}"]
    words += [f"recompute {recompute_words(plan)}"] if plan.recompute != "none" else []
    words += ["optimizer states in host memory"] if plan.offload_optimizer else []
    words += plan.techniques.words
    return ", ".join(words)


def rejected(found: Found) -> Iterator[str]:
    """Families of plans that are out, with their numbers and reasons."""
    for kind, words in KINDS.items():
        families = _together(found.rejections.listed(kind))
        if families:
            yield f"{words}: {found.rejections.total(kind):,} plans"
            yield from (f"  {_family(each)}" for each in families[:MAX_FAMILIES])
            if len(families) > MAX_FAMILIES:
                rest = families[MAX_FAMILIES:]
                yield f"  and {len(rest)} more families, {sum(each.count for each in rest):,} plans"


def _together(families: Sequence[Family]) -> list[Family]:
    """Families that differ in a number only, in the label and in the reason, as one: `pp 2, 4, 8`."""
    groups: dict[tuple[str, str], list[Family]] = {}
    for each in families:
        axis, _, number = each.label.rpartition(" ")
        is_axis = number.isdecimal() and each.label in each.reason
        groups.setdefault((axis, each.reason.replace(each.label, axis)) if is_axis else ("", each.label), []).append(
            each
        )
    return [_one(axis, reason, group) if len(group) > 1 else group[0] for (axis, reason), group in groups.items()]


def _one(axis: str, reason: str, group: Sequence[Family]) -> Family:
    numbers = sorted(int(each.label.rpartition(" ")[2]) for each in group)
    return Family(
        label=f"{axis} {', '.join(map(str, numbers))}",
        reason=reason,
        count=sum(each.count for each in group),
        closeness=group[0].closeness,
    )


def _family(each: Family) -> str:
    return f"{each.label}: {each.count:,}, {each.reason}"


def refusal(job: Job, cluster: Cluster, imbalance: Imbalance, found: Found) -> str:
    """One line: the sum of the leanest plan, the smallest cluster that works, the largest model that fits."""
    assert found.too_big is not None
    big, room = found.too_big, cluster.device.memory_bytes
    fullest = big.memory.stages[big.memory.fullest]
    items = sorted(((value, name) for name, value in fullest.items.items() if value >= 0.01 * room), reverse=True)
    total = " + ".join(f"{name} {format_bytes(value)}" for value, name in items)
    needs = f"{format_bytes(fullest.total_bytes)} of {format_bytes(room)}"
    if fullest.total_bytes <= room:
        host = f"{format_bytes(big.memory.host_bytes)} of {format_bytes(cluster.device.host_memory_bytes)}"
        needs = f"{needs}, and {host} of host memory"
    states = num_parameters(job.model) * (job.engine.weight_bytes + job.engine.gradient_bytes + job.engine.state_bytes)
    return (
        f"{format_count(num_parameters(job.model))} parameters do not fit {cluster.name}: weights, gradients and states"
        f" are {format_bytes(states)}, the cluster has {format_bytes(room * cluster.num_devices)}; the leanest "
        f"plan ({plan_words(big.plan)}) needs {needs} on each device of stage {big.memory.fullest}: {total}. "
        f"{_smallest(job, cluster, imbalance)}. {_largest(job, cluster, imbalance)}"
    )


def _smallest(job: Job, cluster: Cluster, imbalance: Imbalance) -> str:
    plain = smallest_cluster(job, cluster, imbalance, offload=False)
    host = smallest_cluster(job, cluster, imbalance)
    if host is None:
        return f"No cluster of {cluster.device.name} that was tried has room"
    words = f"{host.cluster.name} with optimizer states in host memory"
    if plain is None:
        return f"Smallest cluster that works: {words}"
    more = "" if plain.cluster.num_devices == host.cluster.num_devices else f", or {words}"
    return f"Smallest cluster that works: {plain.cluster.name}{more}"


def _largest(job: Job, cluster: Cluster, imbalance: Imbalance) -> str:
    def words(fit: Fit) -> str:
        return f"{format_count(parameters_of(fit))} parameters ({fit.job.model.num_layers} layers)"

    plain = largest_model(job, cluster, imbalance, offload=False)
    host = largest_model(job, cluster, imbalance)
    if host is None:
        return f"Not even one layer of this model fits {cluster.name}"
    if plain is None or parameters_of(plain) >= parameters_of(host):
        return f"Largest model of this shape on {cluster.name}: {words(plain or host)}"
    return (
        f"Largest model of this shape on {cluster.name}: {words(plain)}, or {words(host)} with optimizer states in "
        "host memory"
    )
