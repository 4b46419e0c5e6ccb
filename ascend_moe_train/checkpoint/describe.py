"""What is in a checkpoint or a Hugging Face folder, without reading its tensors. Pure."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.converted import model_meta
from ascend_moe_train.checkpoint.huggingface import config_of_present, layout_of
from ascend_moe_train.checkpoint.huggingface_config import model_config_from_hf
from ascend_moe_train.checkpoint.huggingface_folder import CONFIG, open_folder
from ascend_moe_train.checkpoint.layout import MANIFEST_NAME
from ascend_moe_train.errors import CheckpointError, UserError
from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.model.counts import num_active_parameters, num_parameters


@dataclass(frozen=True, kw_only=True)
class Described:
    """One checkpoint or folder. What it does not say is None; `unusable` is why its model cannot be used here.

    `elements_by_part` goes by the first word of our names (`model`, `optim`, ...); a Hugging Face folder has one part.
    """

    path: Path
    format: str
    model_type: str | None
    layout: str | None
    step: int | None
    other_steps: tuple[int, ...]
    model: ModelConfig | None
    parameters: int | None
    active_parameters: int | None
    tensors: int
    files: int
    data_bytes: int
    bytes_by_dtype: dict[str, int]
    elements_by_part: dict[str, int]
    extras: tuple[str, ...]
    unusable: str | None


def describe(path: Path) -> Described:
    """Describes a checkpoint, the newest in a folder of checkpoints, or a Hugging Face folder.

    File sizes and headers are verified, the contents of tensors are not.

    Raises:
        CheckpointError: neither of them, or damaged as far as that shows without reading the tensors.
    """
    if (path / MANIFEST_NAME).exists():
        return _checkpoint(path, ())
    if not (path / CONFIG).exists():
        newest = store.newest(path)
        if newest is not None:
            steps = sorted(store.steps(path))
            return _checkpoint(newest.path, tuple(step for step in steps if step != newest.step))
        if path.is_dir() and not any(path.glob("*.safetensors*")) and not any(path.glob("*.bin")):
            raise CheckpointError(
                f"{path}: neither a checkpoint ({MANIFEST_NAME}), nor a folder of checkpoints (step-...), nor a "
                f"Hugging Face folder ({CONFIG})"
            )
    return _folder(path)


def _checkpoint(path: Path, other_steps: tuple[int, ...]) -> Described:
    manifest = store.read_manifest(path)
    model, model_type, name_layout, unusable = None, None, None, None
    try:
        meta = model_meta(manifest.meta, str(path / MANIFEST_NAME))
        model = meta.model
        if meta.origin is not None:
            model_type, name_layout = meta.origin.model_type, meta.origin.layout
    except UserError as error:
        unusable = str(error)
    parts: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for name, entry in sorted(manifest.tensors.items()):
        parts[name.partition(".")[0]] += entry.elements
        dtypes[entry.dtype] += entry.size_bytes
    return Described(
        path=path,
        format="amt checkpoint",
        model_type=model_type,
        layout=name_layout,
        step=manifest.step,
        other_steps=other_steps,
        model=model,
        parameters=num_parameters(model) if model is not None else None,
        active_parameters=num_active_parameters(model) if model is not None else None,
        tensors=len(manifest.tensors),
        files=len(manifest.by_file()),
        data_bytes=dtypes.total(),
        bytes_by_dtype=dict(dtypes),
        elements_by_part=dict(parts),
        extras=tuple(sorted(manifest.extras)),
        unusable=unusable,
    )


def _folder(path: Path) -> Described:
    folder = open_folder(path)
    model, name_layout, unusable = None, None, None
    try:
        model = config_of_present(model_config_from_hf(folder.config), folder.places)
        name_layout = layout_of(folder.places, model)
    except UserError as error:
        unusable = str(error)
    dtypes: Counter[str] = Counter()
    for place in folder.places.values():
        dtypes[place.dtype] += place.size_bytes
    model_type = folder.config.get("model_type")
    return Described(
        path=path,
        format="Hugging Face folder",
        model_type=model_type if isinstance(model_type, str) else None,
        layout=name_layout,
        step=None,
        other_steps=(),
        model=model,
        parameters=num_parameters(model) if model is not None else None,
        active_parameters=num_active_parameters(model) if model is not None else None,
        tensors=len(folder.places),
        files=len(folder.shards),
        data_bytes=dtypes.total(),
        bytes_by_dtype=dict(dtypes),
        elements_by_part={"model": sum(prod(place.shape) for place in folder.places.values())},
        extras=tuple(folder.extras),
        unusable=unusable,
    )
