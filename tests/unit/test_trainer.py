"""Runs of a small model from start to report: what they leave, fp16 and its loss scale, bad steps, spikes."""

import html
import json
import math
import os
import signal
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.portion import Portion
from ascend_moe_train.cli.main import main
from ascend_moe_train.config import RunConfig, load_run
from ascend_moe_train.errors import TrainingError, UserError
from ascend_moe_train.optim.lr import learning_rate
from ascend_moe_train.train.inputs import open_inputs
from ascend_moe_train.train.metrics import StepRecord, read_records
from ascend_moe_train.train.ranks import Ranks, alone
from ascend_moe_train.train.run_info import read_run_info
from ascend_moe_train.train.session import copy_into
from ascend_moe_train.train.stop import StopRequest
from ascend_moe_train.train.trainer import StepInfo, Trainer
from tests.small_run import MemoryView, metrics, newest_state, run, run_to_end, small_run, write_run

# One graph and no evaluation: half the time to compile.
LEAN = ("data.valid=[]", "batch.micro_sequences=4")
SHORT = (*LEAN, "run.steps=3", "optim.warmup_steps=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path) -> tuple[RunConfig, MemoryView]:
    config = small_run(
        tmp_path_factory.mktemp("finished"),
        small_corpus,
        "run.tensorboard=true",
        "run.sample_prompt=the router",
    )
    return config, run_to_end(config)


def test_every_step_is_recorded_and_learns(finished: tuple[RunConfig, MemoryView]) -> None:
    config, view = finished
    assert [record.step for record in view.steps] == list(range(1, 41))
    for record in view.steps:
        assert record.tokens == 64 and not record.skipped and record.loss_scale is None
        assert record.lr == learning_rate(config.optim, record.step - 1, 40)
        assert [sum(layer) for layer in record.load] == pytest.approx([1.0], abs=1e-4)
        assert record.step_s > 0 and record.mfu is not None and record.mfu > 0
    assert view.losses[-1] < view.losses[0] - 2.0
    assert max(record.drop_rate for record in view.steps) > 0.0
    assert [record.step for record in view.evaluations] == [20, 40]
    assert view.evaluations[1].loss < view.evaluations[0].loss
    assert view.evaluations[1].bits_per_byte is not None


def test_a_run_leaves_its_files_and_no_others(finished: tuple[RunConfig, MemoryView]) -> None:
    config, view = finished
    folder = Path(config.run.dir)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "run.json",
        "sample.txt",
        "tensorboard",
        "tokenizer.json",
    ]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000020",
        "step-00000030",
        "step-00000040",
    ]
    assert load_run(folder / "config.yaml") == config
    sample = (folder / "sample.txt").read_text()
    assert sample.startswith("the router") and len(sample) > 50
    assert f"sample: {sample}" in view.notes
    assert html.escape(sample[:15]) in (folder / "report.html").read_text()
    assert len(list((folder / "tensorboard").iterdir())) == 1


def test_the_metrics_file_holds_every_record_in_order(finished: tuple[RunConfig, MemoryView]) -> None:
    config, view = finished
    found = list(read_records(Path(config.run.dir) / "metrics.jsonl"))
    steps = [record for record in found if isinstance(record, StepRecord)]
    assert steps == view.steps
    assert [record for record in found if not isinstance(record, StepRecord)] == view.evaluations
    assert [record.step for record in found] == sorted(record.step for record in found)


def test_the_checkpoint_counts_what_was_done(finished: tuple[RunConfig, MemoryView]) -> None:
    config, _ = finished
    step, tensors, state = newest_state(Path(config.run.dir))
    assert (step, state["step"], state["updates"], state["skipped"], state["tokens"]) == (40, 40, 40, 0, 40 * 64)
    assert len(state["recent_losses"]) == 40
    biases = np.frombuffer(tensors.pop("model.layers.0.moe.router.balance_bias"), np.float32)
    assert np.abs(biases).max() > 0.0
    weights = [name for name in tensors if name.startswith("model.")]
    assert len(tensors) == 3 * len(weights) > 0


def test_a_finished_run_has_nothing_left_to_do(finished: tuple[RunConfig, MemoryView]) -> None:
    config, _ = finished
    folder = Path(config.run.dir)
    before = metrics(folder), newest_state(folder)
    shorter = config.model_copy(update={"run": config.run.model_copy(update={"sample_prompt": None})})
    view = run_to_end(shorter)
    assert view.steps == [] and any("all 40 steps are done" in note for note in view.notes)
    assert (metrics(folder), newest_state(folder)) == before


def test_json_prints_every_record_on_stdout(
    tmp_path: Path, small_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [word for change in SHORT for word in ("--set", change)]
    assert main(["train", str(write_run(tmp_path, small_corpus)), "--json", *changes]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["step"] for line in printed.out.splitlines()] == [1, 2, 3]
    assert printed.out == (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "step 1 is next" in printed.err


@pytest.mark.parametrize("error", [BrokenPipeError(), SystemExit(1)])
def test_what_was_trained_is_saved_when_nobody_reads_the_output_any_more(
    error: BaseException, tmp_path: Path, small_corpus: Path
) -> None:
    def on_step(record: StepRecord) -> None:
        if record.step == 2:
            raise error

    config = small_run(tmp_path, small_corpus, *SHORT)
    with pytest.raises(type(error)):
        run(config, MemoryView(on_step))
    assert newest_state(tmp_path / "run")[0] == 2


def test_a_stop_before_the_first_step_does_nothing(tmp_path: Path, small_corpus: Path) -> None:
    class Impatient(MemoryView):
        def note(self, message: str) -> None:
            super().note(message)
            if "is next" in message:
                signal.raise_signal(signal.SIGTERM)

    config, view = small_run(tmp_path, small_corpus, *LEAN), Impatient()
    assert run(config, view) == 143
    assert view.steps == []
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_fp16_follows_fp32(tmp_path: Path, small_corpus: Path) -> None:
    options = (*LEAN, "run.steps=20", "optim.lr=3e-3")
    exact = run_to_end(small_run(tmp_path / "fp32", small_corpus, *options)).losses
    rounded = run_to_end(small_run(tmp_path / "fp16", small_corpus, *options, "run.precision=fp16")).losses
    assert exact[-1] < exact[0] - 0.5
    assert rounded == pytest.approx(exact, rel=2e-3)
    assert rounded != exact


def test_fp16_lowers_a_scale_that_overflows_and_goes_on(tmp_path: Path, small_corpus: Path) -> None:
    options = (
        "run.precision=fp16",
        "run.steps=40",
        "loss_scale.init=2.0e+9",
        "loss_scale.factor=4",
        "loss_scale.window=20",
    )
    config = small_run(tmp_path, small_corpus, *LEAN, *options, "guard.max_bad_steps=2")
    view = run_to_end(config)
    skipped = [record.skipped for record in view.steps]
    at_start = skipped.index(False)
    assert at_start > 2, "the first scale was to overflow for longer than bad steps are allowed"
    scales = [record.loss_scale for record in view.steps]
    assert scales[: at_start + 1] == [2.0e9 / 4**number for number in range(at_start + 1)]
    for before, after, was_skipped in zip(scales, scales[1:], skipped, strict=False):
        assert before is not None and after is not None
        assert after == before / 4 if was_skipped else after in (before, before * 4)
    _, _, state = newest_state(Path(config.run.dir))
    assert (state["skipped"], state["updates"]) == (sum(skipped), 40 - sum(skipped))
    assert state["loss_scale"]["overflows"] == sum(skipped)
    assert sum("fp16 overflow, skipped; loss scale 2e+09 -> 5e+08" in note for note in view.notes) == 1
    assert view.losses[-1] < view.losses[0] - 2.0


def test_a_dense_model_has_no_expert_figures(tmp_path: Path, small_corpus: Path) -> None:
    view = run_to_end(small_run(tmp_path, small_corpus, *SHORT, "model.moe=null"))
    for record in view.steps:
        assert (record.load, record.load_cv, record.dead_experts, record.drop_rate) == ((), (), (), 0.0)
        assert (record.aux_loss, record.z_loss, record.mtp_loss) == (0.0, 0.0, None)


def test_multi_token_prediction_has_a_loss_of_its_own(tmp_path: Path, small_corpus: Path) -> None:
    view = run_to_end(small_run(tmp_path, small_corpus, *SHORT, "model.moe=null", "model.mtp.depth=1"))
    for record in view.steps:
        # untrained, both predict nothing yet
        assert record.mtp_loss is not None and abs(record.mtp_loss - record.loss) < 1.5
    assert {record.mtp_loss for record in view.steps}.isdisjoint({0.0, *view.losses})


class Watched:
    """A trainer after ten steps, whose weights can be spoilt and which can be set back to there."""

    def __init__(self, config: RunConfig) -> None:
        self.trainer = Trainer(config, open_inputs(config).train, lambda message: None, alone(config))
        self._meter = self.trainer.meter(None)
        self.losses = [info.record.loss for info in islice(self.steps(), 10)]
        self._state = self.trainer.state
        self._weights = {name: parameter.asnumpy().copy() for name, parameter in self.trainer.model.weights()}

    def steps(self) -> Iterator[StepInfo]:
        return self.trainer.steps(self._meter, StopRequest())

    def weights(self) -> dict[str, Any]:
        return dict(self.trainer.model.weights())

    def reset(self) -> None:
        self.trainer.state = self._state
        for name, value in self._weights.items():
            self.set(name, value)

    def set(self, name: str, value: NDArray[np.float32]) -> None:
        copy_into(self.weights()[name], value)

    def spoil(self, name: str, factor: float) -> bytes:
        """Multiplies a weight and returns its bytes."""
        spoilt = self._weights[name] * self._weights[name].dtype.type(factor)
        self.set(name, spoilt)
        return spoilt.tobytes()

    def bytes_of(self, name: str) -> bytes:
        return bytes(self.weights()[name].asnumpy().tobytes())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path) -> Watched:
    guard = ("guard.spike_window=8", "guard.spike_action=skip", "guard.max_bad_steps=3")
    return Watched(small_run(tmp_path_factory.mktemp("watched"), small_corpus, *LEAN, *guard))


@pytest.fixture
def watched(built: Watched) -> Watched:
    built.reset()
    return built


def test_a_signal_while_ranks_ask_each_other_is_not_lost(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    largest, asked = Ranks.largest, 0

    def interrupted(ranks: Ranks, value: int) -> int:
        nonlocal asked
        asked += 1
        if asked == 2:
            signal.raise_signal(signal.SIGTERM)
        return largest(ranks, value)

    monkeypatch.setattr(Ranks, "largest", interrupted)
    with StopRequest() as stop:
        infos = list(watched.trainer.steps(watched.trainer.meter(None), stop))
    assert [info.record.step for info in infos] == [11, 12]
    assert stop.signal_number == signal.SIGTERM


def test_a_spike_is_skipped_and_the_next_good_step_counts(watched: Watched) -> None:
    trainer = watched.trainer
    remembered, updates = trainer.state.recent_losses, trainer.state.updates
    assert remembered == pytest.approx(watched.losses[-8:], rel=0.05)
    spoilt = watched.spoil("head.weight", 60.0)
    spike = next(watched.steps())
    assert spike.record.skipped and math.isfinite(spike.record.loss)
    assert spike.warning is not None and spike.warning.startswith("step 11: loss") and "skipped" in spike.warning
    assert watched.bytes_of("head.weight") == spoilt
    assert (trainer.state.step, trainer.state.updates, trainer.state.bad_in_row) == (11, updates, 1)
    assert trainer.state.recent_losses == remembered
    watched.spoil("head.weight", 1.0)
    good = next(watched.steps())
    assert not good.record.skipped and good.warning is None
    assert (trainer.state.step, trainer.state.updates, trainer.state.bad_in_row) == (12, updates + 1, 0)
    assert trainer.state.recent_losses[:-1] == remembered[1:]


def test_spikes_that_do_not_pass_stop_the_run(watched: Watched) -> None:
    watched.spoil("head.weight", 60.0)
    with pytest.raises(TrainingError, match=r"stopped at step 13: 3 steps in a row were skipped, the last.*loss limit"):
        list(watched.steps())


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_bad_steps_in_a_row_stop_the_run_and_name_step_and_tensor(watched: Watched, factor: float) -> None:
    spoilt = watched.spoil("layers.0.moe.experts.w2", factor)
    seen: list[StepInfo] = []
    with pytest.raises(TrainingError) as raised:
        seen.extend(watched.steps())
    assert [info.record.skipped for info in seen] == [True, True]
    assert "stopped at step 13: 3 steps in a row were skipped" in str(raised.value)
    assert "first not finite: weight layers.0.moe.experts.w2" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert watched.bytes_of("layers.0.moe.experts.w2") == spoilt


def test_two_bad_steps_are_reported_and_forgotten_after_a_good_one(watched: Watched) -> None:
    for _ in range(2):
        watched.spoil("norm.weight", math.nan)
        bad = [next(watched.steps()), next(watched.steps())]
        assert [info.record.skipped for info in bad] == [True, True]
        assert all(info.warning is not None and "not finite, skipped" in info.warning for info in bad)
        watched.spoil("norm.weight", 1.0)
        assert not next(watched.steps()).record.skipped
    assert (watched.trainer.state.step, watched.trainer.state.skipped) == (16, 4)
    assert math.isfinite(watched.trainer.state.smooth_total)


def contents(portions: Mapping[str, Portion]) -> dict[str, list[bytes]]:
    return {name: [piece.array.tobytes() for piece in portion.pieces] for name, portion in portions.items()}


def test_what_is_handed_to_the_writer_does_not_change_under_later_steps(watched: Watched) -> None:
    trainer = watched.trainer
    handed_over = trainer.tensors.portions()
    before = contents(handed_over)
    next(watched.steps())
    assert contents(handed_over) == before
    after = contents(trainer.tensors.portions())
    assert all(value != before[name] for name, value in after.items())


def test_a_checkpoint_of_nothing_is_not_written(built: Watched) -> None:
    assert store.newest(built.trainer.checkpoints) is None


def test_a_later_start_on_a_busy_machine_does_not_lower_the_peak(
    tmp_path: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(tmp_path, small_corpus, *SHORT, "run.peak_flops_per_s=null")
    seen = []
    for measured in (2e9, 1e9, 3e9):
        monkeypatch.setattr("ascend_moe_train.train.loop.measured_cpu_peak_flops_per_s", lambda now=measured: now)
        run_to_end(config)
        info = read_run_info(Path(config.run.dir))
        seen.append(info.peak_flops_per_s if info is not None else None)
    assert seen == [2e9, 2e9, 3e9]


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_a_pipe_in_the_place_of_a_file_is_refused(name: str, tmp_path: Path, small_corpus: Path) -> None:
    config = small_run(tmp_path, small_corpus, *SHORT)
    Path(config.run.dir).mkdir()
    os.mkfifo(Path(config.run.dir) / name)
    with pytest.raises(UserError, match="no regular file"):
        run_to_end(config)
