"""A disk that is full, or a Ctrl-C, leaves the file that was there, whole, and none beside it."""

import errno
import json
import os
from pathlib import Path

import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.cluster.evidence import FAILURES, Failed, keep_evidence
from ascend_moe_train.doctor.keep import LAUNCHER_LOG, kept_verdict
from ascend_moe_train.doctor.reading import VERDICT_NAME
from tests.profile_folders import write_torch

BEFORE = "what was there before"
RESULT = {
    "kind": "step",
    "title": "t",
    "command": "c",
    "columns": [{"key": "name", "head": "n"}, {"key": "v", "head": "v", "shows": "number"}],
    "rows": [{"name": "a", "v": 1.0}],
}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full(file: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(file: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "a.log", "--html", "out"],
        ["profile", "show", "capture", "--no-cache", "--html", "out"],
        ["profile", "show", "capture", "--no-cache", "--trace", "out"],
        ["preflight", "--hostfile", "hosts", "--html", "out"],
        ["bench", "compare", "a.json", "a.json", "--out", "."],
    ],
)
def test_outputs(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.log").write_text("OSError: [Errno 28] No space left on device\n")
    Path("hosts").write_text("127.0.0.1 slots=1 port=1\n")
    Path("a.json").write_text(json.dumps(RESULT))
    write_torch(Path("capture"), 0)
    out = "compare.json" if arguments[0] == "bench" else "out"
    Path(out).write_text(BEFORE)
    names = names_in(Path())
    for breaks, code, words in (
        (full, 2, f"error: {tmp_path / out}: No space left on device\n"),
        (interrupted, 130, "\n"),
    ):
        monkeypatch.setattr(os, "fsync", breaks)
        assert main(arguments) == code
        assert capsys.readouterr().err == words
        assert Path(out).read_text() == BEFORE
        assert names_in(Path()) == names


def test_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / VERDICT_NAME).write_text(BEFORE)
    with pytest.raises(OSError, match="No space left"):
        kept_verdict(tmp_path, tmp_path, "1", "error: rank 0 failed\n")
    assert names_in(tmp_path) == [VERDICT_NAME, LAUNCHER_LOG]
    assert (tmp_path / VERDICT_NAME).read_text() == BEFORE
    failed = Failed(rank=None, exit_code=1, message="error: rank 0 failed", views=[], stacks={0: "a"})
    with pytest.raises(OSError, match="No space left"):
        keep_evidence(tmp_path, failed, run_id="1", checkpoint_step=None)
    assert list((tmp_path / FAILURES / "1").iterdir()) == []
