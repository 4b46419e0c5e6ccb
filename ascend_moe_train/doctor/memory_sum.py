"""Memory that ran out, beside the planner's sum for the run, and the smallest change that fits. Pure."""

from collections.abc import Callable, Sequence

from ascend_moe_train.config import RunConfig
from ascend_moe_train.doctor.figures import shortage_of
from ascend_moe_train.doctor.verdict import Verdict
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.memory import Memory, memory_of
from ascend_moe_train.planner.plan import Imbalance, Job
from ascend_moe_train.planner.run_file import plan_of_run
from ascend_moe_train.units import format_bytes

# From what costs the least: a smaller micro-batch, activations again, states over more ranks.
CHANGES: tuple[tuple[str, ...], ...] = (
    ("batch.micro_sequences=1",),
    ("recompute.policy=selective",),
    ("parallel.zero_stage=1",),
    ("parallel.zero_stage=1", "batch.micro_sequences=1"),
    ("recompute.policy=full",),
    ("recompute.policy=full", "batch.micro_sequences=1"),
    ("parallel.zero_stage=3", "batch.micro_sequences=1"),
    ("parallel.zero_stage=3", "recompute.policy=full", "batch.micro_sequences=1"),
)

Load = Callable[[tuple[str, ...]], RunConfig]


def memory_lines(verdict: Verdict, load: Load, cluster: Cluster) -> list[str]:
    """What the planner expects of the run that `load` gives with overrides, what was observed, and what to change.

    Raises ConfigError: the run's layout is not possible on the cluster.
    """
    memory = _memory(load(()), cluster)
    stage = memory.stages[memory.fullest]
    items = sorted(((size, name) for name, size in stage.items.items() if size > 0), reverse=True)
    total = " + ".join(f"{name} {format_bytes(size)}" for size, name in items)
    device = cluster.device
    lines = [
        f"planned, stage {memory.fullest}: {format_bytes(stage.total_bytes)} of {format_bytes(device.memory_bytes)} "
        f"on each {device.name}: {total}"
    ]
    events = verdict.cause.events if verdict.cause is not None else ()
    short = next((found for event in events if (found := shortage_of(event.text)) is not None), None)
    if short is not None:
        wanted = short.reserved + short.request
        lines.append(
            f"observed: {format_bytes(wanted)} wanted, {format_bytes(short.reserved)} held by this process and "
            f"{format_bytes(max(short.foreign, 0.0))} by others, of {format_bytes(short.total)}"
        )
    return [*lines, _advice(load, cluster, memory, 0.0 if short is None else wanted - stage.total_bytes)]


def _memory(run: RunConfig, cluster: Cluster) -> Memory:
    job = Job(
        model=run.model,
        seq_len=run.data.seq_len,
        global_sequences=run.batch.global_sequences,
        precision=run.run.precision,
    )
    return memory_of(job, cluster, plan_of_run(run, cluster.num_devices), Imbalance())


def _advice(load: Load, cluster: Cluster, before: Memory, unplanned_bytes: float) -> str:
    """The smallest change whose planned memory, with what was observed beyond the plan, fits."""
    beyond_bytes = max(unplanned_bytes, 0.0)
    for change in CHANGES:
        after = _changed(load, cluster, change)
        if after is None or after.peak_bytes >= before.peak_bytes:
            continue
        if after.peak_bytes + beyond_bytes <= cluster.device.memory_bytes and after.fits(cluster.device):
            saved = format_bytes(before.peak_bytes - after.peak_bytes)
            return f"smallest change that fits: {_words(change)} (saves {saved} of each device)"
    return f"no change of micro-batch, recomputation or ZeRO fits: amt plan --model run.yaml --cluster {cluster.name}"


def _changed(load: Load, cluster: Cluster, change: tuple[str, ...]) -> Memory | None:
    """None for a change that this run does not allow."""
    try:
        return _memory(load(change), cluster)
    except ConfigError:
        return None


def _words(change: Sequence[str]) -> str:
    return " ".join(f"--set {each}" for each in change)
