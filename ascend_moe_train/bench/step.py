"""`amt bench step`: the training step of a run as its file has it, beside what the planner predicts of it. Pure."""

from dataclasses import dataclass
from pathlib import Path

from ascend_moe_train.bench.measured import Measured
from ascend_moe_train.bench.result import Chart, Column, Result, Row, Shows, machine, now, shown
from ascend_moe_train.bench.runs import Ended, Say, trained
from ascend_moe_train.cluster.mpiexec import check_ranks
from ascend_moe_train.cluster.msrun import check_devices, num_devices
from ascend_moe_train.cluster.of_run import is_for_npus
from ascend_moe_train.config import RunConfig, load_run
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.model.adapters import run_flops_per_token
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.planner.hardware import Cluster
from ascend_moe_train.planner.plan import TYPICAL, Job
from ascend_moe_train.planner.run_file import plan_of_run, with_room
from ascend_moe_train.planner.scored import Scored, scored
from ascend_moe_train.train.inputs import model_of_run, open_inputs

MIN_STEPS, MAX_STEPS = 2, 100_000
WORK = "work"
COLUMNS = (
    Column(key="figure", head="figure"),
    Column(key="shown", head="measured"),
    Column(key="predicted_shown", head="predicted"),
    Column(key="ratio", head="predicted / measured", shows="ratio"),
)
CHARTS = (
    Chart(title="Times of a step", values=("seconds",), shows="seconds"),
    Chart(title="Memory, and bytes sent in a step", values=("bytes",), shows="bytes"),
    Chart(title="Predicted / measured", values=("ratio",), note="1 where both are equal"),
)
MEASURED_ONLY = ("figure", "shown")
NO_PEAK = "MFU needs a peak: set run.peak_flops_per_s, or name --cluster with the --hardware of `amt bench calibrate`."
READING = (
    "Times are medians of the later half of the steps: the step of the slowest rank, communication the mean over "
    "ranks. Memory is the most that a rank has in a step after the first: its whole process, without pages of files, "
    "which ranks share. Model FLOP/s count the mathematics of the model once, forward and backward; MFU is of the peak "
    "of all ranks."
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run on so many ranks, for so many steps, with files in `out`; `cluster` is what a prediction is for."""

    run_yaml: Path
    overrides: tuple[str, ...]
    ranks: int
    steps: int
    out: Path
    cluster: Cluster | None = None


def prepared(asked: Asked) -> RunConfig:
    """The run, checked as far as that shows without starting it. Raises UserError subclasses."""
    check_ranks(asked.ranks)
    if not MIN_STEPS <= asked.steps <= MAX_STEPS:
        raise ConfigError(f"--steps {asked.steps}: must be from {MIN_STEPS} to {MAX_STEPS:,}")
    overrides = (*asked.overrides, "run.log_comm=true")
    config = load_run(asked.run_yaml, overrides, model_of_run)
    if asked.steps > config.run.steps:
        config = load_run(asked.run_yaml, (*overrides, f"run.steps={asked.steps}"), model_of_run)
    if is_for_npus(config):
        check_devices(asked.ranks, num_devices())
    open_inputs(config, 0, mesh_of(config, asked.ranks).dp)
    return config


def measure(config: RunConfig, asked: Asked, say: Say) -> tuple[Measured | None, Ended]:
    """Trains in ranks of this machine; nothing of the run is saved."""
    return trained(config, asked.ranks, asked.steps, None, asked.out / WORK, say)


def predicted(config: RunConfig, cluster: Cluster) -> Scored:
    """What the planner makes of the same run. Raises ConfigError: impossible on so many devices, or in its
    precision."""
    job = Job(
        model=config.model,
        seq_len=config.data.seq_len,
        global_sequences=config.batch.global_sequences,
        precision=config.run.precision,
    )
    cluster.device.peak(job.precision)
    plan = plan_of_run(config, cluster.num_devices)
    return scored(job, cluster, plan, with_room(config, cluster.num_devices, TYPICAL))


def step_result(config: RunConfig, found: Measured, asked: Asked, command: str) -> Result:
    """A row for each figure."""
    planned = predicted(config, asked.cluster) if asked.cluster is not None else None
    peak = config.run.peak_flops_per_s
    if peak is None and asked.cluster is not None:
        peak = asked.cluster.device.peak(config.run.precision)
    tokens_per_s = found.tokens_per_step / found.step_s
    flops_per_s = tokens_per_s * run_flops_per_token(config.model, config.lora, config.data.seq_len)
    other = _predictions(planned) if planned is not None else {}
    rows = [
        _row("step", found.step_s, "seconds", other.get("step")),
        _row("tokens/s", tokens_per_s, "count", other.get("tokens/s")),
        _row("model FLOP/s", flops_per_s, "flops", None),
        _row("MFU", flops_per_s / (peak * asked.ranks) if peak else None, "share", other.get("MFU")),
        _row("communication", found.comm_s, "seconds", None),
        _row("exposed", found.exposed_s, "seconds", other.get("exposed")),
        _row("sent by the first rank", found.sent_bytes, "bytes", None),
        _row("memory of the fullest", float(found.whole_bytes), "bytes", other.get("memory")),
        *(
            _row(f"memory of rank {number}", float(rank.peak_bytes), "bytes", None)
            for number, rank in enumerate(found.ranks)
        ),
        _row("loss of the last step", found.losses[-1], "number", None),
    ]
    settings = {
        "run": str(asked.run_yaml),
        "set": list(asked.overrides),
        "ranks": asked.ranks,
        "steps": asked.steps,
        "device": found.device,
        "kernels": found.kernels,
        "predicted for": asked.cluster.name if asked.cluster is not None else "nothing",
    }
    return Result(
        kind="step",
        title="Training step",
        command=command,
        columns=tuple(each for each in COLUMNS if planned is not None or each.key in MEASURED_ONLY),
        rows=tuple(rows),
        settings=settings,
        notes=(READING,) if peak else (NO_PEAK, READING),
        machine=machine(),
        made_at=now(),
    )


def _predictions(planned: Scored) -> dict[str, float]:
    time = planned.time
    return {
        "step": time.step_s,
        "tokens/s": time.tokens_per_s,
        "MFU": time.mfu,
        "exposed": sum(time.exposed.values()),
        "memory": float(planned.memory.peak_bytes),
    }


def _row(figure: str, value: float | None, shows: Shows, other: float | None) -> Row:
    return {
        "figure": figure,
        "value": value,
        "predicted": other,
        shows: value,
        "shown": shown(value, shows),
        "predicted_shown": "" if other is None else shown(other, shows),
        "ratio": other / value if other is not None and value else None,
    }
