"""`amt bench` with real ranks: a ladder of two rungs trains alike; a machine is measured, and planned with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_moe_train.bench.ablate import KEPT
from ascend_moe_train.bench.measured import Measured, read_measured
from ascend_moe_train.bench.probes import VERBS, read_probed
from ascend_moe_train.bench.result import read_result
from ascend_moe_train.planner.hardware import catalogue, parse_cluster
from tests.launched import DEADLINE_S, environment
from tests.small_run import write_run

AMT = [sys.executable, "-c", "from ascend_moe_train.cli.main import run; run()"]
STEPS = 3
RUNGS = ("one_by_one", "expert_parallel")
TOLERANCE = 1e-5
"""Of losses, fp32: see docs/design.md, 8."""


def kept(path: Path) -> Measured:
    own = path.with_suffix(".own")
    own.write_text(json.dumps(json.loads(path.read_text())["measured"]))
    found = read_measured(own)
    assert found is not None
    return found


@pytest.mark.slow  # four processes, each with a compilation
def test_two_rungs_train_alike_and_are_measured(tmp_path: Path, small_corpus: Path) -> None:
    run_yaml, out = write_run(tmp_path, small_corpus), tmp_path / "out"
    words = ["bench", "ablate", str(run_yaml), "--ranks", "2", "--steps", str(STEPS), "--rungs", ",".join(RUNGS)]
    words += ["--out", str(out), "--set", "model.moe.capacity_factor=null"]
    command = [*AMT, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run").exists()  # that of the run file
    found = first, second = [kept(out / KEPT / f"{name}.0.json") for name in RUNGS]
    assert (len(first.losses), first.kernels) == (STEPS, "portable")
    assert second.losses == pytest.approx(first.losses, rel=TOLERANCE)
    assert {call.verb for call in second.calls if call.group == "ep"} == {"all_to_all_v"}
    assert not [call for call in first.calls if call.group == "ep"]
    for each in found:
        assert len(each.ranks) == 2 and each.sent_bytes > 0 and each.step_s >= each.exposed_s > 0
        assert all(rank.peak_bytes > rank.start_bytes > 0 for rank in each.ranks)
    rows = read_result(out / "ablate.json").rows
    assert [row["rung"] for row in rows] == list(RUNGS) and rows[1]["against_first"] is not None


@pytest.mark.slow  # fourteen graphs on two ranks
def test_a_machine_is_measured_and_planned_with(tmp_path: Path) -> None:
    words = ["bench", "calibrate", "--ranks", "2", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        [*AMT, *words], capture_output=True, text=True, check=False, env=environment(), timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    found = read_probed(tmp_path / "work" / "found.json")
    assert {(each.verb, each.size) for each in found.comm} == {(verb, 2) for verb in VERBS}
    assert all(each.best_s > 0 for each in found.comm) and all(each.best_s > 0 for each in found.work)
    assert parse_cluster("2xhere", catalogue(tmp_path / "hardware.yaml")).device.peak("fp32") > 0
