"""A Hugging Face config.json as a model config. Pure.

What each family's keys mean is in the tables of huggingface_families.py.
"""

from collections.abc import Hashable, Mapping
from typing import Any

from pydantic import ValidationError

from ascend_moe_train.checkpoint.huggingface_families import FAMILIES
from ascend_moe_train.checkpoint.huggingface_keys import REQUIRED, Family, Key
from ascend_moe_train.checkpoint.huggingface_rope import read_rope
from ascend_moe_train.checkpoint.huggingface_values import (
    MAX_EXPERTS,
    MAX_LAYERS,
    SOURCE,
    coefficient,
    refused,
    shown,
    whole,
)
from ascend_moe_train.config_error import explain, nearest
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.model.config import ModelConfig


def model_config_from_hf(config: object) -> ModelConfig:
    """Return the model config of a parsed config.json, whose content may be anything.

    Where transformers pools the balance loss over layers, it divides counts by tokens rather than by assignments, so
    that its value is K times ours: our coefficient is K times theirs. Raises ConfigError, one line naming the key.
    """
    if not isinstance(config, dict):
        raise ConfigError(f"{SOURCE}: {shown(config)} is not allowed: must be a mapping")
    family = _family(config)
    for fixed in family.fixed:
        value = config.get(fixed.theirs, fixed.value)
        if value != fixed.value or isinstance(value, bool) != isinstance(fixed.value, bool):
            raise refused(fixed.theirs, value, shown(fixed.value))
    values: dict[str, Any] = dict(family.constants)
    origins = {"rope": f"{SOURCE}: rope_parameters"}
    for key in family.keys:
        name, value = _read(config, key)
        values |= dict.fromkeys(key.ours, value)
        origins |= dict.fromkeys(key.ours, f"{SOURCE}: {name}")
    num_layers = whole("num_hidden_layers", values["num_layers"], MAX_LAYERS)
    values["num_kv_heads"] = values["num_heads"] if values["num_kv_heads"] is None else values["num_kv_heads"]
    if family.has_experts:
        top_k = whole("num_experts_per_tok", values["moe.top_k"], MAX_EXPERTS)
        whole("num_experts", values["moe.num_experts"], MAX_EXPERTS)
        balance = coefficient(origins["moe.aux_loss_coef"].removeprefix(f"{SOURCE}: "), values["moe.aux_loss_coef"])
        values["moe.aux_loss_coef"] = balance * (top_k if values["moe.aux_loss_scope"] == "model" else 1)
    values["rope"] = read_rope(config, family.rope)
    values |= family.derived(config, num_layers)
    try:
        return ModelConfig.model_validate(_nested(values))
    except ValidationError as error:
        raise ConfigError(explain(error, ModelConfig, origins, SOURCE)) from error


def _family(config: Mapping[str, object]) -> Family:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        close = nearest(name, list(FAMILIES)) if isinstance(name, str) else None
        raise refused("model_type", name, f"one of {', '.join(FAMILIES)}{f' (did you mean {close}?)' if close else ''}")
    return FAMILIES[name]


def _read(config: Mapping[str, object], key: Key) -> tuple[str, object]:
    """Return (the name that was used, the value in our words)."""
    name = next((name for name in key.theirs if name in config), key.theirs[0])
    value = config.get(name, key.default)
    if key.words is not None:
        word = key.words.get(value) if isinstance(value, Hashable) else None
        if word is None:
            raise refused(name, value, " or ".join(map(shown, key.words)))
        return name, word
    if value is REQUIRED:
        close = nearest(key.theirs[0], [str(name) for name in config])
        raise ConfigError(f"{SOURCE}: {key.theirs[0]} is missing{f': {close!r} is there instead' if close else ''}")
    return name, value


def _nested(values: Mapping[str, object]) -> dict[str, object]:
    """Dotted keys as a mapping of mappings."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return tree
