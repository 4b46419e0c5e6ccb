"""One run, whole: read from YAML and overrides, checked once, never changed after. Pure."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from ascend_moe_train import strict_yaml
from ascend_moe_train.checkpoint.config import CheckpointConfig
from ascend_moe_train.config_error import explain, nearest, section_of
from ascend_moe_train.data.config import DataConfig
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.model.adapters import adapters
from ascend_moe_train.model.config import LoraConfig, ModelConfig
from ascend_moe_train.optim.config import LossScaleConfig, OptimConfig
from ascend_moe_train.parallel.config import ParallelConfig, check_parallel
from ascend_moe_train.part import Part
from ascend_moe_train.presets import PRESETS
from ascend_moe_train.strict_yaml import Value
from ascend_moe_train.train.config import (
    AscendConfig,
    BatchConfig,
    GuardConfig,
    ProfileConfig,
    RecomputeConfig,
    RunConfigPart,
)

MAX_ASSIGNMENTS = 2**31  # token-to-expert assignments of one micro-batch are numbered with int32


class RunConfig(Part):
    """Everything that a run depends on. Each section stands beside what it configures."""

    run: RunConfigPart
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig | None = None
    loss_scale: LossScaleConfig = LossScaleConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    ascend: AscendConfig = AscendConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.batch.global_sequences * self.data.seq_len

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        run, optim = self.run, self.optim
        if optim.warmup_steps > run.steps:
            raise ValueError(f"optim.warmup_steps {optim.warmup_steps} is more than run.steps {run.steps}")
        if optim.schedule == "wsd" and optim.warmup_steps + optim.decay_fraction * run.steps > run.steps:
            raise ValueError(
                f"optim.decay_fraction {optim.decay_fraction} of run.steps {run.steps} leaves no room for "
                f"optim.warmup_steps {optim.warmup_steps}"
            )
        if self.profile.span and self.profile.span[-1] > run.steps:
            raise ValueError(
                f"profile.steps '{self.profile.steps}' goes beyond the last step: run.steps is {run.steps}"
            )
        if run.device == "cpu" and run.precision == "bf16":
            raise ValueError("run.precision 'bf16' is for device 'ascend': on 'cpu' use 'fp32' or 'fp16'")
        if self.guard.rewinds and self.parallel.compress.method == "onebit_adam":
            raise ValueError(
                "guard.spike_action and guard.nonfinite_action 'rewind' do not go with parallel.compress.method "
                "'onebit_adam', which cannot go back to Adam: use 'skip'"
            )
        if run.device == "ascend" and run.kernels == "native":
            raise ValueError("run.kernels 'native' is for device 'cpu': on 'ascend' use 'auto' or 'portable'")
        for key in ("overlap", "slow_links"):
            if run.device == "ascend" and getattr(self.parallel, key):
                raise ValueError(f"parallel.{key} is for ranks on CPUs, run.device is 'ascend': leave it out")
        if (wire := self.parallel.expert_wire) in ("fp16", "bf16") and run.precision != "fp32":
            raise ValueError(
                f"parallel.expert_wire '{wire}' has no effect with run.precision '{run.precision}', whose rows have 2 "
                "bytes already: leave it out, or use 'int8'"
            )
        if self.lora is not None:
            if run.init_from is None:
                raise ValueError("lora adapts a trained model: run.init_from is missing, name its checkpoint")
            adapters(self.model, self.lora)
        if self.model.mtp is not None and self.model.mtp.depth >= self.data.seq_len:
            raise ValueError(
                f"model.mtp.depth {self.model.mtp.depth} needs longer sequences: data.seq_len is {self.data.seq_len}"
            )
        if self.recompute.layers is not None and self.recompute.layers > self.model.num_layers:
            raise ValueError(
                f"recompute.layers {self.recompute.layers}: the model has {self.model.num_layers} layers "
                "(model.num_layers); null is all of them"
            )
        if self.recompute.kept == "block_inputs" and self.parallel.pp == 1:
            raise ValueError("recompute.kept 'block_inputs' is for pipeline stages: parallel.pp is 1, leave it out")
        top_k = self.model.moe.top_k if self.model.moe is not None else 1
        assignments = self.batch.micro_sequences * self.data.seq_len * top_k
        if assignments >= MAX_ASSIGNMENTS:
            raise ValueError(
                f"batch.micro_sequences {self.batch.micro_sequences} x data.seq_len {self.data.seq_len} x top_k {top_k}"
                f" is {assignments:,} assignments at once: fewer than {MAX_ASSIGNMENTS:,} are possible"
            )
        check_parallel(self.parallel, self.model, self.lora, self.batch, self.data.seq_len)
        return self


# From the keys of section `run`: the model of the checkpoint that it names, as a run file would say it, or None.
ModelOfRun = Callable[[Mapping[str, Value]], dict[str, Value] | None]


def load_run(path: Path, overrides: Sequence[str] = (), model_of_run: ModelOfRun | None = None) -> RunConfig:
    """The run that a YAML file describes, with `section.key=value` overrides applied before its preset is looked up.

    Without a preset, section `model` is laid over what `model_of_run` gives. Paths are relative to the working
    directory. Raises what `model_of_run` raises, and ConfigError: one line with the file and line (or `--set`),
    the dotted key, the offending value, what is allowed, and the nearest key for an unknown one.
    """
    document = strict_yaml.read_file(path)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{path}: a run file is a mapping of sections: {', '.join(RunConfig.model_fields)}")
    origins = {key: f"{path}:{line}" for key, line in document.lines.items()}
    return resolve(document.value, origins, str(path), overrides, model_of_run)


def resolve(
    tree: dict[str, Value],
    origins: dict[str, str],
    source: str,
    overrides: Sequence[str] = (),
    model_of_run: ModelOfRun | None = None,
) -> RunConfig:
    """As `load_run`, of what a file would hold: `origins` says where its keys are from, `source` what it is. The tree
    is changed. Raises what `load_run` raises."""
    for override in overrides:
        key = apply_override(tree, override)
        origins = {known: origin for known, origin in origins.items() if not known.startswith(f"{key}.")}
        origins[key] = f"--set {override}"
        while key := section_of(key):
            origins.setdefault(key, f"--set {override}")
    if not _resolve_preset(tree, origins) and model_of_run is not None:
        _lay_over_checkpoint(tree, model_of_run)
    try:
        return RunConfig.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig, origins, source)) from None


def run_to_dict(cfg: RunConfig) -> dict[str, Any]:
    """The resolved run as JSON-able values; `RunConfig.model_validate_json` reads it back."""
    return cfg.model_dump(mode="json")


def dump_yaml(cfg: RunConfig) -> str:
    """The resolved run as YAML that `load_run` reads back: every key, no preset."""
    return strict_yaml.dump(run_to_dict(cfg))


def apply_override(tree: dict[str, Value], override: str) -> str:
    """Sets one `a.b=value` in place (a list is entered by index); returns the dotted key."""
    key, equals, text = override.partition("=")
    words = key.split(".")
    if not equals or not all(words):
        raise ConfigError(f"--set {override}: not of the form section.key=value, such as optim.lr=3e-4")
    value = strict_yaml.read_text(text, f"--set {override}").value
    place: Value = tree
    for depth, word in enumerate(words):
        last = depth == len(words) - 1
        if isinstance(place, dict):
            place[word] = value if last else place.get(word, {})
            place = place[word]
        elif isinstance(place, list) and word.isdecimal() and int(word) < len(place):
            place[int(word)] = value if last else place[int(word)]
            place = place[int(word)]
        else:
            raise ConfigError(f"--set {override}: {_no_way_in('.'.join(words[:depth]), place)}")
    return key


def _no_way_in(key: str, place: Value) -> str:
    if isinstance(place, list):
        return f"{key} is a list of {len(place)}: name an item by its number, from 0"
    return f"{key} is {json.dumps(place)}, which has no keys"


def _resolve_preset(tree: dict[str, Value], origins: dict[str, str]) -> bool:
    """Replaces `model: {preset: name, ...}` by the preset's keys with the others laid over; whether there is one."""
    model = tree.get("model")
    if not isinstance(model, dict) or "preset" not in model:
        return False
    name = model.pop("preset")
    if not isinstance(name, str) or name not in PRESETS:
        hint = nearest(str(name), list(PRESETS))
        raise ConfigError(
            f"{origins['model.preset']}: model.preset: {json.dumps(name)} is not a preset: allowed are "
            f"{', '.join(PRESETS)}" + (f" (did you mean '{hint}'?)" if hint else "")
        )
    tree["model"] = _overlaid(PRESETS[name]().model_dump(mode="json"), model)
    return True


def _lay_over_checkpoint(tree: dict[str, Value], model_of_run: ModelOfRun) -> None:
    """Completes `model` from the checkpoint that the run starts from, if it names one."""
    run, model = tree.get("run"), tree.get("model", {})
    if isinstance(run, dict) and isinstance(model, dict) and (base := model_of_run(run)) is not None:
        tree["model"] = _overlaid(base, model)


def _overlaid(base: dict[str, Value], over: dict[str, Value]) -> dict[str, Value]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _overlaid(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
