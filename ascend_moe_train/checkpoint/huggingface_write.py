"""A model config as a Hugging Face config.json: the tables of huggingface_families.py read the other way. Pure.

What is written is read again, and refused if it means another model.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ascend_moe_train.checkpoint.converted import output_differences
from ascend_moe_train.checkpoint.huggingface_config import model_config_from_hf
from ascend_moe_train.checkpoint.huggingface_families import FAMILIES
from ascend_moe_train.checkpoint.huggingface_keys import Family, Key
from ascend_moe_train.checkpoint.huggingface_rope import read_rope, write_rope
from ascend_moe_train.config_error import nearest
from ascend_moe_train.errors import CheckpointError, ConfigError
from ascend_moe_train.model.config import ModelConfig, RopeConfig

_LATER, _EARLIER = "dtype", "torch_dtype"  # of transformers 5 and before


def write_config(model: ModelConfig, model_type: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model: `base` with no more changed than the model needs; with all keys if it is empty.

    Raises:
        CheckpointError: an unknown model_type, or one whose code computes something else, naming the key of ours.
    """
    family = FAMILIES.get(model_type)
    if family is None:
        close = nearest(model_type, list(FAMILIES))
        meant = f" (did you mean {close}?)" if close else ""
        raise CheckpointError(f"model_type {model_type!r} is unknown; allowed: {', '.join(FAMILIES)}{meant}")
    if family.has_experts != (model.moe is not None):
        kind = "with" if model.moe is not None else "without"
        raise CheckpointError(f"model_type {model_type!r} is no family of models {kind} experts")
    config: dict[str, Any] = dict(base)
    if config.get("model_type") != model_type:
        words = "".join(word.capitalize() for word in model_type.split("_"))
        config |= {"model_type": model_type, "architectures": [f"{words}ForCausalLM"]}
    for fixed in family.fixed:
        if not base or config.get(fixed.theirs, fixed.value) != fixed.value:
            config[fixed.theirs] = fixed.value
    for key in family.keys:
        _set(config, key, _value(model, key), explicit=not base)
    written = config | _WRITTEN.get(model_type, _nothing)(model)
    if not base or _derived(family, config, model) != _derived(family, written, model):
        config = written
    _set_rope(config, family, model.rope)
    try:
        again = model_config_from_hf(config)
    except ConfigError as error:
        raise CheckpointError(f"as model_type {model_type!r}: {error}") from error
    for name, (wanted, computed) in output_differences(model, again).items():
        raise CheckpointError(f"model_type {model_type!r} computes model.{name} = {computed}, this model has {wanted}")
    return config


def family_of(model: ModelConfig) -> str:
    """The first family whose code computes this model. Raises CheckpointError with the reason of the nearest one."""
    reasons = []
    for model_type, family in FAMILIES.items():
        if family.has_experts != (model.moe is not None):
            continue
        try:
            write_config(model, model_type, {})
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return model_type
    raise CheckpointError(f"no Hugging Face family computes this model: {'; '.join(reasons)}")


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config.json of weights in another dtype (such as `bfloat16`) that are not quantised."""
    changed = {key: value for key, value in config.items() if key != "quantization_config"}
    changed[_EARLIER if _EARLIER in config or _LATER not in config else _LATER] = dtype
    return changed


def _value(model: ModelConfig, key: Key) -> object:
    """What their key has to be; of several of ours, the last is the one that a model with experts uses."""
    value: Any = model
    for word in key.ours[-1].split("."):
        value = getattr(value, word) if value is not None else None
    if key.ours[-1] == "moe.aux_loss_coef" and model.moe is not None and model.moe.aux_loss_scope == "model":
        value /= model.moe.top_k
    if key.words is not None:
        value = next((theirs for theirs, ours in key.words.items() if ours == value), key.default)
    return value


def _set(config: dict[str, Any], key: Key, value: object, *, explicit: bool) -> None:
    name = next((name for name in key.theirs if name in config), key.theirs[0])
    if name in config and config[name] is None and value == key.default:
        return
    before = config.get(name, key.default)
    close = isinstance(before, float) and isinstance(value, float) and math.isclose(before, value)
    if (before == value or close) and (name in config or not explicit):
        return
    if value is None and key.default is None:
        config.pop(name, None)
    else:
        config[name] = value


def _set_rope(config: dict[str, Any], family: Family, rope: RopeConfig) -> None:
    try:
        if RopeConfig.model_validate(read_rope(config, family.rope)) == rope:
            return
    except (ConfigError, ValueError):
        pass
    for name in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"):
        config.pop(name, None)
    config |= write_rope(rope)


def _derived(family: Family, config: Mapping[str, Any], model: ModelConfig) -> Mapping[str, object] | None:
    """What several keys decide together; None if they contradict each other."""
    try:
        return family.derived(config, model.num_layers)
    except ConfigError:
        return None


def _nothing(model: ModelConfig) -> dict[str, Any]:
    return {}


def _qwen3_keys(model: ModelConfig) -> dict[str, Any]:
    dense = list(model.moe.dense_layers) if model.moe is not None else []
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _deepseek_keys(model: ModelConfig) -> dict[str, Any]:
    if model.moe is None:
        return {}
    keys: dict[str, Any] = {
        "first_k_dense_replace": len(model.moe.dense_layers),
        "n_shared_experts": model.moe.shared_ffn // model.moe.ffn,
        "n_group": model.moe.num_groups,
        "topk_group": model.moe.top_groups,
    }
    if model.mtp is not None:
        keys["num_nextn_predict_layers"] = model.mtp.depth
    return keys


def _deepseek_v2_keys(model: ModelConfig) -> dict[str, Any]:
    grouped = model.moe is not None and model.moe.num_groups > 1
    return _deepseek_keys(model) | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _gpt_oss_keys(model: ModelConfig) -> dict[str, Any]:
    window, layers = model.attention.window, model.attention.window_layers
    kinds = ["sliding_attention" if layer in layers else "full_attention" for layer in range(model.num_layers)]
    return {"layer_types": kinds} | ({} if window is None else {"sliding_window": window})


# Keys that decide something together: the inverse of `Family.derived`.
_WRITTEN: Mapping[str, Callable[[ModelConfig], dict[str, Any]]] = MappingProxyType(
    {
        "qwen3_moe": _qwen3_keys,
        "deepseek_v2": _deepseek_v2_keys,
        "deepseek_v3": _deepseek_keys,
        "glm4_moe": _deepseek_keys,
        "dots1": _deepseek_keys,
        "gpt_oss": _gpt_oss_keys,
    }
)
