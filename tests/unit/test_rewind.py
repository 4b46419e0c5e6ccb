"""A run that goes back to a checkpoint after a bad step, and passes over the data that led there."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.data.loader import Batch, TrainLoader
from ascend_moe_train.errors import ConfigError, TrainingError
from ascend_moe_train.train.metrics import read_records
from ascend_moe_train.train.state import TrainingState
from ascend_moe_train.train.step import StepResult, TrainStep
from tests.small_run import MemoryView, metrics, newest_state, run, run_to_end, small_run

SETTINGS = (
    "run.steps=16",
    "run.eval_every=16",
    "batch.micro_sequences=4",
    "checkpoint.every=5",
    "guard.spike_window=8",
    "guard.spike_sigma=1",
)
BAD = 12  # the data of this number, from 0, leads to a spike
SAVED = 10


def test_where_a_rewind_goes_on() -> None:
    saved = TrainingState(step=10, data_skipped=3)
    bad = TrainingState(step=14, data_skipped=3, rewinds=2, rewound_to=5)
    first = bad.rewound(saved)
    assert (first.step, first.data_step, first.rewinds, first.rewound_to) == (10, 17, 1, 10)
    again = first.model_copy(update={"step": 12}).rewound(saved)
    assert (again.step, again.data_step, again.rewinds) == (10, 19, 2)


def test_a_spike_leads_back_and_its_data_is_passed_over(
    tmp_path: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = TrainLoader.batch

    def with_noise(loader: TrainLoader, step: int) -> Batch:
        found = batch(loader, step)
        if step != BAD:
            return found
        noise = np.random.default_rng(5).integers(0, 256, found.targets_BS.shape, np.int32)
        return replace(found, targets_BS=np.where(found.targets_BS >= 0, noise, found.targets_BS))

    monkeypatch.setattr(TrainLoader, "batch", with_noise)
    rewound = small_run(tmp_path / "rewound", small_corpus, *SETTINGS, "guard.spike_action=rewind")
    view = run_to_end(rewound)
    assert [record.step for record in view.steps] == [*range(1, BAD + 2), *range(SAVED + 1, 17)]
    assert any(note.startswith(f"step {BAD + 1}: loss") and "is a spike" in note for note in view.notes)
    assert (
        "back to step 10 (rewind 1 of at most 3 to it): the data of the 3 steps since then is passed over" in view.notes
    )
    found = [record.step for record in read_records(tmp_path / "rewound" / "run" / "metrics.jsonl")]
    assert found == [*range(1, 17), 16]

    monkeypatch.setattr(
        TrainLoader, "batch", lambda loader, step: batch(loader, step if step < SAVED else step + BAD + 1 - SAVED)
    )
    run_to_end(small_run(tmp_path / "without", small_corpus, *SETTINGS))
    assert metrics(tmp_path / "rewound" / "run") == metrics(tmp_path / "without" / "run")
    (step, tensors, state), (_, other_tensors, other) = (
        newest_state(tmp_path / name / "run") for name in ("rewound", "without")
    )
    assert (step, tensors) == (16, other_tensors)
    assert state == {**other, "data_skipped": BAD + 1 - SAVED, "rewinds": 1, "rewound_to": SAVED}


def not_finite_from(first_call: int, monkeypatch: pytest.MonkeyPatch, last_call: int = 10**9) -> None:
    """Steps that run as so many-th, from 1, come out as if their loss were not finite."""
    call, count = TrainStep.__call__, 0

    def broken(step: TrainStep, *arguments: Any) -> StepResult:
        nonlocal count
        count += 1
        result = call(step, *arguments)
        return replace(result, loss=math.nan, total_loss=math.nan) if first_call <= count <= last_call else result

    monkeypatch.setattr(TrainStep, "__call__", broken)


def test_steps_that_are_not_finite_lead_back_to_the_start_and_not_for_ever(
    tmp_path: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_finite_from(2, monkeypatch)
    guard = ("guard.nonfinite_action=rewind", "guard.max_rewinds=2")
    config, view = small_run(tmp_path, small_corpus, *SETTINGS, *guard), MemoryView()
    message = "stopped at step 1: it was bad after 2 rewinds to the checkpoint of step 0, each to other data"
    with pytest.raises(TrainingError, match=message):
        run(config, view)
    assert [record.step for record in view.steps] == [1, 2, 1, 1]
    assert [note for note in view.notes if note.startswith("back to")] == [
        "back to step 0 (rewind 1 of at most 2 to it): the data of the 2 steps since then is passed over",
        "back to step 0 (rewind 2 of at most 2 to it): the data of the 1 steps since then is passed over",
    ]


def test_the_first_weights_are_saved_only_where_a_run_may_go_back(tmp_path: Path, small_corpus: Path) -> None:
    config = small_run(
        tmp_path, small_corpus, *SETTINGS, "run.steps=1", "optim.warmup_steps=1", "guard.nonfinite_action=rewind"
    )
    run_to_end(config)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000000",
        "step-00000001",
    ]


def test_one_bit_adam_cannot_go_back(tmp_path: Path, small_corpus: Path) -> None:
    settings = ("guard.spike_action=rewind", "parallel.compress.method=onebit_adam")
    with pytest.raises(ConfigError, match=r"'rewind' do not go with parallel.compress.method 'onebit_adam'"):
        small_run(tmp_path, small_corpus, *settings)
