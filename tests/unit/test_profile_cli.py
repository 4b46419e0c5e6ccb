"""`amt profile`: what it prints, and its exit codes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.cli.main import main
from tests.profile_folders import EXAMPLE, Kernel, write_torch
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
        "1. the pipeline's stages do not compute equally long: about 0.0 ms a step",
        "the file's own column Bubble says 0",
        "parallel.stage_layers",
    ):
        assert words in text


def test_without_steps_there_is_no_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = tmp_path / "capture"
    capture.mkdir()
    rows = "kernel_type,total_time,execution_frequency,percent\nMatMul,2.81,25,100.0\n"
    (capture / "aicore_intermediate_0_type.csv").write_text(rows)
    assert main(["profile", "show", str(capture)]) == 0
    text = capsys.readouterr().out
    assert "How long a step lasts was not collected" in text
    assert "one step was profiled" not in text


def test_json_has_formula_and_source_of_every_figure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json_of(capsys, "show", str(folder))
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1, 2, 3]
    assert shown["layout"]["stages"] == {"0": 0, "1": 1, "2": 0, "3": 1}
    for figure in shown["figures"]:
        assert figure["formula"]
        assert (figure["source"] == "") == (figure["value"] is None)
        assert (figure["missing"] == "") == (figure["value"] is not None)


RUN = """\
run: {dir: runs/x, steps: 600}
model: {preset: tiny, num_layers: 4}
data: {train: [{path: corpora/a}], tokenizer: tokenizer.json, seq_len: 64}
batch: {global_sequences: 32, micro_sequences: 4}
optim: {lr: 0.001}
parallel: {pp: 2}
"""


def test_predicted_beside_measured(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    shown = json_of(capsys, "show", str(folder), "--run", str(run), "--cluster", "4xcpu")
    # stages of the run file: the first two ranks are the first stage, whatever the capture says
    assert shown["layout"] == {"stages": {"0": 0, "1": 0, "2": 1, "3": 1}, "sizes": {"pp": 2}, "source": "the run file"}
    terms = {each["name"]: each for each in shown["predicted"]["terms"]}
    assert terms["step"]["measured_ms"] == pytest.approx(0.090)
    assert terms["computing, slowest stage"]["measured_ms"] == pytest.approx(0.060)
    parts = [
        each["predicted_ms"] for name, each in terms.items() if name != "step" and each["predicted_ms"] is not None
    ]
    assert sum(parts) == pytest.approx(terms["step"]["predicted_ms"])
    predicted = shown["predicted"]
    assert predicted["mfu_measured"] * 0.090 == pytest.approx(
        predicted["mfu_predicted"] * terms["step"]["predicted_ms"]
    )
    assert main(["profile", "show", str(folder), "--run", str(run), "--cluster", "4xcpu"]) == 0
    assert "Predicted for 4xcpu beside measured" in capsys.readouterr().out


def test_a_run_needs_its_cluster(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", str(folder), "--cluster", "4xcpu"]) == 2
    assert "--run and --cluster go together" in capsys.readouterr().err


def test_the_page_holds_everything_and_loads_nothing(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    (folder / "more").mkdir()
    assert main(["profile", "show", str(folder), "--html", str(page)]) == 0
    text = page.read_text()
    for title in ("What to do", "Step of each rank", "Timeline", "Pipeline stages", "Operators", "All figures"):
        assert f"<h2>{title}" in text
    assert text.count("<svg") == 2
    assert "default-src 'none'" in text
    assert not re.search(r"<script|https?://|\{\{", text)


def test_names_of_operators_cannot_break_the_page(folder: Path, tmp_path: Path) -> None:
    kernel = Kernel(start=0, duration=50, type="<img src=x>", core="<b>")
    write_torch(folder, 9, replace(EXAMPLE, kernels=[kernel]))
    page = tmp_path / "page.html"
    assert main(["profile", "show", str(folder), "--html", str(page)]) == 0
    assert "<img" not in page.read_text()
    assert "&lt;img src=x&gt;" in page.read_text()


def test_trace_has_all_ranks_on_one_clock(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert main(["profile", "show", str(folder), "--trace", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert names == ["rank 0, stage 0", "rank 1, stage 1", "rank 2, stage 0", "rank 3, stage 1"]
    kernels = {each["pid"]: (each["ts"], each["dur"]) for each in events if each.get("cat") == "kernels"}
    assert kernels == {rank: (0.0, 40.0 + 40.0 * (rank % 2)) for rank in range(4)}
    assert {each["pid"] for each in events if each.get("cat") == "critical path"} <= set(range(4))


def test_compare(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower = [Kernel(start=0, duration=70, shapes="256,64;64,32"), Kernel(start=80, duration=5, type="New")]
    write_torch(tmp_path / "after", 0, replace(EXAMPLE, kernels=slower, parts=(75.0, 30.0, 10.0, 10.0)))
    write_torch(tmp_path / "before", 0, EXAMPLE)
    before, after = str(tmp_path / "before"), str(tmp_path / "after")
    shown = json_of(capsys, "compare", before, after)
    step = next(row for row in shown["parts"] if row["name"] == "step")
    assert (step["before_ms"], step["after_ms"]) == (pytest.approx(0.090), pytest.approx(0.115))
    first = shown["operators"][0]
    assert (first["name"], first["before_ms"], first["after_ms"]) == ("MatMulV3", 0.02, 0.07)
    assert {row["name"]: row["before_ms"] for row in shown["operators"]}["New"] is None
    assert shown["shapes"][0]["name"] == "MatMulV3 256,64;64,32"
    assert shown["noise"].startswith("one step was profiled")
    assert main(["profile", "compare", before, after]) == 0
    assert "+0.05 (+250 %)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--exposed-comm", "0.15"], 1, "exposed_comm <= 15 %: failed, worst 55.6 % on rank 0"),
        (["--exposed-comm", "0.6"], 0, "exposed_comm <= 60 %: passed"),
        (["--cache-hit", "0.9"], 1, "cache_hit >= 90 %: not collected: set aic_metrics=L2Cache"),
        (["--computing", "0.4", "--free", "0.1"], 0, "free <= 10 %: passed"),
        ([], 1, "computing >= 85 %: failed, worst 44.4 % on rank 0"),
    ],
)
def test_check(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str) -> None:
    assert main(["profile", "check", str(folder), *arguments]) == code
    assert words in capsys.readouterr().out
    assert main(["profile", "check", str(folder), *arguments, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["passed"] == (code == 0)


def test_a_threshold_that_is_no_share(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "check", str(folder), "--exposed-comm", "15"]) == 2
    assert capsys.readouterr().err == "error: --exposed-comm 15 is no share: must be from 0 to 1, such as 0.15\n"


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_a_file_that_cannot_be_written(folder: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", str(folder), option, str(folder)]) == 2
    assert capsys.readouterr().err == f"error: {option} {folder}: is a folder, a file is needed\n"


def test_what_is_no_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {tmp_path}: holds no profiler output")
    assert captured.err.count("\n") == 1
