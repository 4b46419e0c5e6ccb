"""`amt selftest` as a user starts it: it passes on this machine's CPU, survives Ctrl-C, and names a rank that hangs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.selftest import suite
from ascend_moe_train.selftest.names import DEVICE, GRAPH, HOST, of_verb
from ascend_moe_train.selftest.processes import Part, run_part
from ascend_moe_train.selftest.results import Result
from tests.launched import environment

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300
AMT = [sys.executable, "-c", "from ascend_moe_train.cli.main import run; run()", "selftest"]


def read(out: Path) -> Any:
    return json.loads((out / "report.json").read_text())


def assert_collectives_passed(found: Any, out: Path) -> None:
    """A part that needs the launcher, MindSpore's launcher, and graphs."""
    assert found == read(out)
    assert (found["passed"], found["counts"]["failed"]) == (True, 0)
    by_status: dict[str, set[str]] = {}
    for each in found["results"]:
        by_status.setdefault(each["status"], set()).add(each["part"])
    assert by_status["passed"] == {"machine", "collectives: MPI, 2 ranks", "collectives: MCCL, 2 ranks"}
    assert by_status["not run"] == {"kernels", "training", "collectives: MCCL, 2 ranks", "several machines"}
    assert "All checks that were run have passed" in (out / "report.html").read_text()


def test_some_collectives_of_two_ranks_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a verb that CPUs have by themselves, and of one that they have not."""
    chosen = {of_verb(verb, way): (verb, way) for verb in ("all_reduce", "send") for way in (HOST, GRAPH)}
    monkeypatch.setattr(suite, "COLLECTIVES", chosen)
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    out = tmp_path / "report"
    assert main(["selftest", "--only", "collectives", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert_collectives_passed(found, out)
    assert {each["name"] for each in found["results"] if each["status"] == "passed"} == {DEVICE, *chosen}


@pytest.mark.slow
def test_all_collectives_of_two_ranks_pass(tmp_path: Path) -> None:
    out = tmp_path / "report"
    done = subprocess.run(
        [*AMT, "--only", "collectives", "--out", str(out), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        stdin=subprocess.DEVNULL,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert_collectives_passed(json.loads(done.stdout), out)


def test_ctrl_c_leaves_a_page_of_what_is_done(tmp_path: Path) -> None:
    out = tmp_path / "report"
    mark = f"TEST_SELFTEST={tmp_path}"
    process = subprocess.Popen(
        [*AMT, "--only", "kernels", "--out", str(out)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment() | {"TEST_SELFTEST": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if len(lines) == 4:
            process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    found = read(out)
    assert (found["stopped_by"], found["passed"], found["counts"]["failed"]) == ("SIGINT", False, 0)
    assert found["counts"]["passed"] >= 4
    assert any(each["detail"] == "stopped by SIGINT" for each in found["results"])
    assert "Not finished" in (out / "report.html").read_text()
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if mark.encode() in _bytes(path)]
    assert left == []


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # another user's, or ended
        return b""


def on_ranks(folder: Path, how: str) -> list[Result]:
    """Three verbs on host arrays, of which the second is wrong on rank 1."""
    part = Part(
        name="collectives",
        checks=tuple(of_verb(verb, HOST) for verb in ("broadcast", "all_to_all", "barrier")),
        command=lambda place: [sys.executable, "-m", "tests.selftest_ranks", str(place)],
        options={
            "kind": "collectives",
            "backend": "mpi",
            "device": "cpu",
            "wrong verb": "all_to_all",
            "how": how,
        },
        environment={**environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        ranks=2,
        check_s=20.0,
    )
    return run_part(part, folder, lambda result: None)


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, "hangs")
    assert [each.status for each in found] == ["passed", "failed", "passed"], found
    assert "rank 1 made no progress for 10 s in step 2: rank 0 waits in all_to_all over world" in found[1].detail


def test_wrong_results_of_one_rank_are_found(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, "is wrong")
    assert [each.status for each in found] == ["passed", "failed", "passed"], found
    assert found[1].detail.startswith("rank 1: all_to_all world float64")
