"""Training on four ranks of which one is killed, stopped, raises in a collective of the forward pass, stalls, or meets
a full disk while it saves: the others end within the deadline, the message names the rank, the checkpoints stay whole.
"""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ascend_moe_train.checkpoint import store
from tests.small_run import metrics, newest_state, write_run
from tests.stand_in import ROOT, TIMEOUT_S, launch_module

STEP_S = 8.0
SETTINGS = (
    "run.steps=8",
    "run.eval_every=8",
    "checkpoint.every=2",
    "batch.micro_sequences=1",
    "parallel.ep=2",
    "model.moe.capacity_factor=null",
)
WITHIN_S = STEP_S + 15.0  # the deadline, and what the launcher and a busy machine may take


def overrides(*more: str) -> list[str]:
    return [word for setting in (*SETTINGS, *more) for word in ("--set", setting)]


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("what", "phase", "step", "code", "message"),
    [
        # quick in test_restarts.py, of two ranks
        pytest.param(
            "kill", "step", 5, 137, r"rank 2 was killed by signal 9 \(SIGKILL\) in step 5", marks=pytest.mark.slow
        ),
        pytest.param(
            "stop", "step", 5, 124, "rank 2 was stopped by SIGSTOP in step 5, and did not go on", marks=pytest.mark.slow
        ),
        pytest.param(
            "stall", "step", 5, 124, "rank 2 made no progress for [0-9]+ s in step 5: rank", marks=pytest.mark.slow
        ),
        ("raise", "step", 5, 1, "rank 2 failed in step 5, in all_to_all_v over ep .*: .*of a test"),
        pytest.param(
            "full disk",
            "saving",
            4,
            2,
            "rank 2 while saving step 6: cannot write .*File too large",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_fails_ends_all(
    what: str, phase: str, step: int, code: int, message: str, overlap: bool, tmp_path: Path, small_corpus: Path
) -> None:
    run_yaml = write_run(tmp_path, small_corpus)
    fault = json.dumps({"rank": 2, "phase": phase, "step": step, "what": what})
    run_dir = tmp_path / "run"
    arguments = ("train", "--json", str(run_yaml), *overrides(f"parallel.overlap={str(overlap).lower()}"))
    with launch_module(4, run_dir, "tests.rank_faults", fault, *arguments, step_s=STEP_S) as launched:
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(_steps(run_dir)) < step - 1:
            assert launched.process.poll() is None and time.monotonic() < deadline_s, launched.process.communicate()
            time.sleep(0.02)
        start_s = time.monotonic()
        assert launched.wait() == code, launched.errors
        assert time.monotonic() - start_s < WITHIN_S
    first = next(line for line in launched.errors.splitlines() if line.startswith("error: "))
    assert re.match(f"error: {message}", first), launched.errors
    if what == "stall":  # what Python was doing on the rank that hangs
        log = (run_dir / "logs" / "rank-00002.log").read_text()
        assert re.search(r"rank_faults.py\", line [0-9]+ in cause", log), log
    newest = store.newest(run_dir / "checkpoints")
    # the newest may have been in the making, as it is made beside the steps
    assert newest is not None and newest.step in (2, 4)
    assert newest_state(run_dir)[0] == newest.step


def _steps(run_dir: Path) -> list[str]:
    path = run_dir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def launch_command(run_yaml: Path, steps: int) -> list[str]:
    program = "from ascend_moe_train.cli.main import run; run()"
    settings = overrides(f"run.steps={steps}", "run.eval_every=1000", "checkpoint.every=1000")
    return [sys.executable, "-c", program, "launch", "--ranks", "2", "train", str(run_yaml), *settings]


@pytest.mark.slow
def test_a_stop_saves_and_the_same_command_goes_on(tmp_path: Path, small_corpus: Path) -> None:
    run_yaml, run_dir = write_run(tmp_path, small_corpus), tmp_path / "run"
    process = subprocess.Popen(
        launch_command(run_yaml, 500), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(_steps(run_dir)) < 5:
            assert process.poll() is None and time.monotonic() < deadline_s, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "")
    stopped = metrics(run_dir)[-1]["step"]
    assert f"stopped by SIGTERM after step {stopped}, saved" in output
    assert newest_state(run_dir)[0] == stopped < 500
    done = subprocess.run(
        launch_command(run_yaml, stopped + 3), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    steps = [line["step"] for line in metrics(run_dir) if line["kind"] == "step"]
    assert steps == list(range(1, stopped + 4))
