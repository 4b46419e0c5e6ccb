"""The result of `amt bench ablate`: a row for each rung, set against the first and against the one below. Pure."""

import math
import os
import statistics
from collections.abc import Mapping, Sequence

from ascend_moe_train.bench.ablate import Asked, Ladder
from ascend_moe_train.bench.ladder import NUMERICS, Case, NumericsName
from ascend_moe_train.bench.measured import Measured
from ascend_moe_train.bench.result import Chart, Column, Result, Row, machine, now, shown, spread
from ascend_moe_train.cluster.cores import num_cores

# How far a loss may be from that of the rung below where sums are only taken in another order: see docs/design.md, 8.
SAME_LOSS = 1e-4
COLUMNS = (
    Column(key="rung", head="rung"),
    Column(key="says", head="what it adds"),
    Column(key="on", head="on"),
    Column(key="tokens_per_s", head="tokens/s", shows="count"),
    Column(key="against_first", head="x first", shows="ratio"),
    Column(key="against_on", head="x below", shows="ratio"),
    Column(key="memory_bytes", head="memory", shows="bytes"),
    Column(key="sent_bytes", head="sent", shows="bytes"),
    Column(key="calls", head="calls", shows="count"),
    Column(key="comm_s", head="comm.", shows="seconds"),
    Column(key="exposed_s", head="exposed", shows="seconds"),
    Column(key="loss", head="loss", shows="number"),
    Column(key="loss_apart", head="loss x first", shows="error"),
    Column(key="parity", head="parity"),
)
ON_SCREEN = tuple(column.key for column in COLUMNS if column.key not in ("says", "low", "high"))
CHARTS = (
    Chart(title="Tokens per second", values=("tokens_per_s",), low="low", high="high"),
    Chart(
        title="Seconds of a step",
        values=("hidden_s", "exposed_s"),
        legend=("computing, with what it hides of communication", "waiting for communication"),
    ),
    Chart(
        title="Memory",
        values=("memory_bytes",),
        note="of the fullest rank, beyond what it had before its model was built",
    ),
    Chart(title="Sent", values=("sent_bytes",), note="by the first rank in a step", log=True),
    Chart(
        title="Loss after the last step, distance from the first rung",
        values=("loss_distance",),
        note="relative; none where it is the same bit for bit",
        log=True,
    ),
)
READING = (
    "A rung has what the one that it stands on has, and what it adds; `beside` marks those on which no other stands.",
    "Tokens/s: the median of the later half of the steps, of the slowest rank, with several runs the median of those. "
    "Ratios: the median of those of each round. Memory: the most that a rank has in a step after the first, beyond "
    "what it has before its model is built. Sent: bytes that leave the first rank in a step, by algorithms that send "
    "no more than is needed. Communication and exposed: what all collectives of a step take, with waiting for ranks "
    "that come later, and how long the step stood still for them, means over ranks.",
    f"Parity: the loss of the last step against the rung below: the same bits, within {SAME_LOSS:g} where sums are "
    "taken in another order, or how far numbers that are rounded on their way lead from it.",
    "Ranks on one machine share its cores and talk through its memory: bytes, memory and losses are what they are "
    "anywhere, times are those of this machine, and a technique that saves bytes for work costs time here. "
    "`--set parallel.slow_links...` shows what a slower network would do.",
)


def result_of(ladder: Ladder, asked: Asked, command: str) -> Result:
    """Everything that has been found so far."""
    rows = [_row(case, ladder) for case in ladder.cases]
    measured = [each for found in ladder.measured.values() for each in found]
    notes = [*READING]
    if ladder.exit_code is not None:
        notes.insert(0, "Not finished: it was stopped; the same command goes on.")
    on = {each.device for each in measured}
    kernels = {name: found[0].kernels for name, found in ladder.measured.items()}
    load, cores = os.getloadavg()[0], num_cores()
    if load > asked.ranks + cores:
        notes.insert(0, f"The machine had other work (load {load:.0f} on {cores} cores): times say little.")
    return Result(
        kind="ablate",
        title="What each technique gives",
        command=command,
        columns=COLUMNS,
        rows=tuple(rows),
        settings={
            "run": str(asked.run_yaml),
            "set": list(asked.overrides),
            "ranks": asked.ranks,
            "steps": asked.steps,
            "repeat": asked.repeat,
            "tokens of a step": ladder.config.tokens_per_step,
            "device": ", ".join(sorted(on)),
            "kernels": kernels,
        },
        notes=tuple(notes),
        machine=machine(),
        made_at=now(),
    )


def _row(case: Case, ladder: Ladder) -> Row:
    rung = case.rung
    row: Row = {
        "rung": rung.name,
        "says": rung.says,
        "on": f"{'beside ' if rung.beside else ''}{case.on or ''}",
        "changes": " ".join(rung.changes) or (f"put in: {rung.put_in}" if rung.put_in else ""),
    }
    own = ladder.measured.get(rung.name)
    if not own:
        why = f"left out: {case.why_not}" if case.why_not else ladder.failed.get(rung.name, "not measured")
        return row | {"parity": why}
    first = next(ladder.measured[each.rung.name] for each in ladder.cases if each.rung.name in ladder.measured)
    below = ladder.measured.get(case.on) if case.on is not None else None
    rates = [each.tokens_per_step / each.step_s for each in own]
    loss, first_loss = own[0].losses[-1], first[0].losses[-1]
    apart = loss / first_loss - 1
    middle = {
        name: statistics.median(getattr(each, name) for each in own)
        for name in ("comm_s", "exposed_s", "step_s", "sent_bytes")
    }
    return row | {
        "tokens_per_s": statistics.median(rates),
        **spread(rates),
        "against_first": ratio(own, first),
        "against_on": ratio(own, below) if below else None,
        "memory_bytes": float(max(each.memory_bytes for each in own)),
        "calls": float(sum(each.calls for each in own[0].calls)),
        **middle,
        "hidden_s": middle["step_s"] - middle["exposed_s"],
        "loss": loss,
        "loss_apart": apart,
        "loss_distance": abs(apart) or None,
        "parity": parity(rung.numerics, own, below) if below else "",
    }


def ratio(own: Sequence[Measured], other: Sequence[Measured]) -> float:
    """How many times as fast: the median over the rounds that both have."""
    return statistics.median(base.step_s / each.step_s for each, base in zip(own, other, strict=False))


def parity(numerics: NumericsName, own: Sequence[Measured], below: Sequence[Measured]) -> str:
    """Whether the losses are what they may be, against those of the rung below."""
    if own[0].losses == below[0].losses:
        return "same bits"
    apart = own[0].losses[-1] / below[0].losses[-1] - 1
    may: Mapping[NumericsName, float] = {"same": 0.0, "order": SAME_LOSS, "rounds": math.inf}
    wrong = "" if abs(apart) <= may[numerics] and numerics != "same" else "which is NOT what it should be: "
    return f"{shown(apart, 'error')}, {wrong}{NUMERICS[numerics]}"
