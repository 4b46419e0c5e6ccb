"""A training over two hosts that is struck: ranks killed, links cut, hosts stopped. It starts again by itself, from its
newest checkpoint, and ends with the losses and weights of one that nothing happened to."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts_train import LabRun, cut_link, kill, lab_of, mend_link, ranks, stop_host, wake_host
from tests.lab import Lab, why_not
from tests.small_run import metrics, newest_state

REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

STEPS = ("run.steps=60",)
WITHIN = 1e-4  # of losses in another layout
SOON = 30  # steps, of 60: the host is lost soon after the twelfth


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with lab_of(tmp_path / "lab", 3) as made:
        yield made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path) -> Path:
    """The folder of a run that nothing happened to, on two of the hosts."""
    folder = tmp_path_factory.mktemp("whole")
    with lab_of(folder / "lab", 2) as lab, LabRun(lab, folder / "of", small_corpus, *STEPS) as run:
        assert run.wait() == 0, run.said
    return run.run_dir


def assert_same_end(run: LabRun, whole: Path) -> None:
    """Every number of every step, every bit of every weight and moment."""
    assert metrics(run.run_dir) == metrics(whole)
    assert newest_state(run.run_dir) == newest_state(whole)


def bad_hosts(run: LabRun) -> list[tuple[str, str]]:
    listed: dict[str, Any] = json.loads((run.run_dir / "logs" / "bad-hosts.json").read_text())
    return [(each["name"], each["why"]) for each in listed["hosts"]]


def test_a_killed_rank(lab: Lab, whole: Path, tmp_path: Path, small_corpus: Path) -> None:
    options = ("--spares", "1", "--restarts", "1")
    with LabRun(lab, tmp_path / "of", small_corpus, *STEPS, options=options) as run:
        run.wait_for_step(5)
        cut_link(lab, lab.hosts[1])  # for less than host_s: all wait, and go on
        time.sleep(1)
        step = run.step
        time.sleep(1)
        assert run.step == step
        mend_link(lab, lab.hosts[1])
        run.wait_for_step(12)
        newest = run.newest
        kill(ranks(lab.hosts[1])[3])
        assert run.wait() == 0, run.said
    assert_same_end(run, whole)
    (failure,) = run.failures()
    assert (failure["first_failed"]["rank"], failure["host"], failure["lost_hosts"]) == (3, "h2", [])
    assert "error: rank 3 was killed by signal 9 (SIGKILL)" in run.said
    assert failure["checkpoint_step"] >= newest > 0
    run.assert_nothing_lost()


@pytest.mark.parametrize("number", [1, 2])
def test_a_cut_link(number: int, lab: Lab, whole: Path, tmp_path: Path, small_corpus: Path) -> None:
    """A spare takes the place of the host, which comes back later and is left out."""
    options = ("--spares", "1", "--restarts", "1")
    with LabRun(lab, tmp_path / "of", small_corpus, *STEPS, options=options) as run:
        run.wait_for_step(12)
        cut_link(lab, lab.hosts[number - 1])
        while not run.failures():
            run.pause()
        mend_link(lab, lab.hosts[number - 1])
        assert run.wait() == 0, run.said
        assert ranks(lab.hosts[number - 1]) == {}
    assert_same_end(run, whole)
    (failure,) = run.failures()
    assert failure["lost_hosts"] == [f"h{number}"]
    assert bad_hosts(run) == [(f"h{number}", "it was lost")]
    assert f"host h{number} is left out (it was lost; " in run.said and "h3 takes its place" in run.said
    run.assert_nothing_lost()


@pytest.mark.parametrize("number", [1, 2])
def test_a_stopped_host(number: int, lab: Lab, whole: Path, tmp_path: Path, small_corpus: Path) -> None:
    """It holds the run's lock, if it has rank 0, and goes on while its successor trains."""
    options = ("--spares", "1", "--restarts", "1")
    with LabRun(lab, tmp_path / "of", small_corpus, *STEPS, options=options) as run:
        run.wait_for_step(12)
        stop_host(lab.hosts[number - 1])
        while not run.failures():
            run.pause()
        run.wait_for_step(run.newest + 5)
        wake_host(lab.hosts[number - 1])
        assert run.wait() == 0, run.said
        assert ranks(lab.hosts[number - 1]) == {}
    assert_same_end(run, whole)
    assert bad_hosts(run) == [(f"h{number}", "it was lost")]
    run.assert_nothing_lost()


def test_fewer_hosts(lab: Lab, whole: Path, tmp_path: Path, small_corpus: Path) -> None:
    """Without a spare the run goes on in a layout that the planner finds for the hosts that are left."""
    lab.hosts[2:], left = [], lab.hosts[2:]
    try:
        with LabRun(lab, tmp_path / "of", small_corpus, *STEPS, "parallel.ep=4", options=("--restarts", "1")) as run:
            run.wait_for_step(12)
            cut_link(lab, lab.hosts[1])
            assert run.wait() == 0, run.said
    finally:
        lab.hosts += left
    assert "there is no spare: 1 are left" in run.said and "goes on with 1 hosts and --set " in run.said
    losses, expected = ([line["loss"] for line in metrics(folder)] for folder in (run.run_dir, whole))
    # further on, what rounding differs in another layout sends tokens near a tie to other experts
    assert losses[:SOON] == pytest.approx(expected[:SOON], rel=WITHIN)
    assert losses == pytest.approx(expected, rel=100 * WITHIN)
    run.assert_nothing_lost()


def test_a_limit_of_time_and_a_stop_in_the_background(
    lab: Lab, whole: Path, tmp_path: Path, small_corpus: Path
) -> None:
    folder, spare = tmp_path / "of", ("--spares", "1")
    limit = ("run.time_limit_s=2000", "run.time_reserve_s=1999.9")  # over once ranks have started
    with LabRun(lab, folder, small_corpus, *STEPS, *limit, options=spare) as run:
        assert run.wait() == 143, run.said
        assert "stopped by run.time_limit_s 2000 after step 0, saved" in run.said
    with LabRun(lab, folder, small_corpus, *STEPS, options=(*spare, "--detach")) as run:
        assert run.wait() == 0 and "started in the background, process " in run.said
        run.wait_for_step(8)
        found = json.loads(run.done("status", "--json"))
        assert (found["state"], found["exit_code"], found["failures"]) == ("running", None, 0)
        assert run.done("stop") == "ended with exit code 143\n"
        assert ranks(lab.hosts[0]) == ranks(lab.hosts[1]) == {}
        found = json.loads(run.done("status", "--json"))
        assert (found["state"], found["exit_code"], found["checkpoint_step"]) == ("ended", 143, found["step"])
        assert f"stopped by SIGTERM after step {found['step']}, saved" in run.done("logs", "--lines", "1000")
        assert "--- start " in run.done("logs", "--rank", "0", "--lines", "1000")
    with LabRun(lab, folder, small_corpus, *STEPS, options=spare) as run:
        assert run.wait() == 0, run.said
    assert_same_end(run, whole)
