"""`amt bench comm`, `gemm` and `calibrate`: what ranks of this machine can do, and a hardware file of it. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Literal

from ascend_moe_train import strict_yaml
from ascend_moe_train.bench.measured import FOUND
from ascend_moe_train.bench.probes import (
    PROBE_MODULE,
    WITHOUT_PAYLOAD,
    CommTime,
    DispatchSizes,
    Probed,
    WorkTime,
    alpha_beta,
    best_flops_per_s,
    entry,
    read_probed,
)
from ascend_moe_train.bench.result import Chart, Column, Result, Row, machine, now
from ascend_moe_train.bench.runs import Ended, Say, in_ranks
from ascend_moe_train.cluster.launch import make_job
from ascend_moe_train.cluster.mpiexec import check_ranks, rank_command
from ascend_moe_train.cluster.verdict import Deadlines
from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.planner.efficiency import efficiencies
from ascend_moe_train.planner.hardware import catalogue, find_device
from ascend_moe_train.units import format_bytes, format_seconds

What = Literal["comm", "work", "dispatch"]
MAX_ROUNDS = 1000
IDLE_S = 1800.0
WORK, HARDWARE = "work", "hardware.yaml"
COMM_COLUMNS = (
    Column(key="name", head="verb and size"),
    Column(key="ranks", head="ranks of a group", shows="count"),
    Column(key="payload_bytes", head="payload", shows="bytes"),
    Column(key="best_s", head="best", shows="seconds"),
    Column(key="median_s", head="median", shows="seconds"),
    Column(key="rate", head="sent", shows="byte_rate"),
    Column(key="alpha_s", head="alpha", shows="seconds"),
    Column(key="fitted_rate", head="1 / beta", shows="byte_rate"),
    Column(key="fitted_s", head="alpha + beta bytes", shows="seconds"),
)
COMM_CHARTS = (
    Chart(title="What leaves a rank", values=("rate",), note="best of all rounds", log=True),
    Chart(title="Time of a call", values=("best_s",), note="best of all rounds", log=True),
)
WORK_COLUMNS = (
    Column(key="name", head="operator and shape"),
    Column(key="best_s", head="best", shows="seconds"),
    Column(key="median_s", head="median", shows="seconds"),
    Column(key="flops_per_s", head="speed", shows="flops"),
    Column(key="of_best", head="of the best product", shows="share"),
    Column(key="bytes_per_s", head="memory", shows="byte_rate"),
)
WORK_CHARTS = (
    Chart(title="Speed of a rank, all at work", values=("flops_per_s",)),
    Chart(title="Memory that operators read and write", values=("bytes_per_s",)),
)
DISPATCH_COLUMNS = (
    Column(key="name", head="step"),
    Column(key="best_s", head="best", shows="seconds"),
    Column(key="median_s", head="median", shows="seconds"),
    Column(key="tokens_per_s", head="tokens/s", shows="rate"),
    Column(key="flops_per_s", head="speed", shows="flops"),
    Column(key="bytes_per_s", head="memory", shows="byte_rate"),
)
DISPATCH_CHARTS = (Chart(title="Time of a micro-batch", values=("best_s",)),)
ENTRY_COLUMNS = (
    Column(key="figure", head="figure"),
    Column(key="measured", head="measured", shows="number"),
    Column(key="assumed", head="assumed without it", shows="number"),
)
ENTRY_CHARTS = (
    Chart(
        title="Measured against assumed", values=("against",), note="1 where it is as assumed", shows="ratio", log=True
    ),
)
READING = (
    "All ranks do the same at the same time; of each round the slowest counts. Best is of the round that other jobs "
    "held up least; fits are to that."
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """So many ranks on this machine, so many rounds, and the folder for files."""

    ranks: int
    rounds: int
    out: Path


def probed(
    what: Sequence[What], asked: Asked, say: Say, sizes: DispatchSizes | None = None
) -> tuple[Probed | None, Ended]:
    """Measures in ranks of this machine, `dispatch` of a layer with those sizes. Raises UserError subclasses: it cannot
    begin."""
    check_ranks(asked.ranks)
    if asked.ranks < 2 and tuple(what) == ("comm",):
        raise ConfigError(f"--ranks {asked.ranks}: collectives are between ranks: must be 2 at the least")
    if not 1 <= asked.rounds <= MAX_ROUNDS:
        raise ConfigError(f"--rounds {asked.rounds}: must be from 1 to {MAX_ROUNDS:,}")
    folder = asked.out / WORK
    command = rank_command(PROBE_MODULE, [str(folder)])
    deadlines = Deadlines(compile_s=IDLE_S, step_s=IDLE_S, save_s=IDLE_S)
    order: dict[str, Any] = {"what": list(what), "rounds": asked.rounds}
    if sizes is not None:
        order["sizes"] = vars(sizes)
    ended = in_ranks(order, folder, say, lambda: make_job(asked.ranks, command, deadlines, run_dir=folder))
    return (read_probed(folder / FOUND) if ended == Ended() else None), ended


def comm_result(found: Probed, asked: Asked, command: str) -> Result:
    """A row for each verb, group and size; the fits are notes."""
    rows: list[Row] = []
    notes = [READING]
    for (verb, size), group in groupby(found.comm, key=lambda each: (each.verb, each.size)):
        times = list(group)
        alpha_s, beta_s = alpha_beta(times)
        rows += [_comm_row(each, alpha_s, beta_s) for each in times]
        rate = f", then {format_bytes(1 / beta_s)}/s" if beta_s else ", then no limit that shows"
        if verb in WITHOUT_PAYLOAD:
            rate = ""
        notes.append(f"{verb} in groups of {size}: {format_seconds(alpha_s)} a call{rate}.")
    notes.append("hardware.yaml has the one link that the planner's formula makes of them.")
    return _result(
        "comm", "Collectives through this machine's memory", COMM_COLUMNS, rows, notes, asked, found, command
    )


def work_result(found: Probed, asked: Asked, command: str) -> Result:
    """A row for each operator."""
    best = best_flops_per_s(found.work)
    rows = [_work_row(each, best) for each in found.work]
    title = "Matrix products and other operators"
    return _result("gemm", title, WORK_COLUMNS, rows, [READING], asked, found, command)


def dispatch_result(found: Probed, asked: Asked, command: str) -> Result:
    """A row for each operator and kernel set, and one for the exchange between ranks."""
    rows: list[Row] = []
    for each in found.work:
        rate = {"flops_per_s" if each.kind == "experts" else "bytes_per_s": each.work / each.best_s}
        rows.append({"name": each.name, "tokens_per_s": each.shape[0] / each.best_s, **_times(each.rounds_s), **rate})
    tokens = found.work[0].shape[0]
    for time in found.comm:
        name = f"{time.verb} over {time.size} ranks"
        rate = {"bytes_per_s": time.moved_bytes / time.best_s}
        rows.append({"name": name, "tokens_per_s": tokens / time.best_s, **_times(time.rounds_s), **rate})
    T, K, E, D, F = found.work[0].shape
    notes = (
        READING,
        f"A micro-batch of {T} tokens of a rank, {K} of {E} experts each, hidden size {D}, width {F} of experts, in "
        "fp32, forward. The exchange is one way, of rows that are spread evenly.",
    )
    return _result(
        "dispatch", "The way through a layer of experts", DISPATCH_COLUMNS, rows, notes, asked, found, command
    )


def dispatch_sizes(config: RunConfig) -> DispatchSizes:
    """Of a run's layers of experts. Raises ConfigError: it has none."""
    moe = config.model.moe
    if moe is None:
        raise ConfigError("the model has no experts: model.moe is null")
    return DispatchSizes(
        tokens=config.batch.micro_sequences * config.data.seq_len,
        top_k=moe.top_k,
        num_experts=moe.num_experts,
        hidden=config.model.hidden,
        ffn=moe.ffn,
    )


def calibrate_result(found: Probed, asked: Asked, name: str, command: str) -> Result:
    """A row for each figure of the hardware file, beside what the planner assumes of a CPU without it."""
    known = find_device("cpu")
    assumed = {**vars(known), "inside": vars(known.inside), "efficiency": vars(efficiencies()[known.efficiency])}
    rows: list[Row] = []
    for path, value in _leaves(entry(found)):
        before = _at(assumed, path)
        against = value / before if before else None
        rows.append({"figure": ".".join(path), "measured": float(value), "assumed": before, "against": against})
    notes = [
        READING,
        f"`amt plan --model run.yaml --cluster {asked.ranks}x{name} --hardware {asked.out / HARDWARE}` plans with it.",
        "A device is a rank with its share of the cores, its memory a share of all. fp32 only; links between machines "
        "stay as they are assumed.",
    ]
    return _result("calibrate", "This machine for the planner", ENTRY_COLUMNS, rows, notes, asked, found, command)


def hardware_text(found: Probed, name: str, command: str) -> str:
    """The file that `amt plan --hardware` reads."""
    facts = machine()
    heading = (
        f"# measured by `{command}` at {now()}, on {facts['processor']}, load {facts['load of the last minute']}\n"
    )
    return heading + strict_yaml.dump({name: entry(found)})


def check_name(name: str) -> None:
    """Raises ConfigError: not a name that `--cluster 8xNAME` can have."""
    if not name or not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise ConfigError(f"--name {name[:60]!r}: must be of letters, digits, - and _")
    if name in catalogue():
        raise ConfigError(f"--name {name!r} is a device of the catalogue: give another")


def _result(
    kind: str,
    title: str,
    columns: tuple[Column, ...],
    rows: Sequence[Row],
    notes: Sequence[str],
    asked: Asked,
    found: Probed,
    command: str,
) -> Result:
    settings = {
        "ranks": asked.ranks,
        "threads of a rank": found.threads,
        "rounds": asked.rounds,
        "kernels": found.kernels,
        "copied a second by a rank": f"{format_bytes(found.copy_bytes_per_s)} read and written",
    }
    return Result(
        kind=kind,
        title=title,
        command=command,
        columns=columns,
        rows=tuple(rows),
        settings=settings,
        notes=tuple(notes),
        machine=machine(),
        made_at=now(),
    )


def _comm_row(time: CommTime, alpha_s: float, beta_s: float) -> Row:
    payload = f" x {format_bytes(time.payload_bytes)}" if time.payload_bytes else ""
    return {
        "name": f"{time.verb} {time.size}{payload}",
        "verb": time.verb,
        "ranks": float(time.size),
        "payload_bytes": float(time.payload_bytes),
        **_times(time.rounds_s),
        "rate": time.moved_bytes / time.best_s or None,
        "alpha_s": alpha_s,
        "beta_s": beta_s,
        "fitted_rate": 1 / beta_s if beta_s else None,
        "fitted_s": alpha_s + beta_s * time.moved_bytes,
    }


def _times(rounds_s: Sequence[float]) -> Row:
    return {"best_s": min(rounds_s), "median_s": median(rounds_s)}


def _work_row(time: WorkTime, best_flops_per_s: float) -> Row:
    row: Row = {"name": f"{time.name} {' x '.join(map(str, time.shape))}", **_times(time.rounds_s)}
    rate = time.work / time.best_s
    if time.kind in ("product", "grouped", "attention"):
        return row | {"flops_per_s": rate, "of_best": rate / best_flops_per_s}
    return row | ({"bytes_per_s": rate} if time.kind == "vector" else {})


def _leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        elif not isinstance(value, str):
            yield (*path, name), value


def _at(tree: Any, path: tuple[str, ...]) -> float | None:
    for name in path:
        tree = tree.get(name) if hasattr(tree, "get") else None
    return float(tree) if tree is not None else None
