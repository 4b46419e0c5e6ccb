"""A Hugging Face config.json as a model config. Pure.

To add a family, add its table; keys that are not in the table do not bear on the model's arithmetic.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from ascend_moe_train.config_error import explain, nearest
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.model.config import ModelConfig

SOURCE = "config.json"
# Far above any model; keeps a hostile file from asking for endless tables of names.
MAX_LAYERS, MAX_EXPERTS = 1024, 4096
_MAX_COEFFICIENT = 1000
_MAX_SHOWN = 60  # characters of an offending value

_REQUIRED = object()


@dataclass(frozen=True, kw_only=True)
class Key:
    """Which of their keys sets which of ours: its names, the usual one first, and the default of their code."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    default: object = _REQUIRED


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """A key that must have the one value that this package computes, which is also its default."""

    theirs: str
    value: object


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one model_type is read. `constants` are what its code does without a key."""

    keys: tuple[Key, ...]
    fixed: tuple[Fixed, ...]
    constants: Mapping[str, object]
    default_theta: float
    dense_layers: Callable[[Mapping[str, object], int], tuple[int, ...]]


def _no_dense_layers(config: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    return ()


def _qwen3_dense_layers(config: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    """Layers in `mlp_only_layers`, and all but each `decoder_sparse_step`-th."""
    step = _whole("decoder_sparse_step", config.get("decoder_sparse_step", 1), MAX_LAYERS)
    listed = config.get("mlp_only_layers")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or any(type(i) is not int or not 0 <= i < num_layers for i in listed):
        raise _refused("mlp_only_layers", listed, f"a list of layer numbers from 0 to {num_layers - 1}")
    return tuple(i for i in range(num_layers) if i in listed or (i + 1) % step)


_COMMON_KEYS = (
    Key(theirs=("vocab_size",), ours=("vocab_size",)),
    Key(theirs=("hidden_size",), ours=("hidden",)),
    Key(theirs=("num_hidden_layers",), ours=("num_layers",)),
    Key(theirs=("num_attention_heads",), ours=("num_heads",)),
    Key(theirs=("num_key_value_heads",), ours=("num_kv_heads",)),
    Key(theirs=("head_dim",), ours=("head_dim",), default=None),
    Key(theirs=("tie_word_embeddings",), ours=("tie_embeddings",), default=False),
    Key(theirs=("initializer_range",), ours=("init_std",), default=0.02),
    Key(theirs=("num_experts_per_tok",), ours=("moe.top_k",)),
    Key(theirs=("router_aux_loss_coef",), ours=("moe.aux_loss_coef",), default=0.001),
)
_COMMON_FIXED = (Fixed(theirs="hidden_act", value="silu"), Fixed(theirs="attention_dropout", value=0.0))

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "mixtral": Family(
            keys=(
                *_COMMON_KEYS,
                Key(theirs=("rms_norm_eps",), ours=("norm_eps",), default=1e-5),
                Key(theirs=("intermediate_size",), ours=("ffn", "moe.ffn")),
                Key(theirs=("num_local_experts", "num_experts"), ours=("moe.num_experts",)),
            ),
            fixed=(
                *_COMMON_FIXED,
                Fixed(theirs="sliding_window", value=None),
                Fixed(theirs="router_jitter_noise", value=0.0),
            ),
            constants={"qk_norm": "none", "moe.normalize_topk": True},
            default_theta=1e6,
            dense_layers=_no_dense_layers,
        ),
        "qwen3_moe": Family(
            keys=(
                *_COMMON_KEYS,
                Key(theirs=("rms_norm_eps",), ours=("norm_eps",), default=1e-6),
                Key(theirs=("intermediate_size",), ours=("ffn",)),
                Key(theirs=("moe_intermediate_size",), ours=("moe.ffn",)),
                Key(theirs=("num_experts", "num_local_experts"), ours=("moe.num_experts",)),
                Key(theirs=("norm_topk_prob",), ours=("moe.normalize_topk",), default=False),
            ),
            fixed=(
                *_COMMON_FIXED,
                Fixed(theirs="attention_bias", value=False),
                Fixed(theirs="use_sliding_window", value=False),
            ),
            constants={"qk_norm": "head"},
            default_theta=1e4,
            dense_layers=_qwen3_dense_layers,
        ),
    }
)


def model_config_from_hf(config: object) -> ModelConfig:
    """Return the model config of a parsed config.json, whose content may be anything.

    transformers pools the balance loss over layers and divides counts by tokens rather than by assignments, so that
    its value is K times ours: our coefficient is K times theirs. Raises ConfigError, one line naming the key.
    """
    if not isinstance(config, dict):
        raise ConfigError(f"{SOURCE}: {_shown(config)} is not allowed: must be a mapping")
    family = _family(config)
    for fixed in family.fixed:
        value = config.get(fixed.theirs, fixed.value)
        if value != fixed.value or isinstance(value, bool) != isinstance(fixed.value, bool):
            raise _refused(fixed.theirs, value, _shown(fixed.value))
    values: dict[str, Any] = {"moe.score": "softmax", "moe.aux_loss_scope": "model", **family.constants}
    origins = {"rope": f"{SOURCE}: rope_parameters", "moe.dense_layers": f"{SOURCE}: mlp_only_layers"}
    for key in family.keys:
        name, value = _read(config, key)
        values |= dict.fromkeys(key.ours, value)
        origins |= dict.fromkeys(key.ours, f"{SOURCE}: {name}")
    num_layers = _whole("num_hidden_layers", values["num_layers"], MAX_LAYERS)
    top_k = _whole("num_experts_per_tok", values["moe.top_k"], MAX_EXPERTS)
    _whole("num_experts", values["moe.num_experts"], MAX_EXPERTS)
    values["moe.aux_loss_coef"] = top_k * _coefficient(values["moe.aux_loss_coef"])
    values["moe.dense_layers"] = family.dense_layers(config, num_layers)
    values["rope"] = _rope(config, family.default_theta)
    try:
        return ModelConfig.model_validate(_nested(values))
    except ValidationError as error:
        raise ConfigError(explain(error, ModelConfig, origins, SOURCE)) from error


def _family(config: Mapping[str, object]) -> Family:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        close = nearest(name, list(FAMILIES)) if isinstance(name, str) else None
        raise _refused(
            "model_type", name, f"one of {', '.join(FAMILIES)}{f' (did you mean {close}?)' if close else ''}"
        )
    return FAMILIES[name]


def _read(config: Mapping[str, object], key: Key) -> tuple[str, object]:
    """Return (the name that was used, the value)."""
    for name in key.theirs:
        if name in config:
            return name, config[name]
    if key.default is _REQUIRED:
        close = nearest(key.theirs[0], [str(name) for name in config])
        raise ConfigError(f"{SOURCE}: {key.theirs[0]} is missing{f': {close!r} is there instead' if close else ''}")
    return key.theirs[0], key.default


def _rope(config: Mapping[str, object], default_theta: float) -> dict[str, object]:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    name = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    section = config.get(name)
    section = {} if section is None else section
    if not isinstance(section, dict):
        raise _refused(name, section, "a mapping")
    if section.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refused(f"{name}.partial_rotary_factor", section["partial_rotary_factor"], "1.0")
    theta = section.get("rope_theta", config.get("rope_theta", default_theta))
    kind = section.get("rope_type", section.get("type", "default"))
    if kind not in ("default", "linear"):
        raise _refused(f"{name}.rope_type", kind, "'default' or 'linear'")
    if kind == "default":
        return {"theta": theta}
    return {"theta": theta, "scaling": "linear", "factor": section.get("factor")}


def _whole(name: str, value: object, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise _refused(name, value, f"a whole number from 1 to {most}")
    return value


def _coefficient(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_COEFFICIENT:
        raise _refused("router_aux_loss_coef", value, f"a number from 0 to {_MAX_COEFFICIENT}")
    return float(value)


def _refused(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{SOURCE}: {name}: {_shown(value)} is not supported: must be {allowed}")


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:_MAX_SHOWN]


def _nested(values: Mapping[str, object]) -> dict[str, object]:
    """Dotted keys as a mapping of mappings."""
    inner = {key.removeprefix("moe."): value for key, value in values.items() if key.startswith("moe.")}
    return {key: value for key, value in values.items() if not key.startswith("moe.")} | {"moe": inner}
