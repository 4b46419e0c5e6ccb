"""A checkpoint as a start: whole weights of a model, whoever wrote it, in whatever precision. Pure.

What a run writes is one of two kinds: all weights, or adapters and the name of the checkpoint that they adapt. Both are
read as whole weights, the second with the adapters added.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.converted import ADAPTERS, MODEL, model_meta, only_adapters, output_differences
from ascend_moe_train.checkpoint.huggingface import check_shapes, tensor_shapes
from ascend_moe_train.checkpoint.layout import MANIFEST_NAME, Manifest
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.adapters import adapter_shapes, adapters, delta
from ascend_moe_train.model.config import LoraConfig, ModelConfig, RopeConfig
from ascend_moe_train.part import Part

STARTED_FROM = "started_from"
# Tensors that are read at once, so that little more than the model is held.
_GROUP_BYTES = 1 << 30

Shapes = Mapping[str, tuple[int, ...]]


class StartedFrom(Part):
    """Where a run's first weights are from: the checkpoint's folder, and what identifies its weights wherever it is."""

    path: str
    weights_sha256: str


@dataclass(frozen=True, kw_only=True)
class Start:
    """An opened checkpoint; `base` is there when it holds adapters only, as `lora` says."""

    path: Path
    manifest: Manifest
    model: ModelConfig
    lora: LoraConfig | None = None
    base: "Start | None" = None

    @property
    def record(self) -> StartedFrom:
        """What a run that starts here writes into its checkpoints."""
        return StartedFrom(path=str(self.path.absolute()), weights_sha256=weights_sha256(self.manifest))

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every weight, those with and those without a gradient."""
        return tensor_shapes(self.model)


def weights_sha256(manifest: Manifest) -> str:
    """A checksum of a checkpoint's weights (or adapters) alone: names, types, shapes and contents.

    Contents are known by the checksums of their pieces: weights that were cut in another way have another one.
    """
    kept = {
        name: [entry.dtype, list(entry.shape), sorted([piece.box, piece.sha256] for piece in entry.pieces)]
        for name, entry in manifest.tensors.items()
        if name.startswith((MODEL, ADAPTERS))
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def open_start(path: Path) -> Start:
    """Opens a checkpoint and verifies all but the contents of its tensors.

    Raises:
        CheckpointError: damaged, no model or not the tensors of the model that it says it is; or adapters whose base is
            not where it was, or has other weights now.
    """
    path = store.find(path)
    manifest = store.read_manifest(path)
    model = model_meta(manifest.meta, str(path)).model
    lora = _lora(manifest, path)
    if lora is None:
        if model.num_layers > len(manifest.tensors):  # before memory is taken for all that it claims
            raise CheckpointError(
                f"{path}: {len(manifest.tensors)} tensors are too few for model.num_layers {model.num_layers}"
            )
        start = Start(path=path, manifest=manifest, model=model)
        _check(manifest, MODEL, start.shapes, path)
        return start
    record = started_from(manifest.meta, path)
    if record is None:
        raise CheckpointError(f"{path / MANIFEST_NAME}: meta.{STARTED_FROM} is missing: the weights that are adapted")
    if not Path(record.path).exists():
        raise CheckpointError(f"{path}: adapts {record.path}, which is not there any more")
    base = open_whole(Path(record.path))
    if base.record.weights_sha256 != record.weights_sha256:
        raise CheckpointError(f"{path}: adapts the weights that {base.path} had then, it has others now")
    check_model(base, model)
    _check(manifest, ADAPTERS, _adapter_shapes(model, lora, path), path)
    return Start(path=path, manifest=manifest, model=model, lora=lora, base=base)


def open_whole(path: Path) -> Start:
    """As `open_start`, for a checkpoint with all weights. Raises CheckpointError for one of adapters, too."""
    path = store.find(path)
    if _lora(store.read_manifest(path), path) is not None:
        raise only_adapters(path)
    return open_start(path)


def started_from(meta: Mapping[str, Any], path: Path) -> StartedFrom | None:
    """What the run of a checkpoint started from; None for random weights. Raises CheckpointError."""
    content = meta.get(STARTED_FROM)
    if content is None:
        return None
    try:
        return StartedFrom.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join([STARTED_FROM, *map(str, problem["loc"])])
        raise CheckpointError(f"{path / MANIFEST_NAME}: meta.{key}: {problem['msg']}") from None


def check_model(start: Start, model: ModelConfig) -> None:
    """Raises CheckpointError naming a key of `model` that is not the checkpoint's, though outputs depend on it. The
    scaling of rotary positions may be another if with it they reach farther."""
    is_longer = reaches_farther(start.model.rope, model.rope)
    for key, (there, here) in output_differences(start.model, model).items():
        if is_longer and key.startswith("rope."):
            continue
        raise CheckpointError(
            f"{start.path} holds a model with model.{key} = {there}, this run has {here}: set it as it is there"
        )
    shapes = tensor_shapes(model)
    for name in shapes:
        if name not in start.shapes:
            raise CheckpointError(f"{start.path}: tensor {name} is missing: leave out of the model what has it")
    for name in start.shapes:
        if name not in shapes and not name.startswith("mtp."):
            raise CheckpointError(f"{start.path}: tensor {name} has no place in this run's model")


def reaches_farther(then: RopeConfig, now: RopeConfig) -> bool:
    """Whether positions are scaled that were not, or by more than before in the same way."""
    if then.scaling == "none":
        before = then.model_copy(update=now.model_dump(exclude={"theta", "fraction"}))
    else:
        before = then.model_copy(update={"factor": now.factor})
    return before == now and now.factor > then.factor


def read_weights(start: Start, names: Collection[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The named weights in fp32, each verified, adapters added; in groups, so that they need not all be held.

    Raises:
        CheckpointError: damaged.
    """
    if start.base is None or start.lora is None:
        yield from _read(start, MODEL, names)
        return
    by_weight = {adapter.weight: adapter for adapter in adapters(start.model, start.lora)}
    for name, weight in read_weights(start.base, names):
        adapter = by_weight.get(name)
        if adapter is None:
            yield name, weight
        else:
            pair = dict(_read(start, ADAPTERS, (adapter.a, adapter.b)))
            yield name, weight + delta(adapter, pair, start.lora)


def read_adapters(start: Start) -> dict[str, NDArray[np.float32]]:
    """The adapters of a checkpoint that holds some. Raises CheckpointError: it has none, or is damaged."""
    if start.lora is None:
        raise CheckpointError(f"{start.path}: holds whole weights, no adapters")
    return dict(_read(start, ADAPTERS, adapter_shapes(start.model, start.lora)))


def _read(start: Start, prefix: str, names: Collection[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for group in _groups(start.manifest, [prefix + name for name in names]):
        tensors = store.read_tensors(start.path, start.manifest, group.__contains__)
        for name in group:
            yield name.removeprefix(prefix), tensors.pop(name).astype(np.float32, copy=False)


def _groups(manifest: Manifest, names: Collection[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size_bytes = 0
    for name in names:
        size_bytes += manifest.tensors[name].size_bytes
        if group and size_bytes > _GROUP_BYTES:
            yield group
            group, size_bytes = [], manifest.tensors[name].size_bytes
        group.append(name)
    if group:
        yield group


def _check(manifest: Manifest, prefix: str, shapes: Shapes, path: Path) -> None:
    entries = {name.removeprefix(prefix): each for name, each in manifest.tensors.items() if name.startswith(prefix)}
    check_shapes({name: entry.shape for name, entry in entries.items()}, shapes, lambda name: f"{path}: tensor ")
    for name, entry in entries.items():
        if entry.dtype not in ("F32", "F16", "BF16"):
            raise CheckpointError(f"{path}: tensor {name} is {entry.dtype}: a weight must be F32, F16 or BF16")


def _lora(manifest: Manifest, path: Path) -> LoraConfig | None:
    config = manifest.meta.get("config")
    content = config.get("lora") if isinstance(config, dict) else None
    if content is None:
        return None
    try:
        return LoraConfig.model_validate_json(json.dumps(content))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(["lora", *map(str, problem["loc"])])
        raise CheckpointError(f"{path / MANIFEST_NAME}: meta.config.{key}: {problem['msg']}") from None


def _adapter_shapes(model: ModelConfig, lora: LoraConfig, path: Path) -> Shapes:
    try:
        return adapter_shapes(model, lora)
    except ValueError as error:
        raise CheckpointError(f"{path / MANIFEST_NAME}: meta.config: {error}") from None
