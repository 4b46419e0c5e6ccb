"""Which rank failed first: judged from what is seen of all ranks, without any processes. And the reports of it."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ascend_moe_train.cluster.board import Failure, Phase, Status
from ascend_moe_train.cluster.control import Event, Report
from ascend_moe_train.cluster.member import Member
from ascend_moe_train.cluster.output import MAX_LINE_BYTES, LineCutter, NoScreen, RankLogs
from ascend_moe_train.cluster.report import failure_report
from ascend_moe_train.cluster.supervise import Job, supervise
from ascend_moe_train.cluster.verdict import JOIN_S, Deadlines, Ending, RankView, Verdict, judge, rank_list

DEADLINES = Deadlines(compile_s=100.0, step_s=10.0, save_s=50.0)
NOW_S = 1000.0


def view(
    rank: int,
    phase: Phase = "step",
    *,
    verb: str = "",
    group: str = "dp",
    sequence: int = 7,
    idle_s: float = 0.1,
    ending: Ending | None = None,
    failure: Failure | None = None,
    stopped_s: float | None = None,
) -> RankView:
    status = Status(
        pid=100 + rank,
        phase=phase,
        step=3,
        verb=verb,
        group=group if verb else "",
        sequence=sequence,
        entered_s=NOW_S - idle_s,
        updates=5,
        failure=failure,
    )
    return RankView(rank=rank, pid=100 + rank, status=status, idle_s=idle_s, stopped_s=stopped_s, ending=ending)


def waiting(rank: int, idle_s: float = 11.0, **more: object) -> RankView:
    return view(rank, verb="all_reduce", idle_s=idle_s, **more)  # type: ignore[arg-type]  # any of view's


def ended(code: int | None = None, *, by: int | None = None, ago_s: float = 0.1) -> Ending:
    return Ending(at_s=NOW_S - ago_s, code=code, signal_number=by)


def gave_up(line: str, *, mistake: bool = False, ago_s: float = 0.2) -> Failure:
    return Failure(line=line, is_user_error=mistake, at_s=NOW_S - ago_s)


def verdict(*views: RankView, stopping: bool = False) -> Verdict | None:
    return judge(views, DEADLINES, NOW_S, stopping=stopping)


def named(*views: RankView, stopping: bool = False) -> tuple[int, int, str]:
    found = verdict(*views, stopping=stopping)
    assert found is not None
    return found.rank, found.exit_code, found.text


@pytest.mark.parametrize(
    "views",
    [
        [view(0), view(1)],
        [view(0, idle_s=5000.0)],  # one rank is as slow as it likes
        [view(0, idle_s=5000.0), view(1)],  # nobody waits for it
        [view(0, idle_s=60.0), waiting(1, 9.0)],  # it was slow, but is waited for only now
        [view(0, "compile", idle_s=99.0), waiting(1, 99.0)],
        [view(0, "saving", idle_s=49.0), waiting(1, 49.0)],
        [view(0, idle_s=9.0), waiting(1, 300.0)],  # busy with many short things
        [waiting(0, 9.0), waiting(1, 300.0)],  # the last has just come
        [waiting(0, 9.0), view(1, "done", idle_s=20.0, ending=ended(0))],
        [view(0, "done", ending=ended(0)), view(1, "saving", idle_s=500.0)],
        [view(0, "done", ending=ended(143)), view(1, "done", ending=ended(143))],
        [view(0, "done", ending=ended(0, ago_s=50.0)), view(1)],
        [view(0, ending=ended(0)), view(1)],  # the others may follow
        [view(0, ending=ended(0, ago_s=50.0)), view(1, ending=ended(0))],  # programs that say nothing
        [view(0, stopped_s=4.0), waiting(1, 4.0)],
        [view(0, failure=gave_up("x")), view(1)],  # it is about to end, and how it ends says more
    ],
)
def test_nothing_is_wrong(views: list[RankView]) -> None:
    assert verdict(*views) is None


def test_the_first_to_fail_is_named() -> None:
    first = view(2, ending=ended(by=9, ago_s=3.0))
    assert named(waiting(0), view(1, ending=ended(1)), first) == (2, 137, "was killed by signal 9 (SIGKILL) in step 3")
    early = view(1, ending=ended(1), failure=gave_up("ValueError: x", ago_s=4.0))
    assert named(waiting(0), early, first) == (1, 1, "failed in step 3: ValueError: x")


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        (ended(3), 3, "ended with exit code 3 in step 3"),
        (ended(by=11), 139, "was killed by signal 11 (SIGSEGV) in step 3"),
        (ended(by=64), 192, "was killed by signal 64 (SIGRTMAX) in step 3"),
        (ended(), 1, "was lost, with the process that watched over it, in step 3"),
        (ended(0, ago_s=2.0), 1, "ended with exit code 0 in step 3, and not all ranks are done"),
        (ended(143, ago_s=2.0), 143, "ended with exit code 143 in step 3, and not all ranks are done"),
    ],
)
def test_how_a_process_ended(ending: Ending, code: int, words: str) -> None:
    assert named(waiting(0, 0.1), view(1, ending=ending)) == (1, code, words)


@pytest.mark.parametrize(
    ("phase", "verb", "words"),
    [
        ("starting", "", "while starting"),
        ("compile", "", "while compiling"),
        ("step", "all_to_all", "in step 3, in all_to_all over dp (collective 7)"),
        ("evaluating", "", "in the validation after step 3"),
        ("saving", "barrier", "while saving step 3, in barrier over dp (collective 7)"),
        ("done", "", "after its last step 3"),
    ],
)
def test_where_a_rank_was(phase: Phase, verb: str, words: str) -> None:
    assert named(view(0, phase, verb=verb, ending=ended(by=9)))[2] == f"was killed by signal 9 (SIGKILL) {words}"


def test_a_rank_that_gave_up_and_does_not_end_has_failed() -> None:
    assert named(view(0, failure=gave_up("OSError: x", ago_s=5.0)), waiting(1)) == (
        0,
        1,
        "failed in step 3: OSError: x",
    )
    assert named(view(0, failure=gave_up("x", mistake=True, ago_s=5.0)), waiting(1)) == (0, 2, "in step 3: x")


def test_a_mistake_that_all_ranks_meet_is_said_once() -> None:
    both = [view(rank, "starting", ending=ended(2), failure=gave_up("run.yaml: bad", mistake=True)) for rank in (0, 1)]
    found = verdict(*both)
    assert found is not None and found.everybody and found.settle_s == 0
    assert (found.text, found.exit_code) == ("run.yaml: bad", 2)
    some = verdict(both[0], view(1, "starting"))
    assert some is not None and not some.everybody and some.settle_s > 1
    assert some.text == "while starting: run.yaml: bad"
    other = verdict(both[0], view(1, ending=ended(2), failure=gave_up("disk full", mistake=True, ago_s=0.1)))
    assert other is not None and (other.rank, other.everybody) == (0, False)


def test_a_rank_that_quotes_the_error_of_another_is_not_the_first() -> None:
    quoting = view(0, "saving", ending=ended(2), failure=gave_up("writer 1 of 2: disk full", mistake=True))
    origin = view(1, "saving", ending=ended(2), failure=gave_up("disk full", mistake=True, ago_s=0.1))
    assert named(quoting, origin) == (1, 2, "while saving step 3: disk full")


def test_an_end_that_was_asked_for_is_no_failure() -> None:
    killed = view(0, ending=ended(by=signal.SIGTERM, ago_s=9.0))
    assert verdict(killed, view(1), stopping=True) is None
    assert named(killed, view(1))[1] == 143
    assert named(view(0, ending=ended(by=9)), view(1), stopping=True)[1] == 137


def test_a_stopped_rank() -> None:
    words = "was stopped by SIGSTOP in step 3, and did not go on for 6 s"
    assert named(view(0, stopped_s=6.0), waiting(1, 6.0)) == (0, 124, words)
    assert named(view(0, stopped_s=6.0)) == (0, 124, words)


@pytest.mark.parametrize(
    ("phase", "key", "limit_s"), [("compile", "compile_s", 100.0), ("step", "step_s", 10.0), ("saving", "save_s", 50.0)]
)
def test_a_rank_that_others_wait_for_has_the_deadline_of_its_phase(phase: Phase, key: str, limit_s: float) -> None:
    late = view(1, phase, idle_s=limit_s + 2)
    rank, code, text = named(waiting(0, limit_s + 1), late, waiting(2, limit_s + 1))
    assert (rank, code) == (1, 124)
    assert text.startswith(f"made no progress for {limit_s + 2:.0f} s ")
    assert "ranks 0, 2 wait in all_reduce over dp (collective 7)" in text
    assert text.endswith(f"(parallel.deadlines.{key} is {limit_s:g})")


def test_the_rank_in_another_collective_is_named() -> None:
    odd = view(1, verb="all_to_all", group="ep", sequence=6, idle_s=12.0)
    rank, code, text = named(waiting(0), odd, waiting(2))
    assert (rank, code) == (1, 124)
    assert "in all_to_all over ep (collective 6): ranks 0, 2 wait in all_reduce over dp (collective 7)" in text


def test_when_nobody_gets_out_of_a_collective_the_last_to_come_is_named() -> None:
    rank, _, text = named(waiting(0, 30.0), waiting(1, 11.0), waiting(2, 20.0))
    assert rank == 1 and "no rank gets out of it" in text


def test_the_rank_that_was_done_too_early_is_named() -> None:
    assert named(waiting(0), view(1, "done", idle_s=11.0))[:2] == (1, 124)
    assert named(waiting(0), view(1, "done", ending=ended(0, ago_s=11.0)))[:2] == (1, 124)


def test_several_ranks_of_which_none_moves_or_waits() -> None:
    assert named(view(0, idle_s=11.0), view(1, idle_s=12.0))[:2] == (1, 124)
    assert verdict(view(0, idle_s=9.0), view(1, idle_s=12.0)) is None
    assert verdict(view(0, "saving", idle_s=40.0), view(1, idle_s=12.0)) is None


def test_a_start_and_an_end_have_deadlines_too() -> None:
    absent = RankView(rank=1, pid=None, status=None, idle_s=min(JOIN_S, DEADLINES.compile_s) + 1)
    assert named(waiting(0, 0.1), absent)[:2] == (1, 124)
    assert named(view(0, "starting", idle_s=101.0)) == (
        0,
        124,
        "made no progress for 101 s while starting (parallel.deadlines.compile_s is 100)",
    )
    assert named(view(0, "done", idle_s=11.0))[2].startswith(
        "made no progress for 11 s after its last step 3: its work is done, and its process does not end"
    )


def test_lists_of_ranks() -> None:
    assert rank_list([view(3)]) == "rank 3"
    assert rank_list([view(rank) for rank in range(20)]) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."


def test_a_report_shows_where_all_were(tmp_path: Path) -> None:
    views = [waiting(0), replace(view(1, "compile"), pid=None), view(2, ending=ended(by=9)), view(3, stopped_s=2.0)]
    lines = failure_report(Verdict(rank=2, text="x", exit_code=1), views, ["its last words"], tmp_path).splitlines()
    assert lines == [
        "error: rank 2 x",
        "  (who sent that is not known: where memory is short, the system does; dmesg tells)",
        "  rank  pid    idle",
        "     0  100  11.0 s  in step 3, in all_reduce over dp (collective 7)",
        "     1    -   0.1 s  while compiling",
        "     2  102   0.1 s  was killed by signal 9 (SIGKILL) in step 3",
        "     3  103   0.1 s  stopped in step 3",
        "[rank 2] its last words",
        f"what each rank printed: {tmp_path}",
    ]


@pytest.mark.parametrize("rank", [0, 3, 50, 99])
def test_a_report_of_many_ranks_shows_those_around_the_first(rank: int) -> None:
    report = failure_report(Verdict(rank=rank, text="x", exit_code=1), [view(n) for n in range(100)], [], None)
    lines = report.splitlines()
    assert len(lines) == 1 + 1 + 32 + 1 and lines[-1] == "  and 68 more ranks"
    assert any(line.split()[0] == str(rank) for line in lines[2:-1])


def test_a_member_counts_from_its_last_sign_of_life() -> None:
    member = Member(0, NOW_S)
    assert member.view(NOW_S + 5).idle_s == 5
    member.observe(view(0).status, NOW_S + 6)
    member.observe(view(0).status, NOW_S + 8)
    assert member.view(NOW_S + 9).idle_s == 3
    member.take(Report(event=Event.STOPPED, number=signal.SIGTSTP, at_s=NOW_S), NOW_S + 10)
    member.forgive(100.0)
    held = member.view(NOW_S + 111)
    assert (held.idle_s, held.stopped_s, held.stop_signal) == (1, 1, signal.SIGTSTP)
    member.take(Report(event=Event.CONTINUED, number=0, at_s=NOW_S), NOW_S + 112)
    assert member.view(NOW_S + 112).stopped_s is None
    # wait(2): the low byte is the signal, the next one the exit code; a time in the future is not believed
    member.take(Report(event=Event.ENDED, number=3 << 8, at_s=NOW_S + 9999), NOW_S + 113)
    assert member.ending == Ending(at_s=NOW_S + 113, code=3)


def test_lines_are_cut_and_cannot_steer_a_terminal() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"one\ntw") == ["one"]
    assert cutter.feed(b"o\r\n\n 10%\r 20%\n\x1b[31mred\x1b[0m\x07 \xff\tend\n") == [
        "two",
        "",
        " 20%",
        "red \N{REPLACEMENT CHARACTER}\tend",
    ]
    assert cutter.feed(b"\xc3") == [] and cutter.feed(b"\xbc") == [] and cutter.finish() == ["ü"]
    assert cutter.finish() == []


def test_a_line_without_end_is_cut() -> None:
    cutter = LineCutter()
    pieces = [line for _ in range(200) for line in cutter.feed(b"x" * 65536)] + cutter.finish()
    assert sum(map(len, pieces)) == 200 * 65536 and max(map(len, pieces)) <= MAX_LINE_BYTES + 65536


def test_logs_that_cannot_be_written_are_said_once(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file in the place of the folder")
    logs = RankLogs(tmp_path / "logs", "run")
    logs.line(0, "x")
    logs.line(1, "x")
    logs.close()
    assert logs.problem == f"{tmp_path / 'logs'}: what ranks print is not kept: File exists"


def test_an_mpiexec_that_starts_nothing_is_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    job = Job(
        ranks=2,
        starter="mpiexec",
        command=[sys.executable, "-c", "import sys; print('I try'); print('no such host'); sys.exit(3)"],
        environment={},
        deadlines=DEADLINES,
        control=f"ascend-moe-train-test-{time.monotonic_ns()}",
        run_id="x",
        log_folder=None,
    )
    outcome = supervise(job, NoScreen())
    assert outcome.exit_code == 3
    assert outcome.message == "error: mpiexec ended with exit code 3 before its ranks did: no such host\nI try"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_guard_without_a_launcher_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "ascend_moe_train.cluster.guard", "true"]
    for environment in ({}, {"PMI_RANK": "0", "AMT_CONTROL": "nobody"}, {"PMI_RANK": "x"}):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=20)
        assert (done.returncode, done.stdout) == (125, "")
        assert done.stderr.startswith("error: a rank is started by 'amt launch', and there is none: ")
        assert done.stderr.count("\n") == 1
