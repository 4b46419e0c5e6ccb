"""Training state to checkpoints and back: which tensors, under which names, and whether they fit the run."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.checkpoint import store
from ascend_moe_train.config import RunConfig, run_to_dict
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.adamw import AdamW
from ascend_moe_train.train.session import copy_into
from ascend_moe_train.train.state import TrainingState

MODEL, FIRST, SECOND = "model.", "optim.first.", "optim.second."
# What a run may not change between two starts: the numbers would no longer be those of one unbroken run.
FIXED = ("model", "data.train", "data.seq_len", "data.reset_attention", "batch.global_sequences", "run.seed",
    "run.precision")  # fmt: skip


def collect(model: Transformer, optimizer: AdamW) -> dict[str, NDArray[np.float32]]:
    """Copies of all weights and moments by name."""
    tensors = dict(_named(MODEL, model.weights())) | dict(_moments(optimizer))
    # asnumpy is the parameter's own memory, which later steps change
    return {name: np.array(p.asnumpy(), copy=True) for name, p in tensors.items()}


def checkpoint_meta(config: RunConfig, state: TrainingState) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return {"config": run_to_dict(config), "state": state.model_dump(mode="json")}


def restore(
    root: Path, config: RunConfig, model: Transformer, optimizer: AdamW, note: Callable[[str], None]
) -> TrainingState:
    """Fills model and optimizer from the newest good checkpoint; a fresh state when there is none.

    Raises CheckpointError: the checkpoints are damaged, or of a run that this configuration cannot continue.
    """
    found = store.load_newest(root, note)
    if found is None:
        return TrainingState()
    checkpoint, tensors = found
    _check_same_run(checkpoint, config, note)
    fill(model.weights(), tensors, MODEL, checkpoint.path)
    fill(_moments(optimizer), tensors, "", checkpoint.path)
    note(f"continuing from {checkpoint.path}")
    return TrainingState.from_meta(checkpoint.meta, checkpoint.step, str(checkpoint.path))


def _named(prefix: str, weights: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(prefix + name, parameter) for name, parameter in weights]


def _moments(optimizer: AdamW) -> list[tuple[str, Any]]:
    first = zip(optimizer.names, optimizer.first, strict=True)
    second = zip(optimizer.names, optimizer.second, strict=True)
    return _named(FIRST, first) + _named(SECOND, second)


def fill(
    weights: Iterable[tuple[str, Any]], tensors: Mapping[str, NDArray[np.float32]], prefix: str, path: Path
) -> None:
    """Copies tensors into parameters by name. Raises CheckpointError naming a tensor that is missing or misshapen."""
    for name, parameter in _named(prefix, weights):
        check_tensor(tensors, name, tuple(parameter.shape), path)
        copy_into(parameter, tensors[name])


def check_tensor(tensors: Mapping[str, NDArray[np.float32]], name: str, shape: tuple[int, ...], path: Path) -> None:
    """Raises CheckpointError when a tensor is not there, or not of this shape and fp32."""
    if name not in tensors:
        raise CheckpointError(f"{path}: tensor {name!r} is missing")
    value = tensors[name]
    if value.shape != shape or value.dtype != np.float32:
        raise CheckpointError(
            f"{path}: tensor {name!r} is {value.dtype} {list(value.shape)}, the model needs float32 {list(shape)}"
        )


def _check_same_run(checkpoint: store.Checkpoint, config: RunConfig, note: Callable[[str], None]) -> None:
    then = checkpoint.meta.get("config")
    if not isinstance(then, dict):
        raise CheckpointError(f"{checkpoint.path}: manifest.json: meta.config is missing")
    before, now = _flat(then), _flat(run_to_dict(config))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    for key in changed:
        if any(key == fixed or key.startswith(fixed + ".") for fixed in FIXED):
            raise CheckpointError(
                f"{checkpoint.path} was written with {key} = {before.get(key)}, this run has {now.get(key)}: "
                "set it back, or choose another run.dir"
            )
    if changed:
        note("changed since that checkpoint: " + ", ".join(f"{k} {before.get(k)} -> {now.get(k)}" for k in changed))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
