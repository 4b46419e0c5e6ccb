"""Training state to checkpoints and back: which tensors, under which names, and whether they fit the run."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.converted import ADAPTERS, MODEL, flat
from ascend_moe_train.checkpoint.starting import (
    STARTED_FROM,
    Start,
    StartedFrom,
    read_weights,
    started_from,
)
from ascend_moe_train.config import RunConfig, run_to_dict
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.lora import apply_lora
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.adamw import AdamW
from ascend_moe_train.train.session import copy_into
from ascend_moe_train.train.state import TrainingState

FIRST, SECOND = "optim.first.", "optim.second."
# What a run may not change between two starts: the numbers would no longer be those of one unbroken run.
FIXED = ("model", "lora", "data.train", "data.seq_len", "data.reset_attention", "batch.global_sequences", "run.seed",
    "run.precision")  # fmt: skip


def first_weights(config: RunConfig, model: Transformer, start: Start | None) -> None:
    """Fills the model from where the run starts, else at random; then puts its adapters in.

    Raises CheckpointError: the checkpoint to start from is damaged.
    """
    if start is None:
        model.initialize(config.run.seed)
    else:
        parameters = dict([*model.weights(), *model.buffers()])
        for name, value in read_weights(start, parameters):
            copy_into(parameters[name], value)
    if config.lora is not None:
        apply_lora(model, config.model, config.lora, config.run.seed)


def trained(model: Transformer) -> list[tuple[str, Any]]:
    """The weights that have a gradient: with adapters these alone."""
    return [(name, parameter) for name, parameter in model.weights() if parameter.requires_grad]


def collect(config: RunConfig, model: Transformer, optimizer: AdamW) -> dict[str, NDArray[np.float32]]:
    """Copies of all weights and buffers (of a run with adapters: of these alone) and of all moments by name."""
    tensors = dict(_kept(config, model)) | dict(_moments(optimizer))
    # asnumpy is the parameter's own memory, which later steps change
    return {name: np.array(p.asnumpy(), copy=True) for name, p in tensors.items()}


def checkpoint_meta(config: RunConfig, state: TrainingState, origin: StartedFrom | None) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return {
        "config": run_to_dict(config),
        "state": state.model_dump(mode="json"),
        STARTED_FROM: None if origin is None else origin.model_dump(),
    }


def restore(
    root: Path,
    config: RunConfig,
    model: Transformer,
    optimizer: AdamW,
    start: Start | None,
    note: Callable[[str], None],
) -> tuple[TrainingState, StartedFrom | None]:
    """Fills model and optimizer from the newest good checkpoint; a fresh state when there is none.

    Returns the state, and where the run's first weights were from. Raises CheckpointError: the checkpoints are damaged,
    or of a run that this configuration cannot continue.
    """
    here = None if start is None else start.record
    found = store.load_newest(root, note)
    if found is None:
        if here is not None:
            note(f"starting from {here.path}")
        return TrainingState(), here
    checkpoint, tensors = found
    _check_same_run(checkpoint, config, note)
    origin = started_from(checkpoint.meta, checkpoint.path)
    if here is not None and (origin is None or origin.weights_sha256 != here.weights_sha256):
        then = "random weights" if origin is None else f"the weights that {origin.path} had then"
        raise CheckpointError(f"{checkpoint.path} adapts {then}, run.init_from {config.run.init_from} has others")
    fill(_kept(config, model), tensors, checkpoint.path)
    fill(_moments(optimizer), tensors, checkpoint.path)
    note(f"continuing from {checkpoint.path}")
    return TrainingState.from_meta(checkpoint.meta, checkpoint.step, str(checkpoint.path)), here or origin


def _kept(config: RunConfig, model: Transformer) -> list[tuple[str, Any]]:
    """What of the model is in a checkpoint, under its name there."""
    if config.lora is not None:
        return _named(ADAPTERS, trained(model))
    return _named(MODEL, [*model.weights(), *model.buffers()])


def _named(prefix: str, weights: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(prefix + name, parameter) for name, parameter in weights]


def _moments(optimizer: AdamW) -> list[tuple[str, Any]]:
    first = zip(optimizer.names, optimizer.first, strict=True)
    second = zip(optimizer.names, optimizer.second, strict=True)
    return _named(FIRST, first) + _named(SECOND, second)


def fill(weights: Iterable[tuple[str, Any]], tensors: Mapping[str, NDArray[np.float32]], path: Path) -> None:
    """Copies tensors into parameters by name. Raises CheckpointError naming a tensor that is missing or misshapen."""
    for name, parameter in weights:
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
    before, now = flat(then), flat(run_to_dict(config))
    # adapters must find the weights that they adapt, wherever these are now: a checksum tells
    fixed_keys = FIXED if config.lora is not None else (*FIXED, "run.init_from")
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    for key in changed:
        if any(key == fixed or key.startswith(fixed + ".") for fixed in fixed_keys):
            raise CheckpointError(
                f"{checkpoint.path} was written with {key} = {before.get(key)}, this run has {now.get(key)}: "
                "set it back, or choose another run.dir"
            )
    if changed:
        note("changed since that checkpoint: " + ", ".join(f"{k} {before.get(k)} -> {now.get(k)}" for k in changed))
