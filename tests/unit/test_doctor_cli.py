"""`amt doctor`: what it prints, writes and returns; one line for what it is not."""

import json
from pathlib import Path

import pytest

from ascend_moe_train.cli.main import main

LOG = "2026-03-01 10:00:00 step 4\n[rank1]: OSError: [Errno 28] No space left on device: <b>&'\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "job.log"
    path.write_text(LOG)
    return path


def test_screen(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(log)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "what happened      the disk is full"
    assert f"rank 1, 2026-03-01 10:00:00, {log}:2" in lines[1]
    assert any("df -h RUN_DIR" in line for line in lines)
    assert len(lines) <= 12


def test_chinese(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--lang", "zh", str(log)]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "发生了什么  磁盘已满"


def test_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(log)]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["cause"]["id"], shown["cause"]["ranks"], shown["confidence"]) == ("disk-full", [1], "high")
    assert shown["sources"][0]["lines"] == 2


def test_page(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["doctor", "--html", str(page), str(log)]) == 1
    text = page.read_text()
    assert '<div class="wide"><svg' in text  # narrow screens scroll it
    assert "&lt;b&gt;&amp;" in text
    assert "<b>" not in text
    assert "<script" not in text


def test_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text("step 1\nstep 2\n")
    assert main(["doctor", str(tmp_path), "--all"]) == 0
    assert capsys.readouterr().out.splitlines() == ["no fault found", "1 file read, 2 lines, no ranks told apart"]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "explain", "ei0006"]) == 0
    assert capsys.readouterr().out.startswith("EI0006: no link to a peer within HCCL_CONNECT_TIMEOUT")
    assert main(["doctor", "explain", "--json", "507011"]) == 0
    assert json.loads(capsys.readouterr().out)["rules"][0]["role"] == "wrapper"


RUN = """\
run: {dir: runs/x, steps: 600, precision: bf16}
model: {preset: qwen3_30b_a3b}
data: {train: [{path: corpora/a}], tokenizer: tokenizer.json, seq_len: 4096}
batch: {global_sequences: 64, micro_sequences: 4}
optim: {lr: 0.001}
parallel: {ep: 8, zero_stage: 1}
"""


def test_memory_beside_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "a.log").write_text(
        "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.00 GiB total capacity; 56.00 GiB "
        "already allocated; 1.00 GiB free; 57.00 GiB reserved in total by PyTorch)\n"
    )
    run = ["--run", str(tmp_path / "run.yaml"), "--cluster", "16x910B"]
    assert main(["doctor", str(tmp_path / "a.log"), *run]) == 1
    planned, observed, advice = capsys.readouterr().out.splitlines()[-3:]
    assert planned.startswith("planned, stage 0: ")
    assert observed.startswith("observed: 63.4 GB wanted, 61.2 GB held by this process and 2.15 GB by others")
    assert advice.startswith(("smallest change that fits: --set ", "no change of micro-batch"))
    assert main(["doctor", str(tmp_path / "a.log"), *run[:2]]) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["doctor", "nothing-here"], "nothing-here: there is no such file or folder"),
        (["doctor", "explain", "EI00066"], "code 'EI00066' is not known: did you mean EI0006?"),
        (["doctor", "--lang", "fr", "."], "--lang 'fr' is not known: there are en, zh"),
        (["doctor", "."], ".: holds no file that could be a log"),
        (["doctor", "--html", ".", "."], "--html .: is a folder, a file is needed"),
    ],
)
def test_mistakes(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err
