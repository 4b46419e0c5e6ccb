"""`amt profile`: what it prints, and its exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.cli.main import main
from tests.profile_folders import write_torch
from tests.unit.test_profile_across import pipeline


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for rank, each in enumerate(pipeline()):
        write_torch(tmp_path / "capture", rank, each)
    return tmp_path / "capture"


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["profile", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_screen_says_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "capture: 4 ranks, 1 step, step 0.1 ms (torch_npu, Level1 PipeUtilization, pp2)",
        "computing >= 85 % 44.4 % 0 failed",
        "cache_hit >= 90 % n/a not collected: set aic_metrics=L2Cache",
        "1. the pipeline's stages do not compute equally long about 0.0 ms a step",
        "the file's own column Bubble says 0",
        "parallel.stage_layers",
    ):
        assert words in text


def test_json_has_formula_and_source_of_every_figure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json_of(capsys, "show", str(folder))
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1, 2, 3]
    assert shown["layout"]["stages"] == {"0": 0, "1": 1, "2": 0, "3": 1}
    for figure in shown["figures"]:
        assert figure["formula"]
        assert (figure["source"] == "") == (figure["value"] is None)
        assert (figure["missing"] == "") == (figure["value"] is not None)


def test_what_is_no_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {tmp_path}: holds no profiler output")
    assert captured.err.count("\n") == 1
