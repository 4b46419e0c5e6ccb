"""What a checkpoint says of the model in it: one that training wrote, and one that a conversion wrote. Pure."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ascend_moe_train.checkpoint.layout import Manifest
from ascend_moe_train.checkpoint.strict_json import one_line
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.part import Part

# The model's weights; adapters of such; rows beyond the vocabulary; tensors that are no weights and are only kept.
MODEL, ADAPTERS, PADDING, CARRIED = "model.", "adapters.", "padding.", "carried."
# Those with a row per token.
VOCABULARY_TENSORS = ("embed.weight", "head.weight")

# Keys that a model may be trained with otherwise than it is used: they change no output.
TRAINING_ONLY = frozenset(
    {"init_std", "mtp", "moe.balance_bias_rate"}
    | {f"moe.{key}" for key in ("aux_loss_coef", "aux_loss_scope", "z_loss_coef", "jitter", "force_balance")}
    | {f"moe.{key}" for key in ("capacity_factor", "drop_policy")}
)


class Origin(Part):
    """The Hugging Face folder that a checkpoint was made from.

    `layout` is of huggingface_names.py. `decoded`: weights were quantised. `tied_copies`: tensors that repeated another
    one. `padded_vocab_size`: rows of embedding and head there, if more than the vocabulary.
    """

    model_type: str
    layout: str
    decoded: bool = False
    tied_copies: Annotated[tuple[str, ...], Field(strict=False)] = ()
    padded_vocab_size: int | None = None


class ModelMeta(Part):
    """`meta` of a converted checkpoint."""

    model: ModelConfig
    origin: Origin | None = None


def converted_meta(model: ModelConfig, origin: Origin | None) -> dict[str, Any]:
    """`meta` of a checkpoint that holds a model and nothing of a training run."""
    return ModelMeta(model=model, origin=origin).model_dump(mode="json")


def model_meta(meta: Mapping[str, Any], where: str) -> ModelMeta:
    """The model that `meta` describes, whoever wrote the checkpoint.

    Raises:
        CheckpointError: it describes none; one line that starts with `where`.
    """
    if "config" in meta:
        config = meta["config"]
        model = config.get("model") if isinstance(config, dict) else None
        content: object = {"model": model, "origin": meta.get("origin")}
        key = "meta.config"
    else:
        content, key = meta, "meta"
    try:
        return ModelMeta.model_validate_json(json.dumps(content))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join([key, *map(str, problem["loc"])])
        raise CheckpointError(f"{where}: {place} = {one_line(problem['input'])}: {problem['msg']}") from None


def weight_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Name and shape of the model's weights in a checkpoint."""
    return {name.removeprefix(MODEL): entry.shape for name, entry in manifest.tensors.items() if name.startswith(MODEL)}


def output_differences(one: ModelConfig, other: ModelConfig) -> dict[str, tuple[object, object]]:
    """The dotted keys in which two models differ so that their outputs may, with the value in each."""
    mine, others = flat(_plain(one).model_dump()), flat(_plain(other).model_dump())
    return {
        key: (mine.get(key), others.get(key))
        for key in sorted(mine.keys() | others.keys())
        if mine.get(key) != others.get(key) and key not in TRAINING_ONLY and not key.startswith("mtp.")
    }


def _plain(model: ModelConfig) -> ModelConfig:
    """One spelling of what can be said in two ways."""
    changes: dict[str, Any] = {}
    if model.attention.mla is None:
        changes["head_dim"] = model.head_size
    if model.moe is not None:
        if not model.moe.dense_layers:
            changes["ffn"] = model.moe.ffn
        if model.moe.normalize_topk and model.moe.score == "softmax":
            changes["moe"] = model.moe.model_copy(update={"score_order": "before_topk"})
    return model.model_copy(update=changes)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by dotted key."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def only_adapters(path: Path) -> CheckpointError:
    """The error for a checkpoint whose weights are elsewhere."""
    return CheckpointError(f"{path}: holds adapters only; `amt convert merge` makes whole weights of it")
