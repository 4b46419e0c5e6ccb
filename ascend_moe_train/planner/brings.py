"""What techniques bring to a plan, in words: bytes, memory and time beside those of the plan without. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from ascend_moe_train.errors import ConfigError
from ascend_moe_train.planner.explain import aligned
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.plan import Imbalance, Job, Plan
from ascend_moe_train.planner.scored import Scored, scored
from ascend_moe_train.planner.sent import compressed, moved_bytes, sent_bytes
from ascend_moe_train.planner.techniques import Techniques
from ascend_moe_train.units import format_bytes, format_share


def check_links(techniques: Techniques, cluster: Cluster) -> None:
    """Raises ConfigError for what ranks of such a cluster refuse (`train.ranks`)."""
    if techniques.overlap and cluster.device.kind != "cpu":
        raise ConfigError(
            f"parallel.overlap true is for ranks that talk through MPI, on CPUs, not for {cluster.name}: leave it out"
        )


def sent_table(job: Job, plan: Plan) -> list[str]:
    """Bytes by verb, group and content, the most first; with 1-bit Adam those of its warm-up beside them."""
    now = sent_bytes(job, plan)
    rows = [["verb", "group", "content", "bytes"]]
    columns = [now]
    if plan.techniques.compress.method == "onebit_adam":
        rows[0].append("in the warm-up")
        columns.append(sent_bytes(job, plan, in_warm_up=True))
    keys = sorted(
        {key for sent in columns for key in sent}, key=lambda key: -max(sent.get(key, 0.0) for sent in columns)
    )
    rows += [[*key, *(format_bytes(round(sent.get(key, 0.0))) for sent in columns)] for key in keys]
    return aligned(rows) if keys else ["nothing"]


def technique_lines(job: Job, cluster: Cluster, imbalance: Imbalance, found: Scored) -> Iterator[str]:
    """A line for each technique of a plan, beside the plan without it."""
    plan = found.plan
    for name, value in plan.techniques.keys.items():
        if name == "bucket_bytes":
            continue
        without = replace(plan, techniques=plan.techniques.without(name))
        other = scored(job, cluster, without, imbalance)
        words = name if value is True else f"{name} {getattr(value, 'method', value)}"
        yield f"{words}: {', '.join((*_sent_words(job, plan, without), *_cost_words(job, found, other)))}"


def _sent_words(job: Job, plan: Plan, without: Plan) -> Iterator[str]:
    """How much leaves a device of what a technique changes, through what would without it."""
    before, after = (moved_bytes(job, each, sent_bytes(job, each)) for each in (without, plan))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    theirs, ours = (sum(each.get(key, 0.0) for key in keys) for each in (before, after))
    if not theirs:
        return
    is_later = plan.techniques.compress.method == "onebit_adam" != without.techniques.compress.method
    contents = " and ".join(sorted({key[2] for key in keys if key in before} - {"figures"}))
    ratio = f"1/{theirs / ours:.3g}" if ours < theirs else f"x {ours / theirs:.3g}"
    yield f"{contents} {ratio}{' after the warm-up' if is_later else ''}"
    yield f"{format_bytes(round(ours))} leave a device in a step, not {format_bytes(round(theirs))}"
    if is_later:
        yield f"in all w + (1 - w)/{theirs / ours:.3g} of that, w being the warm-up's share of the steps"


def _cost_words(job: Job, found: Scored, other: Scored) -> Iterator[str]:
    more_bytes = round(found.memory.peak_bytes - other.memory.peak_bytes)
    if found.plan.techniques.is_compressed and not other.plan.techniques.is_compressed:
        yield f"+{format_bytes(compressed(job, found.plan)[1])} of error feedback on each device"
    elif more_bytes:
        yield f"{'+' if more_bytes > 0 else '-'}{format_bytes(abs(more_bytes))} of memory"
    longer = found.time.step_s / other.time.step_s - 1
    yield f"steps {format_share(abs(longer))} {'longer' if longer > 0 else 'shorter'}"
