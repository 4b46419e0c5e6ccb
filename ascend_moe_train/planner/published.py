"""Training runs that others published, as jobs and plans of ours. Pure.

A row that does not say how its model was laid out, or says something impossible, is left out with a reason; nothing is
filled in but what its software does by default (`habits.HABITS`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import ValidationError

from ascend_moe_train.errors import ConfigError, UserError
from ascend_moe_train.model.config import AttentionConfig, MLAConfig, ModelConfig, MoEConfig
from ascend_moe_train.planner.habits import HABITS, OPTIONS, Habit, MemoryTool, selected
from ascend_moe_train.planner.hardware import Cluster, Device, find_device
from ascend_moe_train.planner.plan import ENGINES, Engine, Imbalance, Job, Plan, even_layers

MAX_BYTES = 50_000_000
MAX_ROWS = 100_000
_BIG = 2**40
_ROUTING_BALANCED = ("forced balance", "token drop")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A run: what was trained how, and what was measured. `family` is its class of runs, as in the error bars;
    `software` what `efficiency.software_paces` calls it; `split_model` and `split_plan` are those by which the
    run was put into a part, which a better reading of it must not change."""

    name: str
    group: str
    family: str
    software: str
    trust: str
    job: Job
    cluster: Cluster
    plan: Plan
    split_model: ModelConfig
    split_plan: Plan
    imbalance: Imbalance
    step_s: float | None
    peak_bytes: float | None
    tool: MemoryTool
    is_oom: bool
    is_complete: bool
    uses: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Rows that can be judged, and why others cannot, by name."""

    runs: tuple[Published, ...]
    left_out: Mapping[str, str]


def read_runs(path: Path) -> Runs:
    """The rows of a file of published runs. Raises ConfigError for a file that is not one; a bad row is left out."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes, which no file of runs is")
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {str(error)[:100]}") from error
    rows = tree.get("runs") if isinstance(tree, dict) else None
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_ROWS:
        raise ConfigError(f"{path}: not a file of runs: it needs a list 'runs' of 1 to {MAX_ROWS:,} rows")
    found, left_out = [], {}
    for number, row in enumerate(rows):
        name = row.get("id") if isinstance(row, dict) else None
        label = str(name)[:80] if isinstance(name, str) else f"row {number}"
        try:
            found.append(published(row))
        except ValidationError as error:
            left_out[label] = error.errors()[0]["msg"].removeprefix("Value error, ")
        except UserError as error:
            left_out[label] = str(error)
    return Runs(runs=tuple(found), left_out=MappingProxyType(left_out))


def published(row: Any) -> Published:
    """One row. Raises ConfigError or ValidationError that says in one line what is missing, wrong or impossible."""
    if not isinstance(row, dict):
        raise ConfigError("a row is a mapping")
    for key in ("model", "parallel"):
        if not isinstance(row.get(key), dict):
            raise ConfigError(f"{key} is not given")
    read = partial(_number, row)
    software = _text(row, "framework")
    start, habit = next((start, each) for start, each in HABITS if software.startswith(start))
    if "Megatron default" in str(row.get("recompute")):  # of 2023: attention in blocks, a distributed optimizer
        start, habit = "Megatron-LM 2023" if software == "Megatron-LM" else software, Habit(engine=ENGINES["megatron"])
    model, plain = _model(row)
    cluster = Cluster(device=_device(row), num_devices=read("n_devices"))
    micro, total = read("micro_batch"), read("global_batch")
    plan = split_plan = _plan(row, habit, model, cluster, micro)
    if habit.was_sequence_parallel is not None:
        before = replace(habit, is_sequence_parallel=habit.was_sequence_parallel)
        split_plan = _plan(row, before, model, cluster, micro)
    if total % (plan.dp * plan.micro_sequences):
        raise ConfigError(f"global_batch {total} does not divide by dp {plan.dp} x micro_batch {plan.micro_sequences}")
    precision = _precision(_text(row, "dtype"))
    job = Job(
        model=model,
        seq_len=read("model", "seq_len"),
        global_sequences=total,
        precision=precision,
        engine=_engine(row, habit.engine, precision),
        plain_ffn=plain,
    )
    measured: Any = row.get("measured")
    measured = measured if isinstance(measured, dict) else {}
    peak = _optional(measured, "peak_mem_gib")
    return Published(
        name=_text(row, "id"),
        group=_text(row, "group"),
        family=f"{cluster.device.kind} {'dense' if model.moe is None else 'MoE'}",
        software=f"{start or software} on {cluster.device.efficiency}",
        trust=_text(row, "trust"),
        job=job,
        cluster=cluster,
        plan=plan,
        split_model=_model({**row, "notes": None})[0],
        split_plan=split_plan,
        imbalance=_imbalance(row.get("routing")),
        step_s=_step_s(measured, job, cluster),
        peak_bytes=None if peak is None else peak * 2**30,
        tool="first step" if row.get("tier") == "memory" else habit.tool,
        is_oom=measured.get("oom") is True,
        is_complete=row.get("config_complete") is True,
        uses=frozenset(map(str, row["use_for"])) if isinstance(row.get("use_for"), list) else frozenset(),
    )


def _engine(row: Mapping[str, Any], habit: Engine, precision: str) -> Engine:
    """What a software does, with the options that a row names."""
    options = row.get("options") or []
    words = {str(each).split("=")[0] for each in options} if isinstance(options, list) else set()
    overlaps = habit.overlaps | {OPTIONS[word] for word in words if word in OPTIONS}
    engine = replace(habit, overlaps=frozenset(overlaps), sends_once=habit.sends_once or "DeepEP" in words)
    if habit.name == "megatron 2021" and precision == "bf16" and habit.gradient_bytes == 2:
        engine = replace(engine, gradient_bytes=6)
    if (parts := selected(str(row.get("recompute")))) is not None:
        engine = replace(engine, selective=parts)
    if "reuse-fp32-param" in words:
        engine = replace(engine, sharded_state_bytes=10, state_bytes=10)
    return engine


def _number(row: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """A positive whole number in a row. Raises ConfigError."""
    value: Any = row
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    value = default if value is None else value
    where = ".".join(keys)
    if value is None:
        raise ConfigError(f"{where} is not given")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _BIG:
        raise ConfigError(f"{where} {str(value)[:40]!r} is not a whole number that is possible")
    return value


def _optional(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise ConfigError(f"measured.{key} {str(value)[:40]!r} is not a positive number")
    return float(value)


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value or len(value) > 500:
        raise ConfigError(f"{key} is not given")
    return value


def _device(row: Mapping[str, Any]) -> Device:
    """By the part of a description before its remarks: `Ascend910B3 (Atlas 800T A2, ...)`. Runs on Jean Zay had four
    links of 100 Gb/s in a node of eight (bigscience, train/tr11-176B-ml/README.md)."""
    device = find_device(re.split(r"[ (]", _text(row, "device"), maxsplit=1)[0])
    if "BigScience" in _text(row, "group"):
        return replace(device, across=replace(device.across, bytes_per_s=6.25e9))
    return device


def _precision(text: str) -> Literal["fp16", "bf16", "fp8"]:
    if text.startswith("fp8") and "rowwise" not in text:  # whose kernels were no faster than those of bf16
        return "fp8"
    return "fp16" if text.startswith("fp16") else "bf16"


def _imbalance(routing: Any) -> Imbalance:
    text = routing if isinstance(routing, str) else ""
    if (match := re.search(r"capacity (\d(?:\.\d+)?)", text)) is not None:  # experts work on that many rows
        factor = max(1.0, float(match[1]))
        return Imbalance(expected=factor, worst=factor)
    if any(word in text for word in _ROUTING_BALANCED):
        return Imbalance(expected=1.0, worst=1.0)
    return Imbalance(expected=1.1, worst=1.1)


def _step_s(measured: Mapping[str, Any], job: Job, cluster: Cluster) -> float | None:
    if (step_s := _optional(measured, "step_time_s")) is not None:
        return step_s
    for key in ("tokens_per_s_per_device", "tokens_per_s_per_device_derived"):
        if (rate := _optional(measured, key)) is not None:
            return job.tokens_per_step / (rate * cluster.num_devices)
    return None


def _model(row: Mapping[str, Any]) -> tuple[ModelConfig, bool]:
    read = partial(_number, row, "model")
    seq_len, layers = read("seq_len"), read("layers")
    moe = None
    if (experts := read("experts", default=0)) > 1:
        ffn = read("expert_ffn")
        moe = MoEConfig(
            num_experts=experts,
            top_k=read("top_k"),
            ffn=ffn,
            shared_ffn=read("shared_experts", default=0) * ffn,
            dense_layers=tuple(range(min(layers, read("dense_layers", default=0)))),
        )
    source = row["model"]
    attention = AttentionConfig()
    mla = source.get("mla")
    if isinstance(mla, dict):
        part = partial(_number, source, "mla")
        latent = MLAConfig(
            kv_latent=part("kv_lora"),
            q_latent=part("q_lora", default=0) or None,
            nope_dim=part("nope"),
            rope_dim=part("rope"),
            value_dim=part("v"),
        )
        attention = AttentionConfig(mla=latent)
    elif (said := re.search(r"uses a (\d{1,9}) sliding window", str(row.get("notes")))) and 0 < int(said[1]) < seq_len:
        attention = AttentionConfig(window=int(said[1]), window_layers=tuple(range(layers)))
    elif 0 < (window := read("sliding_window", default=0)) < seq_len:
        attention = AttentionConfig(window=window, window_layers=tuple(range(0, layers, 2)))
    heads = read("heads")
    model = ModelConfig(
        vocab_size=read("vocab"),
        hidden=read("hidden"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads if attention.mla is not None else read("kv_heads"),
        head_dim=None if attention.mla is not None else read("head_dim"),
        ffn=read("ffn") or read("expert_ffn"),
        tie_embeddings=source.get("tied_embeddings") is True,
        attention=attention,
        moe=moe,
    )
    return model, source.get("gated_ffn") is False


def _plan(row: Mapping[str, Any], habit: Habit, model: ModelConfig, cluster: Cluster, micro: int) -> Plan:
    read = partial(_number, row, "parallel")
    sizes = {axis: max(1, read(axis, default=1)) for axis in ("pp", "tp", "ep")}
    pp, tp, ep = sizes["pp"], sizes["tp"], sizes["ep"]
    ulysses = read("sp_ulysses", default=0)
    cp = ulysses or max(1, read("cp", default=1))
    etp = tp if habit.spreads and model.moe is not None else 1
    if cluster.num_devices % (pp * cp * tp) or cluster.num_devices % (pp * ep * etp):
        raise ConfigError(f"n_devices {cluster.num_devices} do not divide by pp {pp}, cp {cp}, tp {tp}, ep {ep}")
    if model.moe is not None and model.moe.num_experts % ep:
        raise ConfigError(f"{model.moe.num_experts} experts do not divide by ep {ep}")
    zero = row["parallel"].get("zero", habit.zero)
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise ConfigError(f"parallel.zero {str(zero)[:40]!r} is not a stage of ZeRO")
    name = str(row["parallel"].get("schedule", ""))
    chunks = max(1, read("vpp", default=2 if name.startswith("Interleaved") else 1)) if pp > 1 else 1
    if _text(row, "framework").startswith("torchtitan") and pp > 1:
        micro = max(1, micro // pp)
    policy, layers = _recompute(row.get("recompute"))
    split = row["parallel"].get("sp", habit.is_sequence_parallel) is True and tp > 1
    return Plan(
        num_devices=cluster.num_devices,
        stage_layers=_stage_layers(row, model.num_layers, pp, chunks),
        pp=pp,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "zero_bubble" if name == "DualPipe" else "1f1b",
        cp=cp,
        context="ulysses" if ulysses else "ring",
        tp=tp,
        sequence_parallel=split,
        ep=ep,
        etp=etp,
        zero_stage=zero,
        micro_sequences=micro,
        recompute=policy,
        recompute_layers=layers,
        offload_optimizer="swap_optimizer" in str(row.get("options")),
    )


def _recompute(text: Any) -> tuple[Literal["none", "selective", "full"], int | None]:
    words = text if isinstance(text, str) else "none"
    if (block := re.search(r"block,? (\d+) layers", words)) is not None:
        return "full", int(block[1])
    if words.startswith("full"):
        return "full", None
    if (each := re.match(r"select \[([\d,]+)\]", words)) is not None:
        listed = [int(number) for number in each[1].split(",")]
        return "selective", round(sum(listed) / len(listed))
    if words.startswith(("none", "[", "unknown", "selective/none", "selective or none")):
        return "none", None
    return "selective", None


def _stage_layers(row: Mapping[str, Any], layers: int, pp: int, chunks: int) -> tuple[int, ...]:
    """As the row lists them; else evenly, the embedding and the head counted as a layer each where that comes out even
    and layers alone do not."""
    options = row.get("options")
    for option in options if isinstance(options, list) else ():
        match = re.fullmatch(r"num-layer-list=([\d,]{1,400})", str(option))
        if match is not None:
            listed = tuple(int(number) for number in match[1].split(","))
            if len(listed) == pp and sum(listed) == layers:
                return listed
    parts = pp * chunks
    if parts > layers + 2:
        raise ConfigError(f"pp {pp} x vpp {chunks} is more than the {layers} layers, the embedding and the head")
    if parts > 1 and layers % parts and (layers + 2) % parts == 0:
        each = (layers + 2) // parts
        return (each - 1, *[each] * (parts - 2), each - 1)
    return even_layers(layers, parts)
