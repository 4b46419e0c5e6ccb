"""A trained model goes on with longer sequences, its rotary positions scaled."""

from pathlib import Path

import numpy as np
import pytest

from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.train.inputs import open_inputs
from ascend_moe_train.train.ranks import alone
from ascend_moe_train.train.trainer import Trainer
from tests.small_run import MemoryView, newest_state, run, run_to_end, small_run

LEAN = ("data.valid=[]", "batch.micro_sequences=4", "run.steps=2", "optim.warmup_steps=1", "checkpoint.every=2")
LONGER = (*LEAN, "data.seq_len=64")
YARN = ("model.rope.scaling=yarn", "model.rope.factor=4", "model.rope.original_positions=16")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path) -> Path:
    """Checkpoints of a run with sequences of 16 tokens."""
    config = small_run(tmp_path_factory.mktemp("short"), small_corpus, *LEAN)
    run_to_end(config)
    return Path(config.run.dir) / "checkpoints"


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        (YARN, "(yarn, factor 4)"),
        (("model.rope.scaling=linear", "model.rope.factor=4"), "(linear, factor 4)"),
    ],
    ids=["yarn", "linear"],
)
def test_a_run_goes_on_with_longer_sequences(
    rope: tuple[str, ...], says: str, short: Path, small_corpus: Path, tmp_path: Path
) -> None:
    config = small_run(tmp_path, small_corpus, *LONGER, *rope, f"run.init_from={short}")
    inputs = open_inputs(config)
    trainer = Trainer(config, inputs.train, lambda message: None, alone(config), inputs.start)
    assert trainer.model.cos_table.shape[0] == 64
    _, tensors, _ = newest_state(short.parent)
    for name, weight in trainer.model.weights():
        assert weight.asnumpy().tobytes() == tensors[f"model.{name}"]
    view = run_to_end(config)
    assert np.isfinite(view.losses).all()
    assert any(f"rotary positions are scaled {says}, not as in {short}" in note for note in view.notes)


def test_positions_that_are_scaled_back_are_refused(short: Path, small_corpus: Path, tmp_path: Path) -> None:
    longer = small_run(tmp_path / "longer", small_corpus, *LONGER, *YARN, f"run.init_from={short}")
    run_to_end(longer)
    back = small_run(tmp_path / "back", small_corpus, *LEAN, f"run.init_from={longer.run.dir}/checkpoints")
    with pytest.raises(CheckpointError, match=r"holds a model with model\.rope\.factor = 4\.0, this run has 1\.0"):
        run(back, MemoryView())
