"""Checkpoints of small random models, and of adapters on them, as training and conversion write them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.converted import ADAPTERS, MODEL, converted_meta
from ascend_moe_train.checkpoint.starting import STARTED_FROM, open_whole
from ascend_moe_train.model.adapters import adapter_shapes
from ascend_moe_train.model.config import LoraConfig, ModelConfig
from tests.oracle.weights import random_params

Array = NDArray[Any]
DTYPES: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def weights(model: ModelConfig, seed: int = 0, dtype: str = "F32") -> dict[str, Array]:
    """Random weights under their names in the model."""
    return {name: value.astype(DTYPES[dtype]) for name, value in random_params(model, seed).items()}


def write_weights(root: Path, model: ModelConfig, tensors: Mapping[str, Array], step: int = 1) -> Path:
    """A checkpoint as a conversion writes it."""
    named = {MODEL + name: value for name, value in tensors.items()}
    return store.save(root, step, named, converted_meta(model, None), keep=9)


def random_adapters(model: ModelConfig, lora: LoraConfig, seed: int = 1) -> dict[str, Array]:
    """Adapters that change something."""
    rng = np.random.default_rng(seed)
    shapes = adapter_shapes(model, lora)
    return {name: (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}


def write_adapters(root: Path, base: Path, lora: LoraConfig, tensors: Mapping[str, Array], **changes: Any) -> Path:
    """A checkpoint as a run with adapters writes it, with an optimizer's tensor; `changes` are to its `meta`."""
    start = open_whole(base)
    meta = {
        "config": {"model": start.model.model_dump(mode="json"), "lora": lora.model_dump(mode="json")},
        STARTED_FROM: start.record.model_dump(),
    }
    named = {ADAPTERS + name: value for name, value in tensors.items()} | {"optim.first.x": np.zeros(3, np.float32)}
    return store.save(root, 7, named, meta | changes, keep=9)
