"""The launcher with ranks that are killed, stopped, crash, raise, stall or leave: it names the first, ends all, leaves
nothing behind. The ranks are stand-ins for the trainer, with real MPI."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.stand_in import RANK, Fault, Launched, launch, launch_module

GUARD = "ascend_moe_train.cluster.guard"
KILLED = {"what": "signal", "number": signal.SIGKILL}


def assert_failed(launched: Launched, code: int, message: str) -> None:
    """The exit code, the first line of the message, and that nobody is left."""
    assert (launched.wait(), launched.left()) == (code, {}), launched.errors
    first = next(line for line in launched.errors.splitlines() if not line.startswith("[rank "))
    assert re.match(message, first), launched.errors
    for noise in ("BAD TERMINATION", "Traceback (most recent", "=====", "FAQ"):
        assert noise not in launched.errors + launched.output


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (KILLED, 137, r"error: rank 2 was killed by signal 9 \(SIGKILL\) in step 3$"),
        ({"what": "crash"}, 139, r"error: rank 2 was killed by signal 11 \(SIGSEGV\) in step 3$"),
        ({"what": "exit", "code": 3}, 3, "error: rank 2 ended with exit code 3 in step 3$"),
        ({"what": "exit", "code": 0}, 1, "error: rank 2 ended with exit code 0 in step 3, and not all ranks are done$"),
        ({"what": "raise"}, 1, "error: rank 2 failed in step 3: ValueError: bad value$"),
        ({"what": "refuse"}, 2, "error: rank 2 in step 3: disk: No space left on device$"),
        ({"what": "abort"}, 5, r"error: rank 2 ended MPI in step 3.*: Abort\(5\)"),
        (
            {"what": "signal", "number": signal.SIGSTOP},
            124,
            "error: rank 2 was stopped by SIGSTOP in step 3, and did not go on for 2 s: ranks 0, 1, 3 wait in "
            r"all_reduce over world \(collective 3\)$",
        ),
        (
            {"what": "stall"},
            124,
            r"error: rank 2 made no progress for 2 s in step 3: ranks 0, 1, 3 wait in all_reduce over world "
            r"\(collective 3\) \(parallel.deadlines.step_s is 1.5\)$",
        ),
        (
            {"what": "finish"},
            124,
            r"error: rank 2 was done after its last step 3: ranks 0, 1, 3 wait in all_reduce over world",
        ),
        (
            {"what": "other collective"},
            124,
            r"error: rank 2 made no progress for 2 s in step 3, in all_to_all over ep \(collective 7\): ranks 0, 1, 3 "
            r"wait in all_reduce over world \(collective 3\)",
        ),
    ],
)
def test_a_rank_that_fails_is_named_and_all_end(fault: Fault, code: int, message: str, tmp_path: Path) -> None:
    with launch(4, tmp_path, {"rank": 2, **fault}) as launched:
        launched.wait_for_step(2)
        assert len(launched.pids(RANK)) == 4
        assert_failed(launched, code, message)


def test_the_first_of_two_is_named(tmp_path: Path) -> None:
    later = {"rank": 1, "after_s": 0.1, **KILLED}
    with launch(4, tmp_path, later, {"rank": 3, "what": "raise"}) as launched:
        launched.wait_for_step(2)
        assert_failed(launched, 1, "error: rank 3 failed in step 3: ValueError: bad value$")
    assert "was killed by signal 9 (SIGKILL) in step 3\n" in launched.errors


def test_an_end_with_all_well(tmp_path: Path) -> None:
    with launch(2, tmp_path, steps=3) as launched:
        assert launched.wait() == 0
    assert launched.output == "step 1\nstep 2\nstep 3\n"
    assert launched.errors == "[rank 1] step 1\n[rank 1] step 2\n[rank 1] step 3\n"
    logs = [(tmp_path / "logs" / f"rank-0000{rank}.log").read_text().splitlines() for rank in range(2)]
    assert [lines[1:] for lines in logs] == [["step 1", "step 2", "step 3"]] * 2
    assert logs[0][0].startswith("--- start ")


def test_one_rank(tmp_path: Path) -> None:
    with launch(1, tmp_path, {"rank": 0, **KILLED}) as launched:
        launched.wait_for_step(2)
        assert_failed(launched, 137, r"error: rank 0 was killed by signal 9 \(SIGKILL\) in step 3$")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_that_is_asked_for_is_no_failure(number: int, code: int, tmp_path: Path) -> None:
    with launch(2, tmp_path) as launched:
        launched.wait_for_step(2)
        launched.process.send_signal(number)
        assert (launched.wait(), launched.left()) == (code, {})
    assert "error" not in launched.errors


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    with launch(2, tmp_path, {"rank": 1, "what": "stall"}) as launched:
        launched.wait_for_step(2)
        launched.process.send_signal(signal.SIGINT)
        launched.process.send_signal(signal.SIGTERM)
        assert (launched.wait(), launched.left()) == (130, {})


def test_ranks_that_cannot_stop_together_do_not_wait_for_each_other(tmp_path: Path) -> None:
    with launch(2, tmp_path, {"rank": -1, "what": "deaf"}) as launched:
        launched.wait_for_step(2)
        launched.process.send_signal(signal.SIGTERM)
        assert (launched.wait(), launched.left()) == (143, {})
    assert "error" not in launched.errors


@pytest.mark.parametrize("stopped", ["nobody", RANK, GUARD])
def test_nobody_outlives_the_launcher(stopped: str, tmp_path: Path) -> None:
    with launch(4, tmp_path) as launched:
        launched.wait_for_step(2)
        assert len(launched.pids(GUARD)) == len(launched.pids(RANK)) == 4
        for pid in launched.pids(stopped):
            os.kill(pid, signal.SIGSTOP)
        launched.process.kill()
        assert launched.left() == {}


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("mpiexec", r"mpiexec was killed by signal 9 \(SIGKILL\) before its ranks did$"),
        ("hydra_pmi_proxy", "rank . was lost, with the process that watched over it, in step "),
        (GUARD, "rank . was lost, with the process that watched over it, in step "),
    ],
)
def test_what_holds_the_ranks_is_killed(program: str, message: str, tmp_path: Path) -> None:
    with launch(2, tmp_path) as launched:
        launched.wait_for_step(2)
        os.kill(launched.pids(program)[0], signal.SIGKILL)
        assert launched.wait() in (1, 137)
        assert launched.left() == {}
    assert re.search(f"^error: {message}", launched.errors, re.MULTILINE), launched.errors


def test_nothing_that_ranks_use_is_left_behind(tmp_path: Path) -> None:
    with launch(2, tmp_path, {"rank": 1, "step": 1, "what": "child"}) as launched:
        launched.wait_for_step(2)
        (child,) = launched.pids("sleep")
        open_files = [link.readlink() for pid in launched.pids(RANK) for link in Path(f"/proc/{pid}/fd").iterdir()]
        shared = [path for path in map(str, open_files) if path.startswith("/dev/shm/")]
        assert len(shared) >= 2 and all(path.endswith(" (deleted)") for path in shared), shared
        os.kill(launched.pids(RANK)[1], signal.SIGKILL)
        assert launched.wait() == 137
        assert child in launched.seen and launched.left() == {}


def test_a_board_that_a_rank_writes_over(tmp_path: Path) -> None:
    faults = ({"rank": 1, "what": "scribble", "seed": 5}, {"rank": 1, **KILLED})
    with launch(2, tmp_path, *faults) as launched:
        launched.wait_for_step(2)
        assert_failed(launched, 137, r"error: rank 1 was killed by signal 9 \(SIGKILL\) in step ")


def test_output_of_any_kind(tmp_path: Path) -> None:
    with launch(2, tmp_path, {"rank": 1, "step": 1, "what": "shout", "size_bytes": 10_000_000}, steps=1) as launched:
        assert launched.wait() == 0
    long, *others = sorted(launched.errors.splitlines(), key=len, reverse=True)
    assert len(long) > 4_000_000 and set(long.removeprefix("[rank 1] ")) == {"x"}
    assert {"[rank 1] red \N{REPLACEMENT CHARACTER} bell", "[rank 1] last"} <= set(others)


def test_nobody_reads_the_output_any_more(tmp_path: Path) -> None:
    with launch(2, tmp_path) as launched:
        launched.wait_for_step(2)
        assert launched.process.stdout is not None
        launched.process.stdout.close()
        launched.process.stdout = None
        assert (launched.wait(), launched.left()) == (1, {})
    assert "BrokenPipeError" in launched.errors


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_mistake_that_all_ranks_meet_is_one_line(ranks: int, tmp_path: Path) -> None:
    arguments = ("config", "check", str(tmp_path / "none.yaml"))
    with launch_module(ranks, tmp_path, "ascend_moe_train.cli.rank_main", *arguments) as launched:
        assert launched.wait() == 2
    assert launched.errors == f"error: {tmp_path / 'none.yaml'}: cannot be read: No such file or directory\n"
    assert launched.errors in (tmp_path / "logs" / "rank-00000.log").read_text()


def test_a_command_that_works_as_ranks(tmp_path: Path) -> None:
    with launch_module(2, tmp_path, "ascend_moe_train.cli.rank_main", "--version") as launched:
        assert launched.wait() == 0
    assert launched.errors.startswith("[rank 1] amt, version ") and launched.output.startswith("amt, version ")


def test_an_error_in_the_program_keeps_its_traceback(tmp_path: Path) -> None:
    with launch_module(2, tmp_path, "tests.stand_in_error") as launched:
        assert launched.wait() == 1
    first, *others = launched.errors.splitlines()
    assert re.fullmatch("error: rank . failed while starting: ZeroDivisionError: of a test", first)
    assert any(re.fullmatch(r"\[rank .\] Traceback \(most recent call last\):", line) for line in others)
