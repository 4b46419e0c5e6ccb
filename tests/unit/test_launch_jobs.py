"""`amt launch status`, `logs` and `stop`, on launchers that are made up, and one in the background."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.cluster.job_file import JOB_FILE, LAUNCH_LOG, JobFile, read_job
from tests.small_run import write_run

# A launcher that says that it runs, and at SIGTERM that it has ended.
LAUNCHER = """
import signal, sys
from pathlib import Path
from ascend_moe_train.cluster.job_file import JobFile
job = JobFile(Path(sys.argv[1]), ["launch", "train"])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
job.begin()
print("begun", flush=True)
signal.sigwait({signal.SIGTERM})
job.end(143)
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "run" / "logs")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        yield process
        process.kill()


def status(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object]]:
    code = main(["launch", "status", str(run_dir), "--json"])
    return code, dict(json.loads(capsys.readouterr().out))


def test_a_launcher_that_runs_can_be_stopped(
    running: "subprocess.Popen[str]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "logs" / "failures" / "1").mkdir(parents=True)
    code, found = status(run_dir, capsys)
    assert (code, found["state"], found["process"], found["failures"]) == (0, "running", running.pid, 1)
    assert (found["step"], found["checkpoint_step"], found["exit_code"]) == (None, None, None)
    assert main(["launch", "stop", str(run_dir)]) == 0
    assert capsys.readouterr().out == "ended with exit code 143\n"
    code, found = status(run_dir, capsys)
    assert (code, found["state"], found["exit_code"]) == (1, "ended", 143)
    assert main(["launch", "stop", str(run_dir)]) == 2
    assert "does not run any more" in capsys.readouterr().err


def test_another_process_with_its_id_is_left_alone(
    running: "subprocess.Popen[str]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "logs" / JOB_FILE
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "started_ticks": facts["started_ticks"] - 1}))
    assert main(["launch", "stop", str(tmp_path / "run")]) == 2
    assert running.poll() is None
    assert status(tmp_path / "run", capsys)[1]["state"] == "gone"
    path.write_text(json.dumps({**facts, "host": "far"}))
    assert main(["launch", "stop", str(tmp_path / "run")]) == 2
    assert "runs on host far, stop it there" in capsys.readouterr().err
    assert status(tmp_path / "run", capsys)[1]["state"] == "unknown: on host far"


@pytest.mark.parametrize("content", [None, "", "{}", '{"pid": -1}', "[1]"])
@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_a_folder_without_a_launcher_is_one_line(
    verb: str, content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / JOB_FILE).write_text(content)
    assert main(["launch", verb, str(tmp_path)]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1
    assert ("no amt launch has run here" if content is None else "is none of amt launch") in found.err


def test_logs_are_the_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    job = JobFile(folder, ["launch"])
    job.begin()
    job.end(0)
    assert read_job(folder).exit_code == 0 and not read_job(folder).is_running
    (folder / LAUNCH_LOG).write_text("one\ntwo\nthree\n")
    (folder / "rank-00003.log").write_text("of a rank\n")
    assert main(["launch", "logs", str(tmp_path), "--lines", "2", "--follow"]) == 0
    assert main(["launch", "logs", str(tmp_path), "--rank", "3"]) == 0
    assert capsys.readouterr().out == "two\nthree\nof a rank\n"
    assert main(["launch", "logs", str(tmp_path), "--rank", "4"]) == 2
    assert "rank-00004.log: there is no such log: no such rank" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_in_the_background(tmp_path: Path, small_corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_yaml, run_dir = write_run(tmp_path, small_corpus), tmp_path / "run"
    settings = ["--set", "run.steps=100000", "--set", "run.eval_every=100000", "--set", "checkpoint.every=100000"]
    assert main(["launch", "--ranks", "1", "--detach", "train", str(run_yaml), *settings]) == 0
    pid = read_job(run_dir / "logs").pid
    try:
        assert f"started in the background, process {pid}: amt launch status {run_dir}" in capsys.readouterr().out
        while status(run_dir, capsys)[1]["step"] is None:
            assert read_job(run_dir / "logs").is_running
        assert main(["launch", "stop", str(run_dir)]) == 0
    finally:
        if read_job(run_dir / "logs").is_running:
            os.kill(pid, signal.SIGKILL)
    code, found = status(run_dir, capsys)
    assert (code, found["exit_code"]) == (1, 143) and found["checkpoint_step"] == found["step"]
    assert "stopped by SIGTERM after step" in (run_dir / "logs" / LAUNCH_LOG).read_text()
