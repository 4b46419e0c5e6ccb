"""What `amt schedule` shows: the timeline of a pipeline schedule with equal stages, as JSON and as a drawing. Pure."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.config import ScheduleName
from ascend_moe_train.parallel.mesh_map import columns
from ascend_moe_train.parallel.schedule import COMPUTE, bounds, held, in_flight, schedule
from ascend_moe_train.parallel.schedule_check import check
from ascend_moe_train.parallel.timeline import Span, Timeline, equal_stages, simulate
from ascend_moe_train.units import format_seconds, format_share

MAX_PASSES = 50_000  # micro-batches x chunks x stages, as a picture and as JSON more than enough
MAX_S = 1e6
ROUNDING = 1 + 1e-9
IDLE = "."
LAST_LETTER = ord("z")  # of all chunks from the 26th on


def timeline_view(
    name: ScheduleName,
    num_stages: int,
    num_micro: int,
    chunks: int,
    *,
    forward_s: float,
    backward_s: float,
    weight_s: float | None,
    send_s: float,
) -> dict[str, Any]:
    """The timeline as JSON-able values. The durations are those of a micro-batch in one whole stage; `weight_s` is the
    part of `backward_s` that zero_bubble does later, half of it if None.

    Raises ConfigError for what there is no schedule for, for durations that cannot be, for more than MAX_PASSES.
    """
    later_s = backward_s / 2 if weight_s is None else weight_s
    durations_s = {"forward_s": forward_s, "backward_s": backward_s, "weight_s": later_s, "send_s": send_s}
    for key, value_s in durations_s.items():
        if not 0 <= value_s <= MAX_S:
            raise ConfigError(f"{key} {value_s} is not allowed: must be from 0 to {MAX_S:.0f}")
    if later_s > backward_s:
        raise ConfigError(f"weight_s {later_s} is more than backward_s {backward_s}, of which it is a part")
    if (count := num_stages * num_micro * chunks) > MAX_PASSES:
        raise ConfigError(
            f"{num_stages} stages x {num_micro} micro-batches x {chunks} chunks are {count} passes: at most "
            f"{MAX_PASSES} are shown"
        )
    try:
        actions = schedule(name, num_stages, num_micro, chunks)
        check(actions, num_micro, chunks, bounds(name, num_stages, num_micro, chunks))
        timeline = simulate(actions, equal_stages(name, chunks, **durations_s))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return {
        "schedule": name,
        "num_stages": num_stages,
        "micro_batches": num_micro,
        "chunks": chunks,
        **durations_s,
        "step_s": timeline.step_s,
        "bubble_share": timeline.bubble_share,
        "bubble_to_work": timeline.bubble_to_work,
        "stages": [_stage(timeline, stage) for stage in range(num_stages)],
    }


def view_text(shown: dict[str, Any], max_columns: int) -> Iterator[str]:
    """The lines of a view, none longer than `max_columns` if that leaves any room."""
    chunks = f" x {shown['chunks']} chunks" if shown["chunks"] > 1 else ""
    yield f"{shown['schedule']}: {shown['num_stages']} stages{chunks}, {shown['micro_batches']} micro-batches"
    yield (
        f"Step {format_seconds(shown['step_s'])}, bubble {format_share(shown['bubble_share'])} of it, "
        f"{format_share(shown['bubble_to_work'])} of the work"
    )
    yield ""
    heads = [f"stage {stage['stage']} |" for stage in shown["stages"]]
    room = max(max_columns - max(map(len, heads)) - 1, 1)
    for head, line in zip(heads, _drawn(shown, room), strict=True):
        yield f"{head.rjust(max(map(len, heads)))}{line}|"
    yield ""
    chunk = ", then the chunk" if chunks else ""
    yield f"F forward, B backward, W weights' gradients, with the number of the micro-batch{chunk}; {IDLE} idle"
    yield ""
    rows = [
        (str(stage["stage"]), format_share(stage["bubble_share"]), str(stage["in_flight"]), str(stage["held"]))
        for stage in shown["stages"]
    ]
    yield from columns([("stage", "bubble", "in flight", "held"), *rows])


def _stage(timeline: Timeline, stage: int) -> dict[str, Any]:
    spans = timeline.spans[stage]
    actions = [span.action for span in spans]
    return {
        "stage": stage,
        "busy_s": timeline.busy_s[stage],
        "bubble_share": timeline.bubble_shares[stage],
        "in_flight": in_flight(actions),
        "held": held(actions),
        "actions": [_span(span) for span in spans],
    }


def _span(span: Span) -> dict[str, Any]:
    return {
        "kind": str(span.action.kind),
        "micro": span.action.micro,
        "chunk": span.action.chunk,
        "start_s": span.start_s,
        "end_s": span.end_s,
    }


def _drawn(shown: dict[str, Any], max_columns: int) -> Iterator[str]:
    """A line for each stage, time from left to right; as wide as the labels need, if there is room."""
    passes = [[each for each in stage["actions"] if each["kind"] in COMPUTE] for stage in shown["stages"]]
    longest = len("F") + len(str(shown["micro_batches"] - 1)) + (shown["chunks"] > 1)
    shortest_s: dict[str, float] = {}
    for each in chain(*passes):
        if (length_s := each["end_s"] - each["start_s"]) > 0:
            shortest_s[each["kind"]] = min(length_s, shortest_s.get(each["kind"], length_s))
    per_s = max_columns / shown["step_s"]
    # whole columns for the shortest pass, so that equal ones look equal, if it does not become a single one
    if (cell := min(longest + 1, int(per_s * min(shortest_s.values())))) > 1:
        per_s = cell / min(shortest_s.values())
    room = {kind: max(int(length_s * per_s * ROUNDING), 1) for kind, length_s in shortest_s.items()}
    for listed in passes:
        line = ""
        for each in listed:
            start, stop = (round(each[key] * per_s) for key in ("start_s", "end_s"))
            label = _label(each, shown["chunks"], min(stop - start, room.get(each["kind"], 0)))
            line = line.ljust(start, IDLE) + label.ljust(stop - start - 1, "-").ljust(stop - start)
        yield line.ljust(round(shown["step_s"] * per_s), IDLE)


def _label(each: dict[str, Any], chunks: int, width: int) -> str:
    """Letter, micro-batch and chunk, or as much of it as there is room for."""
    letter = each["kind"][0].upper()
    number = f"{letter}{each['micro']}"
    chunk = chr(min(ord("a") + each["chunk"], LAST_LETTER)) if chunks > 1 else ""
    return next(label for label in (number + chunk, number, letter, "") if len(label) <= width)
