"""One line for what is wrong with a run: where, the key, the value, what is allowed, the nearest key. Pure."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ascend_moe_train.parallel.config import AXES_ELSEWHERE
from ascend_moe_train.part import Part

MAX_SHOWN = 60  # characters of an offending value

# What the same thing is called elsewhere (transformers, Megatron-LM, torchtitan, MindFormers).
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "accumulation_steps": "batch.micro_sequences",
        "attention_bias": "model.attention.bias",
        "aux_loss_alpha": "model.moe.aux_loss_coef",
        "batch_size": "batch.global_sequences",
        "clip_grad": "optim.clip_norm",
        "dim": "model.hidden",
        "enable_graph_kernel": "ascend.jit_level",
        "epochs": "run.steps",
        "first_k_dense_replace": "model.moe.dense_layers",
        "global_batch_size": "batch.global_sequences",
        "grad_clip": "optim.clip_norm",
        "gradient_accumulation_steps": "batch.micro_sequences",
        "hidden_size": "model.hidden",
        "intermediate_size": "model.ffn",
        "kv_lora_rank": "model.attention.mla.kv_latent",
        "learning_rate": "optim.lr",
        "max_device_memory": "ascend.memory_limit_bytes",
        "max_grad_norm": "optim.clip_norm",
        "max_steps": "run.steps",
        "micro_batch_size": "batch.micro_sequences",
        "min_lr": "optim.min_lr_ratio",
        "moe_intermediate_size": "model.moe.ffn",
        "n_group": "model.moe.num_groups",
        "n_routed_experts": "model.moe.num_experts",
        "n_shared_experts": "model.moe.shared_ffn",
        "norm_topk_prob": "model.moe.normalize_topk",
        "num_attention_heads": "model.num_heads",
        "num_experts_per_tok": "model.moe.top_k",
        "num_hidden_layers": "model.num_layers",
        "num_key_value_heads": "model.num_kv_heads",
        "num_local_experts": "model.moe.num_experts",
        "num_nextn_predict_layers": "model.mtp.depth",
        "original_max_position_embeddings": "model.rope.original_positions",
        "output_dir": "run.dir",
        "partial_rotary_factor": "model.rope.fraction",
        "q_lora_rank": "model.attention.mla.q_latent",
        "qk_nope_head_dim": "model.attention.mla.nope_dim",
        "qk_rope_head_dim": "model.attention.mla.rope_dim",
        "rms_norm_eps": "model.norm_eps",
        "rope_scaling": "model.rope.scaling",
        "rope_theta": "model.rope.theta",
        "routed_scaling_factor": "model.moe.routed_scale",
        "router_aux_loss_coef": "model.moe.aux_loss_coef",
        "save_steps": "checkpoint.every",
        "scoring_func": "model.moe.score",
        "seq_length": "data.seq_len",
        "sliding_window": "model.attention.window",
        "tie_word_embeddings": "model.tie_embeddings",
        "topk_group": "model.moe.top_groups",
        "train_iters": "run.steps",
        "v_head_dim": "model.attention.mla.value_dim",
        **AXES_ELSEWHERE,
    }
)

_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "tuple_type": "a list",
}
_BOUNDS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}


def explain(error: ValidationError, root: type[Part], origins: Mapping[str, str], source: str) -> str:
    """The first problem as one line; an unknown key goes first, as it often explains a missing one.

    `origins` tells where each dotted key was set ("run.yaml:3", "--set optim.lr=x"); `source` is the file as a whole.
    """
    problems = error.errors(include_url=False)
    problem = min(problems, key=lambda each: each["type"] != "extra_forbidden")
    key = ".".join(str(word) for word in problem["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{_origin(key, problem, origins, source)}: {_describe(key, problem, root)}{more}"


def known_keys(part: type[Part], prefix: str = "") -> Iterator[str]:
    """Every dotted key below a part, sections before what they hold; list items are entered without an index."""
    for name, info in part.model_fields.items():
        yield f"{prefix}{name}"
        for inner in parts_in(info.annotation):
            yield from known_keys(inner, f"{prefix}{name}.")


def nearest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate that is most likely meant, or None."""
    return next(iter(difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)), None)


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """The known dotted key most likely meant: same leaf elsewhere, another project's name for it, or close spelling."""
    section, leaf = section_of(key), leaf_of(key)
    same_leaf = [each for each in known if leaf_of(each) == leaf]
    if same_leaf:
        return nearest(key, same_leaf) or same_leaf[0]
    if leaf in OTHER_NAMES:
        return OTHER_NAMES[leaf]
    siblings = {leaf_of(each): each for each in known if section_of(each) == section}
    everywhere = {leaf_of(each): each for each in known}
    if close := nearest(leaf, list(siblings)):
        return siblings[close]
    close = nearest(leaf, list(everywhere))
    return everywhere[close] if close else None


def section_of(key: str) -> str:
    """`model.moe` for `model.moe.top_k`; empty for a section itself."""
    return key.rpartition(".")[0]


def leaf_of(key: str) -> str:
    """`top_k` for `model.moe.top_k`."""
    return key.rpartition(".")[2]


def parts_in(annotation: Any) -> Iterator[type[Part]]:
    """The parts that a field holds: itself one, one or None, or a tuple of them."""
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple):
        for argument in get_args(annotation):
            yield from parts_in(argument)
    elif isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation


def _origin(key: str, problem: ErrorDetails, origins: Mapping[str, str], source: str) -> str:
    """Where the key was set: of a check of several keys, an override before the file; else the nearest section's."""
    if problem["type"] == "value_error":
        words = str(problem["ctx"]["error"]).split()
        named = [each for word in words if (each := f"{key}.{word}" if key else word) in origins]
        key = min(named, key=lambda each: not origins[each].startswith("--set"), default=key)
    while key:
        if key in origins:
            return origins[key]
        key = section_of(key)
    return source


def _describe(key: str, problem: ErrorDetails, root: type[Part]) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "value_error":
        return f"{key}: {context['error']}" if key else str(context["error"])
    if kind == "missing":
        preset = ", or start from one with model.preset" if key.startswith("model.") and key.count(".") == 1 else ""
        return f"{key} is missing: it has no default{preset}"
    shown = _shown(problem["input"])
    if kind == "extra_forbidden":
        return f"unknown key '{key}' (value {shown}): {_instead(key, problem['input'], list(known_keys(root)))}"
    if kind == "literal_error":
        return f"{key}: {shown} is not allowed: must be {context['expected']}{_meant(problem)}"
    if kind in ("model_type", "model_attributes_type"):
        keys = _keys_in(_without_index(key), list(known_keys(root)))
        return f"{key}: {shown} is not allowed: must be a mapping with keys {keys}"
    bounds = [f"{words} {_plain(context[name])}" for name, words in _BOUNDS.items() if name in context]
    wanted = _WANTED.get(kind) or (bounds[0] if bounds else problem["msg"])
    return f"{key}: {shown} is not allowed: must be {wanted}"


def _instead(key: str, value: object, known: Sequence[str]) -> str:
    plain = _without_index(key)
    close = nearest_key(plain, known)
    if isinstance(value, dict) and value and (close is None or section_of(close) != section_of(plain)):
        close = nearest_key(f"{plain}.{next(iter(value))}", known)
    if close is None:
        section = section_of(plain)
        return f"{section or 'a run'} has {_keys_in(section, known)}"
    if section_of(close) == section_of(plain):
        close = f"{section_of(key)}.{leaf_of(close)}".lstrip(".")
    return f"did you mean '{close}'?"


def _keys_in(section: str, known: Sequence[str]) -> str:
    return ", ".join(leaf_of(each) for each in known if section_of(each) == section)


def _without_index(key: str) -> str:
    return ".".join(word for word in key.split(".") if not word.isdecimal())


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _meant(problem: ErrorDetails) -> str:
    words = [word.strip("'") for word in problem["ctx"]["expected"].replace(" or ", ", ").split(", ")]
    close = nearest(str(problem["input"]), words)
    return f" (did you mean '{close}'?)" if close else ""


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
