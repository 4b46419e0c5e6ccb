"""Real runs of the trainer that go well give no fault, with all that they and MindSpore warn of."""

import subprocess
import sys
from pathlib import Path

import pytest

from ascend_moe_train.cli.main import main as amt
from ascend_moe_train.doctor.diagnose import diagnose
from ascend_moe_train.doctor.rule import rule_book
from ascend_moe_train.doctor.words import as_json
from tests.healthy_runs import make, setting
from tests.launched import environment

ROOT = Path(__file__).parents[2]
STOPPED = 11  # the number of a run that is stopped and goes on
NUM_LOGS = 50  # of some 28 runs
DEADLINE_S = 1800


def faults(folder: Path) -> list[str]:
    verdict = diagnose([folder])
    cause = as_json(verdict, rule_book())["cause"]
    return [] if cause is None else [f"{folder.name}: {cause['id']}: {cause['lines'][:1]}"]


def test_a_run_that_is_stopped_and_goes_on(tmp_path: Path, small_corpus: Path) -> None:
    assert setting(STOPPED).stop_after is not None
    assert make(tmp_path / "run", small_corpus, STOPPED) >= 2
    assert faults(tmp_path / "run") == []
    assert amt(["doctor", str(tmp_path / "run")]) == 0
    with (tmp_path / "run" / "console-2.log").open("a") as file:
        file.write("error: run.dir: no space left on device\n")
    assert len(faults(tmp_path / "run")) == 1


@pytest.mark.slow
def test_many_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.healthy_runs", str(tmp_path), str(NUM_LOGS)],
        env=environment() | {"GLOG_v": "2"},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    good = [line.split()[0] for line in (tmp_path / "good.txt").read_text().splitlines()]
    assert len(good) == len(list((tmp_path / "runs").iterdir())), done.stdout
    assert [fault for number in good for fault in faults(tmp_path / "runs" / number)] == []
