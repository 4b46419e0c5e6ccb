"""`amt launch --restarts`: ranks of a real training are killed, and the run ends as if nothing had been."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.launched import environment, launch_command, launched
from tests.small_run import metrics, newest_state, write_run
from tests.stand_in import TIMEOUT_S, descendants, program_of

RANK = "ascend_moe_train.cli.rank_main"
SETTINGS = ("run.steps=24", "run.eval_every=12", "checkpoint.every=4", "parallel.restarts.pause_s=0.1")


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_step(process: "subprocess.Popen[str]", run_dir: Path, step: int) -> None:
    """Returns once a run has recorded a step."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while steps_done(run_dir) < step:
        assert process.poll() is None and time.monotonic() < deadline_s, process.communicate()
        time.sleep(0.005)


def killed_after(command: Sequence[str], run_dir: Path, kills: Sequence[tuple[int, int]]) -> tuple[int, str, str]:
    """Runs a launcher, and kills ranks: after which step, which one. Code, output, errors."""
    process = subprocess.Popen(
        command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for step, number in kills:
            wait_for_step(process, run_dir, step)
            ranks = [pid for pid, words in descendants(process.pid).items() if program_of(words) == RANK]
            (pid,) = (pid for pid in ranks if f"AMT_RANK={number}\0" in Path(f"/proc/{pid}/environ").read_text())
            os.kill(pid, signal.SIGKILL)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, output, errors


def test_a_killed_rank_changes_nothing_in_the_end(tmp_path: Path, small_corpus: Path) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    whole, broken = (write_run(tmp_path / name, small_corpus) for name in ("whole", "broken"))
    launched(2, whole, *SETTINGS)
    run_dir = tmp_path / "broken" / "run"
    command = launch_command(2, broken, *SETTINGS, restarts=1)
    code, output, errors = killed_after(command, run_dir, [(6, 1)])
    assert code == 0, output + errors
    assert "error: rank 1 was killed by signal 9 (SIGKILL)" in output + errors
    assert "restart 1 of at most 1 in 0.1 s, from the checkpoint of step " in output + errors
    assert metrics(run_dir) == metrics(tmp_path / "whole" / "run")
    assert newest_state(run_dir) == newest_state(tmp_path / "whole" / "run")
    evidence = run_dir / "logs" / "failures" / "1"
    facts = json.loads((evidence / "failure.json").read_text())
    assert facts["first_failed"]["rank"] == 1 and facts["last_step"] >= 6 and facts["checkpoint_step"] >= 4
    assert (evidence / "rank-00000.log").read_text().startswith("--- start ")
