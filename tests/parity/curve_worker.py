"""What each rank does for test_reshard.py and scripts/golden.py: the runs of curve_cases.py, by the trainer itself.

The steps of all layouts are compiled once, in the same processes; then each loads what each has saved.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import numpy as np

from ascend_moe_train.checkpoint import folders, store
from ascend_moe_train.checkpoint.saving import Writer
from ascend_moe_train.checkpoint.writer import AsyncWriter
from ascend_moe_train.data.loader import TrainLoader
from ascend_moe_train.parallel.mpi import MpiComm
from ascend_moe_train.train.persist import FIRST, SECOND, checkpoint_meta, restore
from ascend_moe_train.train.ranks import alone, join
from ascend_moe_train.train.stop import StopRequest
from ascend_moe_train.train.trainer import Trainer
from tests.parity.curve_cases import LAYOUTS, MORE, ONE_PROCESS, SAVED_AFTER, STEPS, run_of

LOST: Mapping[str, Callable[[str], bool]] = {
    "first moments": lambda name: name.startswith(FIRST),
    "second moments": lambda name: name.startswith(SECOND),
    "balance biases": lambda name: name.endswith("balance_bias"),
}

Figures = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def curves(folder: str) -> dict[str, Figures]:
    """By layout that this rank is in, all steps."""
    return {layout: _unbroken(trainer) for layout, trainer in _trainers(folder)}


def reshards(folder: str) -> dict[str, Any]:
    """`curves` as above; `continued`, by the layout that loaded and the one that had saved, the steps after those that
    were saved; `lost`, of one process, the same without some of what was saved."""
    trainers, found = {}, {}
    for layout, trainer in _trainers(folder):
        trainers[layout], found[layout] = trainer, _unbroken(trainer)
    roots = {layout: Path(run_of(layout, folder).run.dir) / store.CHECKPOINTS for layout in LAYOUTS}
    continued = {
        layout: {saved: _continued(trainer, root) for saved, root in roots.items()}
        for layout, trainer in trainers.items()
    }
    lost = {}
    if ONE_PROCESS in trainers:
        one = trainers[ONE_PROCESS]
        lost = {name: _continued(one, one.checkpoints, is_lost) for name, is_lost in LOST.items()}
    return {"curves": found, "continued": continued, "lost": lost}


def _trainers(folder: str) -> Iterator[tuple[str, Trainer]]:
    """Of all layouts that this rank is in, each when it is asked for: all ranks come to it together."""
    rank = MpiComm().rank
    for layout in LAYOUTS:
        config = run_of(layout, folder)
        if layout == ONE_PROCESS and rank > 0:
            continue
        ranks = alone(config) if layout == ONE_PROCESS else join(config)
        loader = TrainLoader(
            config.data,
            vocab_size=config.model.vocab_size,
            seed=config.run.seed,
            global_sequences=config.batch.global_sequences,
            dp_rank=ranks.data.index,
            dp_size=ranks.data.size,
            micro_sequences=config.batch.micro_sequences,
        )
        yield layout, Trainer(config, loader, _not_said, ranks)


def _unbroken(trainer: Trainer) -> Figures:
    """All steps; there is a checkpoint afterwards of the state after some of them."""
    found = _steps(trainer, SAVED_AFTER)
    _save(trainer)
    return found + _steps(trainer, STEPS - SAVED_AFTER)


def _continued(trainer: Trainer, root: Path, is_lost: Callable[[str], bool] | None = None) -> Figures:
    """The next steps after those of the checkpoint in `root`, whatever the trainer has done before. What is lost of it
    is zero."""
    tensors = trainer.tensors
    trainer.state, _ = restore(root, trainer.config, tensors, trainer.ranks, None, _not_said)
    if is_lost is not None:
        path = folders.candidates(root)[0]
        found = tensors.read(store.read_manifest(path), path)
        zeros = {name: [np.zeros_like(each) for each in arrays] for name, arrays in found.items() if is_lost(name)}
        assert zeros
        tensors.fill(zeros)
    assert trainer.state.step == SAVED_AFTER
    return _steps(trainer, MORE)


def _steps(trainer: Trainer, count: int) -> Figures:
    infos = islice(trainer.steps(trainer.meter(None), StopRequest()), count)
    return [(info.record.loss, info.record.grad_norm) for info in infos]


def _save(trainer: Trainer) -> None:
    ranks, step = trainer.ranks, trainer.state.step
    with AsyncWriter(keep=1, writer=Writer(index=ranks.comm.rank, count=ranks.mesh.world_size)) as writer:
        writer.prepare(trainer.checkpoints, step)
        ranks.wait_for_all()
        meta = checkpoint_meta(trainer.config, trainer.state, trainer.origin, ranks)
        writer.submit_part(trainer.checkpoints, step, trainer.tensors.portions(), meta)


def _not_said(message: str) -> None:
    """Notes for the user."""
