"""A run that was stopped goes on as if it had not been: every loss, every bit of every weight and moment."""

import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.cluster.variables import RUN_ID
from ascend_moe_train.errors import TrainingError
from ascend_moe_train.train.run_lock import locked, unlock
from tests.small_run import metrics, newest_state, run, run_to_end, small_run, stop_at, write_run

FP16 = (
    "data.valid=[]",
    "batch.micro_sequences=4",
    "run.precision=fp16",
    "loss_scale.init=1.0e+8",
    "loss_scale.window=12",
)


def assert_same_run(found: Path, expected: Path) -> None:
    assert metrics(found / "run") == metrics(expected / "run")
    assert newest_state(found / "run") == newest_state(expected / "run")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path) -> Path:
    """The folder above run.dir of a run with jitter, capacity, accumulation and evaluations."""
    folder = tmp_path_factory.mktemp("unbroken")
    run_to_end(small_run(folder, small_corpus))
    assert any(line["drop_rate"] > 0 for line in metrics(folder / "run") if line["kind"] == "step")
    return folder


@pytest.fixture
def copied(tmp_path: Path, unbroken: Path) -> Path:
    shutil.copytree(unbroken / "run", tmp_path / "run")
    return tmp_path


def test_stopped_twice(tmp_path: Path, small_corpus: Path, unbroken: Path) -> None:
    config = small_run(tmp_path, small_corpus)
    for step, number, code in ((17, signal.SIGTERM, 143), (20, signal.SIGINT, 130)):
        view = stop_at(step, number)
        assert run(config, view) == code
        assert view.steps[-1].step == step
        assert newest_state(tmp_path / "run")[0] == step
        assert f"stopped by {signal.Signals(number).name} after step {step}, saved" in view.notes[-1]
    view = run_to_end(config)
    assert [record.step for record in view.steps] == list(range(21, 41))
    assert_same_run(tmp_path, unbroken)


def test_stopped_while_fp16_looks_for_its_scale(tmp_path: Path, small_corpus: Path) -> None:
    whole = run_to_end(small_run(tmp_path / "a", small_corpus, *FP16))
    skipped = [record.step for record in whole.steps if record.skipped]
    config = small_run(tmp_path / "b", small_corpus, *FP16)
    assert run(config, stop_at(skipped[1])) == 143
    view = run_to_end(config)
    assert len({record.loss_scale for record in view.steps}) > 2
    assert_same_run(tmp_path / "b", tmp_path / "a")


def test_a_damaged_checkpoint_is_passed_over_with_a_message(copied: Path, small_corpus: Path, unbroken: Path) -> None:
    newest = copied / "run" / "checkpoints" / "step-00000040"
    data = bytearray((shard := next(newest.glob("*.safetensors"))).read_bytes())
    data[-5] ^= 1
    shard.write_bytes(bytes(data))
    view = run_to_end(small_run(copied, small_corpus))
    assert [note for note in view.notes if note.startswith("checkpoint step-00000040 skipped: ")]
    assert [record.step for record in view.steps] == list(range(31, 41))
    assert_same_run(copied, unbroken)


def command(folder: Path, corpus: Path, *changes: str) -> list[str]:
    return ["train", str(write_run(folder, corpus)), *(word for change in changes for word in ("--set", change))]


def assert_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.seed=4", "run.seed = 3, this run has 4"),
        ("run.precision=fp16", "run.precision = fp32, this run has fp16"),
        ("model.hidden=16", "model.hidden = 32, this run has 16"),
        ("model.moe.top_k=1", "model.moe.top_k = 2, this run has 1"),
        ("model.moe.jitter=0.2", "model.moe.jitter = 0.1, this run has 0.2"),
        ("data.seq_len=8", "data.seq_len = 16, this run has 8"),
        ("data.reset_attention=false", "data.reset_attention = True, this run has False"),
        ("data.train.0.weight=2", "data.train = "),
        ("batch.global_sequences=8", "batch.global_sequences = 4, this run has 8"),
    ],
)
def test_what_would_make_it_another_run_is_refused(
    change: str, message: str, copied: Path, small_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(copied.rglob("*"))
    write_run(copied, small_corpus)
    assert_refused(command(copied, small_corpus, change), message, capsys)
    assert sorted(copied.rglob("*")) == sorted([*before, copied / "run.yaml"])


def test_no_good_checkpoint_is_no_reason_to_start_afresh(
    copied: Path, small_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for manifest in copied.glob("run/checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    assert main(command(copied, small_corpus)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert "none of 3 checkpoints can be read" in printed.err


def test_what_else_changed_is_told(copied: Path, small_corpus: Path) -> None:
    view = run_to_end(small_run(copied, small_corpus, "optim.lr=2e-2"))
    assert any("changed since that checkpoint: optim.lr 0.01 -> 0.02, run.dir" in note for note in view.notes)


def test_one_process_trains_into_a_folder(
    tmp_path: Path, small_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path / "run"):
        assert_refused(command(tmp_path, small_corpus), "run: another process is training into it", capsys)
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    assert not (tmp_path / "run").exists()


def test_a_lock_left_behind_by_a_kill_locks_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_bytes(b"")
    with locked(tmp_path / "run"):
        pass
    assert list((tmp_path / "run").iterdir()) == []


def test_a_start_that_was_given_up_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setenv(RUN_ID, "first")
    with ExitStack() as following:
        with locked(run_dir):
            unlock(run_dir, "second")  # the lock is none of it
            with pytest.raises(TrainingError, match="another process"), locked(run_dir):
                pass
            unlock(run_dir, "first")
            monkeypatch.setenv(RUN_ID, "second")
            following.enter_context(locked(run_dir))
        assert (run_dir / ".lock").read_text() == "second"  # the first ends later, and leaves it alone
    assert list(run_dir.iterdir()) == []
