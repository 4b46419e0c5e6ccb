"""When a job is started again and when not, and what is kept of a failure; starts are made up."""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ascend_moe_train.cluster.board import Status
from ascend_moe_train.cluster.evidence import TAIL_BYTES, Failed, keep_evidence
from ascend_moe_train.cluster.output import Screen
from ascend_moe_train.cluster.restarts import Restarts, run_with_restarts
from ascend_moe_train.cluster.stacks import dump_stacks
from ascend_moe_train.cluster.supervise import Outcome
from ascend_moe_train.cluster.verdict import Ending, RankView

NO_PAUSE = Restarts(at_most=2, pause_s=0.0, longest_pause_s=0.0)


def views(count: int = 3) -> list[RankView]:
    status = Status(pid=7, phase="step", step=5, verb="", group="", sequence=1, entered_s=0.0, updates=3, failure=None)
    ending = Ending(at_s=1.0, signal_number=9)
    return [RankView(rank=n, pid=7, status=status, idle_s=0.5, ending=ending if n == 2 else None) for n in range(count)]


def failure(code: int = 137, **more: object) -> Outcome:
    failed = Failed(
        rank=2, exit_code=code, message="error: rank 2 was killed\n  table", views=views(), stacks={1: "stack of 1"}
    )
    return Outcome(exit_code=code, message=failed.message, failed=failed)


@dataclass
class Start:
    """One made-up start."""

    outcome: Outcome
    before: Callable[[], None]
    log_folder: Path | None = None
    run_id: str = "start-1"

    def run(self, screen: Screen) -> Outcome:
        self.before()
        return self.outcome


class Lines:
    def __init__(self) -> None:
        self.said: list[str] = []

    def line(self, rank: int, text: str, *, is_error: bool) -> None:
        self.said.append(text)


def run(
    outcomes: Sequence[tuple[Outcome, int | None]], restarts: Restarts = NO_PAUSE, folder: Path | None = None
) -> tuple[Outcome, int, list[str]]:
    """Starts that end as given, with the newest checkpoint then; the outcome, how many were made, what was said."""
    left, made, newest, lines = list(outcomes), 0, None, Lines()

    def start(failed: Failed | None, say: Callable[[str], None]) -> Start:
        nonlocal made
        assert (failed is None) == (made == 0)
        made += 1
        outcome, step = left.pop(0)

        def save() -> None:
            nonlocal newest
            newest = step

        return Start(outcome, save, folder)

    outcome = run_with_restarts(start, lines, restarts, lambda: newest)
    return outcome, made, lines.said


def test_a_failure_is_followed_by_a_start() -> None:
    outcome, made, said = run([(failure(), 4), (Outcome(exit_code=0), 8)])
    assert (outcome, made) == (Outcome(exit_code=0), 2)
    assert said[0] == "error: rank 2 was killed" and said[-1] == (
        "restart 1 of at most 2 in 0 s, from the checkpoint of step 4"
    )


def test_only_restarts_without_a_new_checkpoint_count() -> None:
    moving = [(failure(), step) for step in (2, 4, 4, 6, 6, 8)]
    outcome, made, _ = run([*moving, (Outcome(exit_code=0), 9)])
    assert (outcome.exit_code, made) == (0, 7)
    outcome, made, _ = run([(failure(), None)] * 9)
    assert (outcome.exit_code, made) == (137, 3)
    assert outcome.message is not None and outcome.message.endswith(
        "given up after 2 restarts in a row without a new checkpoint (parallel.restarts.at_most)"
    )


@pytest.mark.parametrize(
    "outcome", [failure(code=2), Outcome(exit_code=143), Outcome(exit_code=0), Outcome(exit_code=1)]
)
def test_mistakes_and_stops_are_not_followed_by_a_start(outcome: Outcome) -> None:
    found, made, said = run([(outcome, 4)])
    assert (found.exit_code, made, said) == (outcome.exit_code, 1, [])


def test_without_restarts_a_failure_is_the_end() -> None:
    none = Restarts(at_most=0, pause_s=1.0, longest_pause_s=1.0)
    assert run([(failure(), 4)], none)[:2] == (failure(), 1)


def test_pauses_grow_to_the_longest() -> None:
    restarts = Restarts(at_most=9, pause_s=5.0, longest_pause_s=60.0)
    assert [restarts.pause_before(n) for n in (1, 2, 3, 4, 5, 1000)] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_stop_in_a_pause_ends_it() -> None:
    class Asks(Lines):
        def line(self, rank: int, text: str, *, is_error: bool) -> None:
            super().line(rank, text, is_error=is_error)
            if text.startswith("restart "):
                timer = signal.setitimer(signal.ITIMER_REAL, 0.05)
                assert timer == (0.0, 0.0)

    before = signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    try:
        forever = Restarts(at_most=1, pause_s=3000.0, longest_pause_s=3000.0)
        outcome = run_with_restarts(lambda failed, say: Start(failure(), lambda: None), Asks(), forever, lambda: None)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert outcome == Outcome(exit_code=143)


def test_what_is_kept_of_a_failure(tmp_path: Path) -> None:
    long = b"x" * 100 + b"\n"
    (tmp_path / "rank-00000.log").write_bytes(b"--- start old\nold\n--- start new\nnew\n")
    (tmp_path / "rank-00002.log").write_bytes(long * 2000 + b"last\n")
    failed = failure().failed
    assert failed is not None
    folder = keep_evidence(tmp_path, failed, run_id="new", checkpoint_step=4)
    assert folder == tmp_path / "failures" / "1"
    assert sorted(path.name for path in folder.iterdir()) == [
        "failure.json",
        "message.txt",
        "rank-00000.log",
        "rank-00002.log",
        "stacks-00001.txt",
    ]
    assert (folder / "rank-00000.log").read_text() == "--- start new\nnew\n"
    tail = (folder / "rank-00002.log").read_bytes()
    assert len(tail) <= TAIL_BYTES and tail.startswith(b"x" * 100 + b"\n") and tail.endswith(b"last\n")
    facts = json.loads((folder / "failure.json").read_text())
    assert (facts["start"], facts["exit_code"], facts["last_step"], facts["checkpoint_step"]) == ("new", 137, 5, 4)
    assert facts["first_failed"] == {
        "rank": 2,
        "pid": 7,
        "step": 5,
        "phase": "step",
        "place": "in step 5",
        "idle_s": 0.5,
        "stopped": False,
        "ending": "was killed by signal 9 (SIGKILL)",
    }
    assert len(facts["ranks"]) == 3
    assert keep_evidence(tmp_path, failed, run_id="new", checkpoint_step=4).name == "2"


def test_evidence_that_cannot_be_kept_is_said_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    outcome, made, said = run([(failure(), 4), (Outcome(exit_code=0), 8)], folder=tmp_path / "logs")
    assert (outcome.exit_code, made) == (0, 2)
    assert f"{tmp_path / 'logs'}: no evidence of the failure is kept: Not a directory" in said


def test_stacks_are_read_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert dump_stacks(views()) == {}
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    assert dump_stacks(views(1)) == {0: "dump --nonblocking --pid 7\n"}


def test_each_failure_is_shown_to_who_asks() -> None:
    told: list[str] = []

    def doctored(started: object, message: str) -> str:
        told.append(message)
        return f"verdict {len(told)}"

    left = [Outcome(exit_code=0), failure(), failure()]
    lines = Lines()
    outcome = run_with_restarts(
        lambda failed, say: Start(left.pop(), lambda: None), lines, NO_PAUSE, lambda: None, doctored
    )
    assert outcome.exit_code == 0 and told == [failure().message] * 2
    assert [line for line in lines.said if line.startswith("verdict")] == ["verdict 1", "verdict 2"]
