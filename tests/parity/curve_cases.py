"""The layouts under which the run of selftest/curve.py is compared; a file of losses for each. No MindSpore."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ascend_moe_train.cluster import variables
from ascend_moe_train.config import RunConfig
from ascend_moe_train.selftest import curve
from ascend_moe_train.selftest.curve import ONE_PROCESS, write_corpus
from tests.ranks import run_ranks

NUM_RANKS = 4
GOLDEN = Path(__file__).parents[1] / "golden"

# Section `parallel` of NUM_RANKS ranks, but of one process in ONE_PROCESS.
LAYOUTS: dict[str, dict[str, Any]] = {
    ONE_PROCESS: {},
    "tp2+sp x ep2": {"tp": 2, "sequence_parallel": True, "ep": 2},
    "cp2 x ep2 zero3": {"cp": 2, "ep": 2, "zero_stage": 3},
    "pp2 x 2 chunks x dp2 zero1": {"pp": 2, "schedule": "interleaved", "chunks": 2, "zero_stage": 1},
    "pp2 x tp2 x etp2": {"pp": 2, "tp": 2, "etp": 2},
    "pp4 zero bubble": {"pp": 4, "schedule": "zero_bubble"},
}


def num_ranks(layout: str) -> int:
    """As many as the layout needs."""
    return 1 if layout == ONE_PROCESS else NUM_RANKS


def run_of(layout: str, folder: str) -> RunConfig:
    """The run file that a user would write; runs and their corpus are in `folder`."""
    return curve.run_of(slug(layout), LAYOUTS[layout], num_ranks(layout), Path(folder))


def slug(layout: str) -> str:
    """A layout's name as part of a file's."""
    return layout.replace("+", "_").replace(" x ", "_").replace(" ", "_")


def golden_path(layout: str) -> Path:
    """The file of a layout's losses; that of one process is part of the product."""
    return curve.GOLDEN if layout == ONE_PROCESS else GOLDEN / f"loss_{slug(layout)}.txt"


def golden_text(layout: str, losses: Sequence[float]) -> str:
    """What such a file holds."""
    head = f"{layout}: ranks {num_ranks(layout)}, parallel {json.dumps(LAYOUTS[layout])}"
    return curve.golden_text(head, losses)


def golden_losses(layout: str) -> list[float]:
    """The losses of the file, of steps 1, 2, ..."""
    return curve.golden_losses(golden_path(layout))


def on_ranks(function: str, folder: Path, deadline_s: float, layouts: Sequence[str] = tuple(LAYOUTS)) -> list[Any]:
    """What a function of curve_worker.py returns of some layouts on each of NUM_RANKS ranks; runs are in `folder`."""
    write_corpus(folder)
    # the trainer takes this for the sign that it was started with other ranks
    started = {variables.RUN_ID: "curves"}
    worker = f"tests.parity.curve_worker:{function}"
    return run_ranks(NUM_RANKS, worker, [str(folder), *layouts], deadline_s=deadline_s, environment=started)
