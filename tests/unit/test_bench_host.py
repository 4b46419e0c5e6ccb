"""`amt bench data` and `checkpoint`: real batches and checkpoints of a small run, and what they refuse."""

import json
import os
import signal
from pathlib import Path

import pytest

from ascend_moe_train.bench import host
from ascend_moe_train.checkpoint import store
from ascend_moe_train.cli.main import main
from ascend_moe_train.config import load_run
from ascend_moe_train.model.counts import num_parameters
from tests.small_run import write_run


@pytest.fixture
def run_yaml(tmp_path: Path, small_corpus: Path) -> Path:
    return write_run(tmp_path, small_corpus)


def figures(path: Path) -> dict[str, float]:
    return {row["figure"]: row["value"] for row in json.loads(path.read_text())["rows"]}


def test_batches_are_those_of_a_rank(run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "data", str(run_yaml), "--ranks", "2", "--rounds", "3", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert "tokens/s of a rank" in capsys.readouterr().out
    found = figures(tmp_path / "out" / "data.json")
    assert found["tokens of a batch"] == 4 / 2 * 16  # global_sequences, data parallel ranks, seq_len
    assert found["slowest batch"] >= found["batch of a rank"] > 0
    assert found["tokens/s of a rank"] == pytest.approx(32 / found["batch of a rank"])


def test_checkpoints_have_the_size_of_the_run_and_leave_nothing(run_yaml: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["bench", "checkpoint", str(run_yaml), "--rounds", "2", "--out", str(out)]) == 0
    found = figures(out / "checkpoint.json")
    assert found["size"] == 12 * num_parameters(load_run(run_yaml).model)
    assert all(found[f"{what}, {way}"] > 0 for what in ("checkpoint", "plain file") for way in ("write", "read"))
    assert "Bytes in a second" in (out / "checkpoint.html").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint.html", "checkpoint.json", "checkpoint.md"]


def test_a_checkpoint_that_is_stopped_leaves_nothing(
    run_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "load", lambda folder: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        main(["bench", "checkpoint", str(run_yaml), "--out", str(tmp_path / "out")])
    assert stop.value.code == 143 and list((tmp_path / "out").iterdir()) == []


def test_what_cannot_be_measured_is_one_line(
    run_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def complaint(verb: str, *words: str) -> str:
        assert main(["bench", verb, str(run_yaml), *words, "--out", str(out)]) == 2
        return capsys.readouterr().err

    assert "--rounds 0: must be from 1 to 10,000" in complaint("data", "--rounds", "0")
    assert "--rounds 0: must be" in complaint("checkpoint", "--rounds", "0")
    assert "ranks" in complaint("data", "--ranks", "3")
    assert "nowhere" in complaint("data", "--set", "data.train.0.path=nowhere")
    with monkeypatch.context() as patched:
        patched.setattr(host, "free_bytes", lambda: 1000)
        assert "has no room: 1.00 kB are free" in complaint("checkpoint")
    assert not out.exists()
    (out / "work").mkdir(parents=True)
    (out / "work" / "mine").write_text("kept")
    assert "work: is there already" in complaint("checkpoint")
    assert (out / "work" / "mine").read_text() == "kept"
