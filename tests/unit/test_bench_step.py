"""`amt bench step` beside the planner, and `amt bench compare`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.bench import runs
from ascend_moe_train.bench.compare import charts_of, compared
from ascend_moe_train.bench.result import Column, Result, result_json
from ascend_moe_train.cli.main import main
from ascend_moe_train.cluster.supervise import Outcome
from ascend_moe_train.config import load_run
from ascend_moe_train.errors import MetricsError
from ascend_moe_train.model.counts import training_flops_per_token
from tests.small_run import write_run
from tests.unit.test_bench_ablate import STOPPED, FakeRanks, measured

STEP = Column(key="step_s", head="step", shows="seconds")
ONE = Result(
    kind="ablate",
    title="What each technique gives",
    command="amt one",
    columns=(Column(key="rung", head="rung"), STEP),
    rows=({"rung": "grouped", "step_s": 2.0}, {"rung": "overlap", "step_s": 1.0}, {"rung": "int8", "step_s": None}),
    settings={"ranks": 2},
    machine={"processor": "old", "python": "3.11"},
)
OTHER = replace(
    ONE,
    rows=({"rung": "grouped", "step_s": 1.0}, {"rung": "int8", "step_s": 3.0}, {"rung": "zero1", "step_s": 3.0}),
    settings={"ranks": 4},
    machine={"processor": "new", "python": "3.11"},
)


def step(run_yaml: Path, out: Path, *words: str) -> int:
    return main(["bench", "step", str(run_yaml), "--ranks", "2", "--steps", "4", "--out", str(out), *words])


@pytest.fixture
def run_yaml(tmp_path: Path, small_corpus: Path) -> Path:
    return write_run(tmp_path, small_corpus)


def test_a_step_is_set_beside_its_prediction(
    run_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "launch", FakeRanks({"work": measured(step_s=0.5)}))
    assert step(run_yaml, tmp_path / "out", "--cluster", "2xcpu") == 0
    assert "predicted / measured" in capsys.readouterr().out
    rows = {row["figure"]: row for row in json.loads((tmp_path / "out" / "step.json").read_text())["rows"]}
    config = load_run(run_yaml)
    flops_per_s = training_flops_per_token(config.model, config.data.seq_len) * 64 / 0.5
    assert rows["model FLOP/s"]["value"] == pytest.approx(flops_per_s)
    assert rows["MFU"]["value"] == pytest.approx(flops_per_s / 2e11)  # run.peak_flops_per_s is 1e11
    assert rows["step"]["ratio"] == pytest.approx(rows["step"]["predicted"] / 0.5)
    assert rows["memory of the fullest"]["value"] == rows["memory of rank 1"]["value"] == 500
    assert rows["loss of the last step"]["predicted"] is None


def test_a_step_without_a_cluster_predicts_nothing(
    run_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "launch", FakeRanks())
    assert step(run_yaml, tmp_path / "out", "--set", "run.peak_flops_per_s=null") == 0
    rows = json.loads((tmp_path / "out" / "step.json").read_text())["rows"]
    assert {row["predicted"] for row in rows} == {None}
    assert [row["shown"] for row in rows if row["figure"] == "MFU"] == ["n/a"]
    page = (tmp_path / "out" / "step.html").read_text()
    assert "set run.peak_flops_per_s" in page and "predicted / measured" not in page
    assert "Times of a step" in page and "Predicted / measured" not in page


def test_a_step_that_fails_or_is_stopped_says_so(
    run_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(runs, "launch", lambda job, screen: Outcome(exit_code=1, message="rank 1 failed"))
    assert step(run_yaml, out) == 1
    assert "error: rank 1 failed; what its ranks printed" in capsys.readouterr().err
    monkeypatch.setattr(runs, "launch", lambda job, screen: Outcome(exit_code=STOPPED))
    assert step(run_yaml, out) == STOPPED and not (out / "step.json").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cluster", "4xcpu"], "--cluster 4xcpu: 4 devices for --ranks 2: must be as many"),
        (["--hardware", "own.yaml"], "--hardware own.yaml has no effect without --cluster"),
        (["--steps", "1"], "--steps 1: must be from 2 to 100,000"),
        (["--set", "parallel.ep=4"], "2 ranks"),
        (["--set", "data.train.0.path=nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    run_yaml: Path,
    tmp_path: Path,
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = FakeRanks()
    monkeypatch.setattr(runs, "launch", ranks)
    assert step(run_yaml, tmp_path / "out", *words) == 2
    assert says in capsys.readouterr().err and ranks.runs == [] and not (tmp_path / "out").exists()


def files(folder: Path, *results: Any) -> list[Path]:
    paths = [folder / f"{number}.json" for number in range(len(results))]
    for path, result in zip(paths, results, strict=True):
        path.write_text(result_json(result))
    return paths


def test_what_both_have_is_compared_and_the_rest_named(tmp_path: Path) -> None:
    first, second = files(tmp_path, ONE, OTHER)
    result = compared(first, second, "amt bench compare")
    assert [(row["name"], row["figure"], row["ratio"]) for row in result.rows] == [("grouped", "step", 0.5)]
    assert result.rows[0]["first_shown"] == "2.0 s"
    assert result.settings["differs: processor"] == "old | new" and "differs: python" not in result.settings
    assert result.settings["differs: ranks"] == "2 | 4"
    assert result.notes == ("Only in the first: overlap.", "Only in the second: zero1.")


PLAN: dict[str, Any] = {
    "model": "glm",
    "cluster": "64x910B",
    "seq_len": 4096,
    "global_sequences": 64,
    "precision": "bf16",
    "engine": "ours",
    "predicted": True,
    "error": {"time": 0.1, "memory": None},
    "plans": [
        {
            "plan": {
                "num_devices": 64,
                **dict.fromkeys(("dp", "pp", "tp", "cp", "ep", "zero_stage", "micro_sequences"), 2),
                "schedule": "1f1b",
                "recompute": "none",
            },
            "step_s": 2.0,
            "tokens_per_s": 6400.0,
            "mfu": 0.25,
            "bubble_share": 0.0,
            "items_s": {"experts": 1.5},
            "exposed_s": {"ep": 0.25, "pp": 0.25},
            "peak_bytes": 6e10,
        }
    ],
}


def plan_file(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({**PLAN, **changes}))
    return path


def test_plans_are_compared_and_marked_as_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = plan_file(tmp_path / "a.json")
    faster = {**PLAN["plans"][0], "step_s": 1.0}
    second = plan_file(tmp_path / "b.json", cluster="64xA100", plans=[faster])
    assert main(["bench", "compare", str(first), str(second), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["row", "first,", "predicted", "second,", "predicted", "second", "/", "first"]
    assert shown[1].split() == ["step", "2.0", "s", "1.0", "s", "0.50"]
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert result["title"] == "glm on 64x910B and glm on 64xA100: predicted, not measured"
    assert result["settings"]["differs: cluster"] == "64x910B | 64xA100"
    rows = {row["name"]: row["first"] for row in result["rows"]}
    assert (rows["tokens/s of a device"], rows["exposed communication"], rows["of the step: experts"]) == (
        100,
        0.5,
        1.5,
    )
    assert "Nothing of it was measured" in (tmp_path / "out" / "compare.html").read_text()


@pytest.mark.parametrize("changes", [{"plans": []}, {"predicted": False}, {"plans": [{}]}, {"error": None}])
def test_what_is_no_plan_is_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    first = plan_file(tmp_path / "a.json", **changes)
    with pytest.raises(MetricsError, match=r"a\.json: no result of `amt bench`, nor of `amt plan --json`"):
        compared(first, first, "")


def test_plans_and_measurements_are_not_mixed(tmp_path: Path) -> None:
    (measured_path,) = files(tmp_path, ONE)
    with pytest.raises(MetricsError, match=r"is of `amt plan --json`, .* of `amt bench ablate`"):
        compared(measured_path, plan_file(tmp_path / "a.json"), "")


def test_figures_that_are_the_same_everywhere_are_named_once(tmp_path: Path) -> None:
    sent = Column(key="sent_bytes", head="sent", shows="bytes")
    both = [
        replace(each, columns=(*ONE.columns, sent), rows=tuple({**row, "sent_bytes": 8.0} for row in each.rows))
        for each in (ONE, OTHER)
    ]
    first, second = files(tmp_path, *both)
    result = compared(first, second, "")
    assert {row["figure"] for row in result.rows} == {"step"}
    assert "The same in all rows of both: sent." in result.notes
    assert [chart.title for chart in charts_of(result)] == ["step: second / first"]


def test_what_cannot_be_compared_is_one_line(tmp_path: Path) -> None:
    first, second, third = files(tmp_path, ONE, replace(ONE, kind="step"), replace(ONE, rows=({"rung": "x"},)))
    with pytest.raises(MetricsError, match=r"1\.json is of `amt bench step`, .*0\.json of `amt bench ablate`"):
        compared(first, second, "")
    with pytest.raises(MetricsError, match="have no row in common"):
        compared(first, third, "")
    with pytest.raises(MetricsError, match="No such file"):
        compared(first, tmp_path / "none.json", "")


def test_steps_are_compared_by_figure(
    run_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, step_s in (("a", 1.0), ("b", 0.5)):
        monkeypatch.setattr(runs, "launch", FakeRanks({"work": measured(step_s=step_s)}))
        assert step(run_yaml, tmp_path / name) == 0
    capsys.readouterr()
    paths = [str(tmp_path / name / "step.json") for name in ("a", "b")]
    assert main(["bench", "compare", *paths, "--out", str(tmp_path / "c"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    rows = {row["name"]: row["ratio"] for row in found}
    assert [row["first_shown"] for row in found if row["name"] == "memory of the fullest"] == ["500 B"]
    assert (rows["step"], rows["tokens/s"], rows["memory of the fullest"]) == (0.5, 2.0, 1.0)
