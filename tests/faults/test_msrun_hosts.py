"""msrun on several hosts of a lab: started on each with what it has to be told, watched and ended everywhere."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import fake_msrun
from tests.hosts_stand_in import SLOTS, launcher_command
from tests.lab import Lab, why_not
from tests.launched import environment, launched
from tests.small_run import make_corpus, write_run
from tests.stand_in import ROOT, TIMEOUT_S

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
GUARD = "ascend_moe_train.cluster.guard"
FIGURES = ("loss", "aux_loss", "z_loss", "grad_norm")
MANY_STEPS = 10**6


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)])
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path, request.param)
    try:
        yield made
    finally:
        made.close()


class Job:
    """A launcher on the switch, whose ranks are those of `fake_msrun`, on all hosts."""

    def __init__(self, lab: Lab, folder: Path, faults: Sequence[dict[str, Any]], steps: int, broken: int) -> None:
        self.lab, self.run_dir = lab, folder / "run"
        self.run_dir.mkdir()
        (self.run_dir / fake_msrun.BROKEN).write_text(str(broken))
        python_path = fake_msrun.install(folder / "fake")
        for host in lab.hosts:
            host.start_sshd(f"PYTHONPATH={python_path}")
        command = launcher_command(
            self.run_dir,
            {host.name: host.address for host in lab.hosts},
            fake_msrun.RANK,
            json.dumps([str(self.run_dir), steps, faults]),
            changes={"starter": "msrun"},
        )
        self._said = folder / "said"
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                lab.switch.inside(*command),
                cwd=ROOT,
                env=of_user(lab),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def wait_for_steps(self) -> None:
        """Until every rank has done one."""
        marks = [self.run_dir / f"rank-{rank}" for rank in range(SLOTS * len(self.lab.hosts))]
        self.wait_until(lambda: all(mark.exists() for mark in marks))
        assert all(len(host.processes(GUARD)) >= SLOTS for host in self.lab.hosts)

    def wait_until(self, is_so: Any) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert self.process.poll() is None and time.monotonic() < end_s, self.said
            time.sleep(0.02)

    def nobody_is_left(self) -> bool:
        """After some time to go."""
        end_s = time.monotonic() + TIMEOUT_S
        words = (GUARD, fake_msrun.RANK, "mindspore.parallel.cluster.run")
        while (
            left := [host.processes(word) for host in self.lab.hosts for word in words if host.processes(word)]
        ) and (time.monotonic() < end_s):
            time.sleep(0.1)
        return not left

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def jobs(lab: Lab, tmp_path: Path) -> Iterator[Any]:
    made: list[Job] = []

    def start(*faults: dict[str, Any], steps: int = MANY_STEPS, broken: int = -1) -> Job:
        made.append(Job(lab, tmp_path, faults, steps, broken))
        return made[-1]

    try:
        yield start
    finally:
        for job in made:
            job.end()


def of_user(lab: Lab) -> dict[str, str]:
    return {name: value for name, value in environment().items() if name != "SSH_AUTH_SOCK"} | {"HOME": str(lab.home)}


def test_each_host_is_told_what_it_has_to_be_told(lab: Lab, jobs: Any) -> None:
    job = jobs(steps=20)
    assert job.process.wait(TIMEOUT_S) == 0, job.said
    assert job.nobody_is_left()
    world = SLOTS * len(lab.hosts)
    ports = set()
    for node, host in enumerate(lab.hosts):
        folder = job.run_dir / "logs" / "msrun" / f"node-{node}"
        given = json.loads((folder / fake_msrun.ARGUMENTS).read_text())
        ports.add(given["master_port"])
        assert given["host"] == host.name
        assert (given["worker_num"], given["local_worker_num"], given["node_rank"]) == (world, SLOTS, node)
        assert (given["master_addr"], given["join"]) == (lab.hosts[0].address, "True")
        assert given["cluster_time_out"] == TIMEOUT_S
        assert given["task_script"] == "python"
        assert fake_msrun.RANK in given["task_script_args"] and GUARD in given["task_script_args"]
    assert len(ports) == 1 and 1024 <= ports.pop() < 65536
    for rank in range(world):
        lines = (job.run_dir / "logs" / f"rank-{rank:05}.log").read_text().splitlines()
        assert lines[1:] == [f"step {step}" for step in range(1, 21)]


@pytest.mark.slow
def test_a_stop_ends_all_hosts(jobs: Any) -> None:
    job = jobs()
    job.wait_for_steps()
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(TIMEOUT_S) == 128 + signal.SIGINT, job.said
    assert job.nobody_is_left() and "error" not in job.said


@pytest.mark.slow
def test_a_rank_that_ends_badly_ends_all_hosts(jobs: Any) -> None:
    job = jobs({"rank": 3, "code": 7})
    assert job.process.wait(TIMEOUT_S) == 7, job.said
    assert job.nobody_is_left()
    assert "error: rank 3 ended with exit code 7 in step 3" in job.said
    assert json.loads((job.run_dir / "failed.json").read_text()) == {"rank": 3, "host": "h2", "lost": []}


@pytest.mark.slow
@pytest.mark.parametrize("word", ["mindspore.parallel.cluster.run", GUARD])
def test_what_is_killed_on_one_host_ends_all(word: str, lab: Lab, jobs: Any) -> None:
    job = jobs()
    job.wait_for_steps()
    os.kill(lab.hosts[1].processes(word)[0], signal.SIGKILL)
    assert job.process.wait(TIMEOUT_S) not in (0, 124), job.said
    assert job.nobody_is_left()


@pytest.mark.slow
def test_an_msrun_that_does_not_start_is_named_with_its_host(jobs: Any) -> None:
    job = jobs(broken=1)
    assert job.process.wait(TIMEOUT_S) == 1, job.said
    assert job.nobody_is_left()
    assert "msrun on host h2 ended with exit code 1 before its ranks did: RuntimeError: Failed to convert" in job.said


@pytest.mark.slow
def test_nobody_outlives_the_launcher(jobs: Any) -> None:
    job = jobs()
    job.wait_for_steps()
    job.process.kill()
    assert job.nobody_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("lab", [2], indirect=True)
def test_training_by_the_real_msrun_is_that_of_one_machine(lab: Lab, tmp_path: Path) -> None:
    """Two hosts with one rank each, MindSpore's own scheduler and collectives between them."""
    run_yaml = write_run(tmp_path, make_corpus(tmp_path))
    (tmp_path / "hosts").write_text(lab.hostfile(slots=1))
    settings = ("run.steps=6", "batch.micro_sequences=2", "parallel.zero_stage=0")
    words = ["launch", "--hostfile", str(tmp_path / "hosts"), "--starter", "msrun", "train", str(run_yaml)]
    words += [word for setting in settings for word in ("--set", setting)]
    amt = [sys.executable, "-P", "-c", "from ascend_moe_train.cli.main import run; run()"]
    by_hosts = subprocess.run(
        lab.switch.inside(*amt, *words),
        env=of_user(lab),
        cwd=tmp_path,
        timeout=300,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert by_hosts.returncode == 0, by_hosts.stdout + by_hosts.stderr
    assert (tmp_path / "run" / "logs" / "msrun" / "node-0" / "scheduler.log").exists()
    launched(2, run_yaml, *settings, f"run.dir={tmp_path}/other")
    found = []
    for name in ("run", "other"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append([record for record in map(json.loads, lines) if record["kind"] == "step"])
    assert len(found[0]) == len(found[1]) == 6
    for one, other in zip(*found, strict=True):
        assert [one[name] for name in FIGURES] == pytest.approx([other[name] for name in FIGURES], rel=1e-5)
