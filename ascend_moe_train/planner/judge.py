"""Whether a given run fits a cluster, and what it is predicted to need. Pure."""

from dataclasses import dataclass
from typing import Any

from ascend_moe_train.config import RunConfig
from ascend_moe_train.planner.brings import check_links, sent_table, technique_lines
from ascend_moe_train.planner.explain import binding, job_line, plan_words, stage_table, table
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.plan import Imbalance, Job
from ascend_moe_train.planner.report import error_words, scored_json
from ascend_moe_train.planner.run_file import plan_of_run, with_room
from ascend_moe_train.planner.scored import Scored, scored
from ascend_moe_train.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """As lines and as JSON. `complaint` says in one line why the run does not fit; None if it does."""

    lines: list[str]
    shown: dict[str, Any]
    complaint: str | None


def judged(run: RunConfig, cluster: Cluster, imbalance: Imbalance, name: str) -> Judgement:
    """The layout that a run file has, on a cluster. Raises ConfigError for one that is impossible on so many devices,
    or a precision that they do not have."""
    job = Job(
        model=run.model,
        seq_len=run.data.seq_len,
        global_sequences=run.batch.global_sequences,
        precision=run.run.precision,
    )
    cluster.device.peak(job.precision)
    plan = plan_of_run(run, cluster.num_devices)
    check_links(plan.techniques, cluster)
    room = with_room(run, cluster.num_devices, imbalance)
    found = scored(job, cluster, plan, room)
    complaint = _complaint(found, cluster)
    if complaint is not None and room.worst > imbalance.worst:
        complaint += (
            f"; experts have room for {room.worst:g} times the rows that a rank sends (parallel.receive_factor "
            f"{run.parallel.receive_factor or 'null'}): {imbalance.worst:g} is typical of the worst"
        )
    verdict = "fits" if complaint is None else "does not fit"
    return Judgement(
        lines=[
            job_line(job, cluster, name),
            f"{verdict}: {plan_words(found.plan)}; {error_words(job, cluster)}",
            "",
            *table([found], job),
            "",
            *stage_table(found),
            "",
            binding(found, cluster),
            *technique_lines(job, cluster, room, found),
            "",
            "payload that a device sends in a step, on average",
            *sent_table(job, found.plan),
        ],
        shown={"run": name, "cluster": cluster.name, "fits": complaint is None, **scored_json(job, found)},
        complaint=complaint,
    )


def _complaint(found: Scored, cluster: Cluster) -> str | None:
    memory, device = found.memory, cluster.device
    if memory.fits(device):
        return None
    if memory.peak_bytes <= device.memory_bytes:
        sizes = f"{format_bytes(memory.host_bytes)} of host memory for each device, of"
        return f"optimizer states need {sizes} {format_bytes(device.host_memory_bytes)} on {cluster.name}"
    stage = memory.stages[memory.fullest]
    items = sorted(((size, name) for name, size in stage.items.items() if size > 0), reverse=True)
    total = " + ".join(f"{name} {format_bytes(size)}" for size, name in items)
    needs = f"{format_bytes(stage.total_bytes)} of {format_bytes(device.memory_bytes)}"
    return f"stage {memory.fullest} needs {needs} on each {device.name}: {total}"
