"""Training state to checkpoints and back: which tensors, under which names, and whether they fit the run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.checkpoint import folders, reshard, store
from ascend_moe_train.checkpoint.converted import ADAPTERS, MODEL, flat
from ascend_moe_train.checkpoint.layout import Manifest
from ascend_moe_train.checkpoint.portion import Portion
from ascend_moe_train.checkpoint.starting import (
    STARTED_FROM,
    Start,
    StartedFrom,
    read_weights,
    started_from,
)
from ascend_moe_train.config import RunConfig, run_to_dict
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.layers import initial_value
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.adamw import AdamW
from ascend_moe_train.optim.host_adamw import HostAdamW
from ascend_moe_train.parallel.shards import Placement, take
from ascend_moe_train.parallel.zero import Sharded
from ascend_moe_train.train.held import Held, renamed
from ascend_moe_train.train.ranks import Ranks
from ascend_moe_train.train.session import copy_into
from ascend_moe_train.train.state import TrainingState

FIRST, SECOND, COMPRESSION = "optim.first.", "optim.second.", "compression."
# What a run may not change between two starts: the numbers would no longer be those of one unbroken run.
FIXED = ("model", "lora", "data.train", "data.seq_len", "data.reset_attention", "batch.global_sequences", "run.seed",
    "run.precision")  # fmt: skip


class Tensors:
    """The tensors of a run, as far as this rank holds them: weights, buffers, moments, and what compressed sums of
    gradients have lost."""

    def __init__(
        self,
        config: RunConfig,
        placed: Mapping[str, Placement],
        model: Transformer,
        sharded: Sharded,
        optimizer: AdamW | HostAdamW,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._config, self._placed, self._sharded = config, placed, sharded
        trained = [
            Held(name=o.name, parameter=o.parameter, placement=placed[o.name], start=o.start, stop=o.stop)
            for o in sharded.owned
        ]
        buffers = [
            Held(name=name, parameter=p, placement=placed[name], start=0, stop=placed[name].local_size)
            for name, p in model.buffers()
        ]
        kept = list(renamed(ADAPTERS, trained) if config.lora is not None else renamed(MODEL, [*trained, *buffers]))
        for prefix, moments in ((FIRST, optimizer.first), (SECOND, optimizer.second)):
            kept += [each.like(prefix + each.name, p) for each, p in zip(trained, moments, strict=True)]
        # each rank's own: a row for every rank
        remembered = [_row(COMPRESSION + name, p, rank, num_ranks) for name, p in sharded.remembered.items()]
        self._remembered = frozenset(each.name for each in remembered)
        self._kept = {each.name: each for each in (*kept, *remembered)}
        self._buffers = {each.name: each for each in buffers}

    def fill_first(self, start: Start | None, given: Mapping[str, NDArray[Any]]) -> None:
        """Fills the weights with those `given`, else from where the run starts, else at random.

        Raises CheckpointError: the checkpoint to start from is damaged.
        """
        names = [name for name, placement in self._placed.items() if name not in given and placement.local_size]
        if start is not None:
            values: Iterable[tuple[str, NDArray[Any]]] = read_weights(start, names)
        else:
            values = ((name, self._at_random(name)) for name in names)
        for name, value in (*given.items(), *values):
            local = take(value, self._placed[name])
            if name in self._buffers:
                copy_into(self._buffers[name].parameter, local)
            else:
                self._sharded.fill(name, local)

    def _at_random(self, name: str) -> NDArray[np.float32]:
        model, seed = self._config.model, self._config.run.seed
        shape = self._placed[name].shape
        return initial_value(name, shape, std=model.init_std, num_layers=model.num_layers, seed=seed)

    def portions(self) -> dict[str, Portion]:
        """Copies of what this rank writes of all weights and buffers (of a run with adapters: of these alone) and of
        all moments, by name."""
        return {name: each.portion() for name, each in self._kept.items()}

    def check(self, manifest: Manifest, path: Path) -> None:
        """Raises CheckpointError naming a tensor that is missing, or not of its shape and fp32."""
        for name, each in self._kept.items():
            entry = manifest.tensors.get(name)
            if name in self._remembered:
                continue
            if entry is None:
                raise CheckpointError(f"{path}: tensor {name!r} is missing")
            if entry.dtype != "F32" or entry.shape != each.placement.shape:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is {entry.dtype} {list(entry.shape)}, the model needs F32 "
                    f"{list(each.placement.shape)}"
                )

    def read(self, manifest: Manifest, path: Path) -> dict[str, list[NDArray[Any]]]:
        """This rank's parts of a checkpoint of any layout, verified. Raises CheckpointError: damaged."""
        lost = self.forgotten(manifest)
        boxes = {name: each.boxes for name, each in self._kept.items() if name not in lost}
        return reshard.read_boxes(path, manifest, boxes)

    def forgotten(self, manifest: Manifest) -> set[str]:
        """What compressed sums have lost that a checkpoint does not have as it is needed: it was written without
        compression, or on other ranks."""
        found = manifest.tensors
        return {
            name
            for name in self._remembered
            if name not in found or (found[name].dtype, found[name].shape) != ("F32", self._kept[name].placement.shape)
        }

    def fill(self, found: Mapping[str, list[NDArray[Any]]]) -> None:
        """Takes over what `read` found."""
        for name, arrays in found.items():
            self._kept[name].fill_from_boxes(arrays)
        self._sharded.refill()


def _row(name: str, parameter: Any, rank: int, num_ranks: int) -> Held:
    size = int(parameter.size)
    placement = Placement(
        shape=(num_ranks, size),
        gradient="none",
        intervals=(((rank, rank + 1),), ((0, size),)),
        group=(rank,),
        index=0,
        replicas=1,
        is_first=True,
        repeated=None,
    )
    return Held(name=name, parameter=parameter, placement=placement, start=0, stop=size)


def checkpoint_meta(
    config: RunConfig, state: TrainingState, origin: StartedFrom | None, ranks: Ranks
) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return {
        "config": run_to_dict(config),
        "state": state.model_dump(mode="json"),
        "layout": asdict(ranks.mesh),
        STARTED_FROM: None if origin is None else origin.model_dump(),
    }


def restore(
    root: Path,
    config: RunConfig,
    tensors: Tensors,
    ranks: Ranks,
    start: Start | None,
    note: Callable[[str], None],
) -> tuple[TrainingState, StartedFrom | None]:
    """Fills the tensors from the newest checkpoint that all ranks can read; a fresh state when there is none.

    Returns the state, and where the run's first weights were from. Raises CheckpointError: the checkpoints are damaged,
    or of a run that this configuration cannot continue.
    """
    here = None if start is None else start.record
    candidates = [root / name for name in ranks.of_first([path.name for path in folders.candidates(root)])]
    for path in candidates:
        try:
            manifest: Manifest | None = store.read_manifest(path)
            problem = None
        except CheckpointError as error:
            manifest, problem = None, str(error)
        if manifest is not None:
            origin, changes = _check_same_run(manifest, path, config, here)
            tensors.check(manifest, path)
            try:
                found = tensors.read(manifest, path)
            except CheckpointError as error:
                problem = str(error)
        if (problem := ranks.first_of(problem)) is not None:
            note(f"checkpoint {path.name} skipped: {problem}")
            continue
        assert manifest is not None
        tensors.fill(found)
        if tensors.forgotten(manifest):
            note("what compressed gradients have lost is not in that checkpoint for these ranks: it begins at zero")
        if changes:
            note(f"changed since that checkpoint: {changes}")
        note(f"continuing from {path}")
        return TrainingState.from_meta(manifest.meta, manifest.step, str(path)), here or origin
    if candidates:
        raise CheckpointError(f"{root}: none of {len(candidates)} checkpoints can be read; move them away to restart")
    if here is not None:
        note(f"starting from {here.path}")
    return TrainingState(), here


def _check_same_run(
    manifest: Manifest, path: Path, config: RunConfig, here: StartedFrom | None
) -> tuple[StartedFrom | None, str]:
    """Where the run's first weights were from, and what of the configuration is not as it was then.

    Raises CheckpointError: this configuration cannot continue it.
    """
    changes = _changes(manifest.meta, path, config)
    origin = started_from(manifest.meta, path)
    if here is not None and (origin is None or origin.weights_sha256 != here.weights_sha256):
        then = "random weights" if origin is None else f"the weights that {origin.path} had then"
        raise CheckpointError(f"{path} adapts {then}, run.init_from {config.run.init_from} has others")
    return origin, changes


def _changes(meta: Mapping[str, Any], path: Path, config: RunConfig) -> str:
    then = meta.get("config")
    if not isinstance(then, dict):
        raise CheckpointError(f"{path}: manifest.json: meta.config is missing")
    before, now = flat(then), flat(run_to_dict(config))
    # adapters must find the weights that they adapt, wherever these are now: a checksum tells
    fixed_keys = FIXED if config.lora is not None else (*FIXED, "run.init_from")
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    for key in changed:
        if any(key == fixed or key.startswith(fixed + ".") for fixed in fixed_keys):
            raise CheckpointError(
                f"{path} was written with {key} = {before.get(key)}, this run has {now.get(key)}: "
                "set it back, or choose another run.dir"
            )
    return ", ".join(f"{key} {before.get(key)} -> {now.get(key)}" for key in changed)
