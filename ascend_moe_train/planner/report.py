"""The whole answer of the planner, as lines and as JSON. Pure."""

from collections.abc import Iterator
from typing import Any

from ascend_moe_train.planner.accuracy import error_bar
from ascend_moe_train.planner.brings import technique_lines
from ascend_moe_train.planner.explain import binding, changes, job_line, rejected, stage_table, table
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.plan import Imbalance, Job, Plan
from ascend_moe_train.planner.scored import Scored
from ascend_moe_train.planner.search import Found
from ascend_moe_train.planner.sent import SentBytes, sent_bytes
from ascend_moe_train.planner.techniques import Techniques
from ascend_moe_train.units import UNKNOWN, format_share


def report_lines(job: Job, cluster: Cluster, imbalance: Imbalance, name: str, found: Found) -> list[str]:
    """Best plans, the best one's memory, what binds it, what would change it, and what is out."""
    return [
        job_line(job, cluster, name),
        f"{found.num_plans:,} plans possible, {found.num_evaluated:,} evaluated; {error_words(job, cluster)}",
        "",
        *table(found.best, job),
        "",
        "memory on each device of a stage of plan 1",
        *stage_table(found.best[0]),
        "",
        binding(found.best[0], cluster),
        *technique_lines(job, cluster, imbalance, found.best[0]),
        *(f"would change it: {line}" for line in changes(job, cluster, imbalance, found)),
        "",
        *rejected(found),
    ]


def error_words(job: Job, cluster: Cluster) -> str:
    """How far predictions of this class were from published runs."""
    family = family_of(job, cluster)
    bar = error_bar(family)

    def words(share: float | None, count: int) -> str:
        return (
            f"{UNKNOWN} (no published runs)" if share is None else f"± {format_share(share)} ({count} published runs)"
        )

    return f"predicted, not measured; {family}: time {words(bar.time, bar.num_time)}, memory " + words(
        bar.memory, bar.num_memory
    )


def family_of(job: Job, cluster: Cluster) -> str:
    """The class of runs whose errors count."""
    return f"{cluster.device.kind} {'dense' if job.model.moe is None else 'MoE'}"


def as_json(job: Job, cluster: Cluster, name: str, found: Found) -> dict[str, Any]:
    """What `report_lines` say, with all figures: bytes and seconds."""
    bar = error_bar(family_of(job, cluster))
    return {
        "model": name,
        "cluster": cluster.name,
        "seq_len": job.seq_len,
        "global_sequences": job.global_sequences,
        "precision": job.precision,
        "engine": job.engine.name,
        "predicted": True,
        "error": {"time": bar.time, "memory": bar.memory},
        "num_plans": found.num_plans,
        "num_evaluated": found.num_evaluated,
        "plans": [scored_json(job, each) for each in found.best],
        "rejected": {
            kind: [
                {"family": each.label, "reason": each.reason, "plans": each.count}
                for each in found.rejections.listed(kind)
            ]
            for kind in ("impossible", "too_big", "slower")
        },
    }


def scored_json(job: Job, each: Scored) -> dict[str, Any]:
    """A plan with its figures."""
    return {
        "plan": {**dict(_choices(each.plan)), "dp": each.plan.dp, "edp": each.plan.edp},
        "num_micro": each.plan.num_micro(job),
        "step_s": each.time.step_s,
        "tokens_per_s": each.time.tokens_per_s,
        "mfu": each.time.mfu,
        "bubble_share": each.time.bubble_share,
        "items_s": dict(each.time.items),
        "exposed_s": dict(each.time.exposed),
        "peak_bytes": each.memory.peak_bytes,
        "host_bytes": each.memory.host_bytes,
        "stages_bytes": [dict(stage.items) for stage in each.memory.stages],
        **_sent_json(job, each.plan),
    }


def _sent_json(job: Job, plan: Plan) -> dict[str, Any]:
    """Bytes that a device sends in a step, and in one of 1-bit Adam's warm-up; none for software that is not ours."""
    if job.engine.name != "ours":
        return {}

    def listed(sent: SentBytes) -> list[dict[str, Any]]:
        heads = ("verb", "group", "content")
        return [{**dict(zip(heads, key, strict=True)), "payload_bytes": size} for key, size in sorted(sent.items())]

    found = {"sent": listed(sent_bytes(job, plan))}
    if plan.techniques.compress.method == "onebit_adam":
        found["sent_in_warm_up"] = listed(sent_bytes(job, plan, in_warm_up=True))
    return found


def _choices(plan: Plan) -> Iterator[tuple[str, Any]]:
    for name in plan.__dataclass_fields__:
        value = getattr(plan, name)
        if isinstance(value, Techniques):
            value = {key: getattr(each, "method", each) for key, each in value.keys.items()}
        yield name, list(value) if isinstance(value, tuple) else value
