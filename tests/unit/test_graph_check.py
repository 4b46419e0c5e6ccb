"""Graphs of ranks of Ascend clusters that are not here: that they compile, what they hold, and that mistakes show."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.errors import ConfigError
from ascend_moe_train.train.graph_check import check_graphs
from tests.parity.layouts import Case
from tests.rules.source import ROOT

CASES = (
    Case(layout=None, model="mixtral", mode="dropless", num_micro=1),
    Case(layout="zero2 dp2", model="mixtral", mode="capacity", num_micro=2),
    Case(layout="zero3 dp2", model="deepseek", mode="dropless", num_micro=1),
    Case(layout="tp2+sp", model="deepseek", mode="capacity", num_micro=1, recompute="full"),
    Case(layout="etp2 x ep2", model="mixtral", mode="dropless", num_micro=1),
    Case(layout="etp2 x ep2 in 2 chunks", model="deepseek", mode="capacity", num_micro=1),
    Case(layout="ep4, copies in nodes of 2, zero1", model="deepseek", mode="capacity", num_micro=1),
    Case(layout="tp2+sp x ep4, sums in nodes of 2", model="deepseek", mode="dropless", num_micro=1),
    Case(layout="cp2 ring", model="mixtral", mode="dropless", num_micro=1),
    Case(layout="cp2 ulysses", model="mixtral", mode="capacity", num_micro=1, recompute="selective"),
    Case(layout="pp2 x tp2 x ep2", model="tied mixtral of 2", mode="dropless", num_micro=4),
    Case(layout="pp2 zero bubble, zero3", model="untied mixtral of 2", mode="dropless", num_micro=2),
)
# One of each kind; `make test-all` has the others.
QUICK = (None, "zero2 dp2", "etp2 x ep2 in 2 chunks", "tp2+sp x ep4, sums in nodes of 2", "cp2 ring", "pp2 x tp2 x ep2")
FUSED = {
    "RmsNorm",
    "RotaryPositionEmbedding",
    "FlashAttentionScore",
    "FlashAttentionScoreGrad",
    "Swiglu",
    "SwigluGrad",
    "MoeTokenPermute",
    "MoeTokenPermuteGrad",
    "GroupedMatmulV4",
    "AdamWeightDecay",
}


def found_by(*words: str) -> Any:
    """What tests/graph_worker.py prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.graph_worker", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.layout not in QUICK)) for case in CASES]
)
def test_a_step_compiles_and_moves_what_the_formulas_say(case: Case) -> None:
    shown = found_by("case", json.dumps(asdict(case)))
    assert shown["found"] == shown["expected"]
    assert case.layout is None or shown["found"]
    assert shown["constant_bytes"] < 200_000
    without = {"FlashAttentionScore", "FlashAttentionScoreGrad"} if "ring" in case.name else set()
    assert FUSED - without <= set(shown["operators"])


def test_a_stage_without_the_ends_of_the_model() -> None:
    case = Case(layout="pp4", model="untied mixtral of 4", mode="dropless", num_micro=4, recompute="full")
    assert found_by("rank", json.dumps(asdict(case)), "1") == ["forward 0", "backward 0", "update"]


@pytest.mark.parametrize(
    "words",
    [
        ("mixtral_8x7b", "64x910B", "512", "0"),
        pytest.param(("qwen3_30b_a3b", "16x910B", "256", "15"), marks=pytest.mark.slow),
        pytest.param(("deepseek_v3", "512x910B", "4096", "200"), marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_presets_at_their_planned_layouts(words: tuple[str, ...]) -> None:
    shown = found_by("preset", *words)
    # the planner may leave the update to the host, and choose ring attention
    assert set(shown["operators"]) >= FUSED - {"AdamWeightDecay", "FlashAttentionScore", "FlashAttentionScoreGrad"}
    assert shown["constant_bytes"] < 50_000_000


@pytest.mark.parametrize(
    "name",
    [
        "SwappedNorm",
        "SwigluOverRows",
        "TransposedWeights",
        pytest.param("SwappedPermute", marks=pytest.mark.slow),
        pytest.param("TransposedGates", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_call_shows(name: str) -> None:
    assert found_by("mutant", name).startswith("graph 'step': ")


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="rank 2 is not there: must be from 0 to 1"):
        check_graphs(CASES[1].run(), 2, 2)
    with pytest.raises(ConfigError):
        check_graphs(CASES[0].run(), 3)


def amt(*words: str) -> subprocess.CompletedProcess[str]:
    call = "from ascend_moe_train.cli.main import run; run()"
    return subprocess.run([sys.executable, "-c", call, *words], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command(tmp_path: Path) -> None:
    path, out = tmp_path / "run.yaml", tmp_path / "report.json"
    path.write_text(
        "run: {dir: unused, steps: 200, precision: bf16}\n"
        "model: {preset: tiny, num_layers: 1}\n"
        "data: {train: [{path: unused}], tokenizer: unused, seq_len: 8}\n"
        "batch: {global_sequences: 8, micro_sequences: 4}\n"
        "parallel: {ep: 2}\n"
    )
    words = ("check", "graph", str(path), "--world-size", "2", "--rank", "1", "--json", "--out", str(out))
    done = amt(*words)
    assert (done.returncode, done.stderr) == (0, "compiling step\n")
    shown = json.loads(done.stdout)
    assert json.loads(out.read_text()) == shown
    assert (shown["rank"], shown["axes"]["ep"]) == (1, 2)
    (graph,) = shown["graphs"]
    assert graph["operators"] == sum(shown["operators"].values()) > graph["collectives"] > 4
    assert {each["verb"] for each in shown["collectives"]} == {"all_gather", "all_reduce", "all_to_all_v"}
    wrong = amt("check", "graph", str(path), "--world-size", "3")
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1
