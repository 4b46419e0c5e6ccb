"""The run of curve.py by the trainer itself: its steps, a checkpoint of them, and what goes on from one."""

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ascend_moe_train.checkpoint import folders, store
from ascend_moe_train.checkpoint.saving import Writer
from ascend_moe_train.checkpoint.writer import AsyncWriter
from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.loader import TrainLoader
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.selftest.curve import MORE, SAVED_AFTER, STEPS
from ascend_moe_train.train.metrics import StepRecord
from ascend_moe_train.train.persist import checkpoint_meta, restore
from ascend_moe_train.train.ranks import Ranks
from ascend_moe_train.train.stop import StopRequest
from ascend_moe_train.train.trainer import Trainer


def _not_said(message: str) -> None:
    """Notes for the user."""


def trainer_of(config: RunConfig, ranks: Ranks, note: Callable[[str], None] = _not_said) -> Trainer:
    """A trainer of the run, which needs no tokenizer. All of its ranks make one together."""
    loader = TrainLoader(
        config.data,
        vocab_size=config.model.vocab_size,
        seed=config.run.seed,
        global_sequences=config.batch.global_sequences,
        dp_rank=ranks.data.index,
        dp_size=ranks.data.size,
        micro_sequences=config.batch.micro_sequences,
    )
    return Trainer(config, loader, note, ranks)


class Curve(NamedTuple):
    """Records of steps, and how long the checkpoint took that was written or read."""

    records: list[StepRecord]
    checkpoint_s: float


def unbroken(trainer: Trainer) -> Curve:
    """All steps; there is a checkpoint afterwards of the state after some of them."""
    found = steps(trainer, SAVED_AFTER)
    start_s = time.perf_counter()
    save(trainer)
    took_s = time.perf_counter() - start_s
    return Curve(found + steps(trainer, STEPS - SAVED_AFTER), took_s)


def continued(trainer: Trainer, root: Path, is_lost: Callable[[str], bool] | None = None) -> Curve:
    """The next steps after those of the checkpoint in `root`, whatever the trainer has done before. What is lost of it
    is zero. Raises CheckpointError: none there, or none that can be read."""
    tensors = trainer.tensors
    start_s = time.perf_counter()
    trainer.state, _ = restore(root, trainer.config, tensors, trainer.ranks, None, _not_said)
    took_s = time.perf_counter() - start_s
    if is_lost is not None:
        path = folders.candidates(root)[0]
        found = tensors.read(store.read_manifest(path), path)
        zeros = {name: [np.zeros_like(each) for each in arrays] for name, arrays in found.items() if is_lost(name)}
        assert zeros
        tensors.fill(zeros)
    if trainer.state.step != SAVED_AFTER:
        raise CheckpointError(f"{root}: no checkpoint of step {SAVED_AFTER} there")
    return Curve(steps(trainer, MORE), took_s)


def steps(trainer: Trainer, count: int) -> list[StepRecord]:
    """The records of the next steps."""
    return [info.record for info in islice(trainer.steps(trainer.meter(None), StopRequest()), count)]


def save(trainer: Trainer, keep: int = 1) -> None:
    """Writes a checkpoint, and returns when it is complete. So many stay, the newest."""
    ranks, step = trainer.ranks, trainer.state.step
    with AsyncWriter(keep=keep, writer=Writer(index=ranks.comm.rank, count=ranks.mesh.world_size)) as writer:
        writer.prepare(trainer.checkpoints, step)
        ranks.wait_for_all()
        meta = checkpoint_meta(trainer.config, trainer.state, trainer.origin, ranks)
        writer.submit_part(trainer.checkpoints, step, trainer.tensors.portions(), meta)
