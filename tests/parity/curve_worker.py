"""What each rank does for test_reshard.py and scripts/golden.py: the runs of curve_cases.py, by the trainer itself.

The steps of all layouts asked for are compiled once, in the same processes; then each loads what each has saved.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")

from ascend_moe_train.checkpoint import store
from ascend_moe_train.parallel.mpi import MpiComm
from ascend_moe_train.selftest.curve import ONE_PROCESS
from ascend_moe_train.selftest.curve_steps import Curve, continued, trainer_of, unbroken
from ascend_moe_train.train.persist import FIRST, SECOND
from ascend_moe_train.train.ranks import alone, join
from ascend_moe_train.train.trainer import Trainer
from tests.parity.curve_cases import run_of

LOST: Mapping[str, Callable[[str], bool]] = {
    "first moments": lambda name: name.startswith(FIRST),
    "second moments": lambda name: name.startswith(SECOND),
    "balance biases": lambda name: name.endswith("balance_bias"),
}

Figures = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def curves(asked: list[str]) -> dict[str, Figures]:
    """By layout that this rank is in, all steps; `asked` are the folder and the layouts."""
    return {layout: _figures(unbroken(trainer)) for layout, trainer in _trainers(asked)}


def reshards(asked: list[str]) -> dict[str, Any]:
    """`curves` as above; `continued`, by the layout that loaded and the one that had saved, the steps after those that
    were saved; `lost`, of one process, the same without some of what was saved."""
    folder, *layouts = asked
    trainers, found = {}, {}
    for layout, trainer in _trainers(asked):
        trainers[layout], found[layout] = trainer, _figures(unbroken(trainer))
    roots = {layout: Path(run_of(layout, folder).run.dir) / store.CHECKPOINTS for layout in layouts}
    went_on = {
        layout: {saved: _figures(continued(trainer, root)) for saved, root in roots.items()}
        for layout, trainer in trainers.items()
    }
    lost = {}
    if ONE_PROCESS in trainers:
        one = trainers[ONE_PROCESS]
        lost = {name: _figures(continued(one, one.checkpoints, is_lost)) for name, is_lost in LOST.items()}
    return {"curves": found, "continued": went_on, "lost": lost}


def _trainers(asked: list[str]) -> Iterator[tuple[str, Trainer]]:
    """Of all layouts that this rank is in, each when it is asked for: all ranks come to it together."""
    rank = MpiComm().rank
    folder, *layouts = asked
    for layout in layouts:
        config = run_of(layout, folder)
        if layout == ONE_PROCESS and rank > 0:
            continue
        yield layout, trainer_of(config, alone(config) if layout == ONE_PROCESS else join(config))


def _figures(curve: Curve) -> Figures:
    return [(record.loss, record.grad_norm) for record in curve.records]
