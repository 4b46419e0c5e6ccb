"""Adapters as a folder that PEFT (Hugging Face) reads: adapter_config.json, adapter_model.safetensors. Pure.

PEFT adapts modules under their Hugging Face names. One of our weights that joins several of theirs (qkv, gate and up)
gives each of them its A, and the rows of its B. Experts are written one by one, as published files name them: PEFT
joins them for transformers 5, which keeps them in one tensor. Format: PEFT's developer guide, "checkpoint format".
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.checkpoint.converted import model_meta
from ascend_moe_train.checkpoint.files import write_synced
from ascend_moe_train.checkpoint.huggingface import Entry, contiguous, name_table, split_block
from ascend_moe_train.checkpoint.huggingface_families import FAMILIES
from ascend_moe_train.checkpoint.huggingface_write import family_of
from ascend_moe_train.checkpoint.layout import file_layout, tensor_specs
from ascend_moe_train.checkpoint.resumable import fingerprint, refuse_existing, resumable_folder
from ascend_moe_train.checkpoint.starting import open_start, read_adapters
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.adapters import Adapter, adapters
from ascend_moe_train.model.config import LoraConfig, ModelConfig

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _ENDING = "base_model.model.", ".weight"
# In a model with experts, PEFT takes these for parts of the experts, by the name of their modules alone.
_BESIDE_EXPERTS = ("ffn.", "moe.shared.")

Array = NDArray[Any]
Tensors = Mapping[str, Array]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written: adapters of `modules` modules, for the model that is at `base` here."""

    out: Path
    base: Path
    modules: int
    size_bytes: int


def export_adapters(checkpoint: Path, out: Path, base_name: str) -> Exported:
    """Makes the folder `out` of a run that trained adapters. `base_name` is what PEFT is to load them onto: a folder or
    a name on the hub.

    Raises:
        CheckpointError: no adapters, a base that is gone or has changed, damage, or an adapter that PEFT has no place
            for. There is no `out` then.
    """
    refuse_existing(out)
    start = open_start(checkpoint)
    tensors = read_adapters(start)
    if start.base is None or start.lora is None:
        raise ValueError("adapters without what they adapt")
    origin = model_meta(start.base.manifest.meta, str(start.base.path)).origin
    layout = FAMILIES[family_of(start.model)].layout if origin is None else origin.layout
    config, theirs = peft_files(start.model, start.lora, tensors, layout, base_name)
    with resumable_folder(out, fingerprint("adapter", start.record.weights_sha256)) as journal:
        journal.start({})
        write_peft(journal.folder, config, theirs)
    size_bytes = sum(tensor.nbytes for tensor in theirs.values())
    return Exported(out=out, base=start.base.path, modules=len(theirs) // 2, size_bytes=size_bytes)


def peft_files(
    model: ModelConfig, lora: LoraConfig, tensors: Tensors, layout: str, base_name: str
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The content of adapter_config.json, and the tensors of adapter_model.safetensors.

    Args:
        model: what is adapted.
        lora: how.
        tensors: the adapters, by the names of `adapters.adapter_shapes`.
        layout: the names of the base model's files, of huggingface_names.py.
        base_name: what PEFT is to load as the base: a folder or a name on the hub.

    Raises:
        CheckpointError: an adapter that PEFT has no place for.
    """
    entries = {entry.ours: entry for entry in name_table(model, layout)}
    made: dict[str, Array] = {}
    for adapter in adapters(model, lora):
        if model.moe is not None and adapter.place.startswith(_BESIDE_EXPERTS):
            raise CheckpointError(
                f"{adapter.weight}: PEFT cannot tell an adapter of {adapter.place} from those of the experts: merge it"
            )
        for name, a, b in _theirs(entries[adapter.weight], adapter, tensors):
            if not name.endswith(_ENDING):
                raise CheckpointError(f"{adapter.weight}: is no module of its own there ({name}): merge the adapters")
            stem = _PREFIX + name.removesuffix(_ENDING)
            made |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in made}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return config, made


def write_peft(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Writes both files into a new folder. Raises CheckpointError."""
    expected = file_layout(tensor_specs(tensors))
    data = bytearray(expected.total_bytes)
    data[: len(expected.header)] = expected.header
    for name, start in expected.offsets_bytes.items():
        array = np.ascontiguousarray(tensors[name])
        data[start : start + array.nbytes] = array.reshape(-1).view(np.uint8).data
    write_synced(folder / WEIGHTS_NAME, bytes(data))
    write_synced(folder / CONFIG_NAME, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _theirs(entry: Entry, adapter: Adapter, tensors: Tensors) -> Iterator[tuple[str, Array, Array]]:
    """Name of each weight of theirs that the adapter's weight joins, with its A (W, D) and B (F, W)."""
    a, b = tensors[adapter.a], tensors[adapter.b]
    width = adapter.a_shape[0] if not entry.stacked else adapter.a_shape[-1]
    # B is cut as the weight is, along the outputs: the weight's inputs are the adapter's width
    pieces = tuple(replace(piece, shape=(*piece.shape[:-1], width)) for piece in entry.pieces)
    narrow = replace(entry, shape=adapter.b_shape, pieces=pieces)
    for index in range(entry.num_blocks):
        a_WD = a[index].T if entry.stacked else a
        parts = split_block(narrow, b[index] if entry.stacked else b)
        for source, part in zip(narrow.sources(index), parts, strict=True):
            yield source.name, contiguous(a_WD), contiguous(part)
