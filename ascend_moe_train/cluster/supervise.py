"""The launcher's loop: starts all ranks, watches them, and ends all of them when one fails. Pure."""

import contextlib
import math
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ascend_moe_train.cluster.control import Command
from ascend_moe_train.cluster.hub import Hub
from ascend_moe_train.cluster.member import Member
from ascend_moe_train.cluster.mpiexec import python
from ascend_moe_train.cluster.output import RankLogs, Screen
from ascend_moe_train.cluster.report import failure_report
from ascend_moe_train.cluster.variables import Starter
from ascend_moe_train.cluster.verdict import (
    EXIT_STALLED,
    Deadlines,
    Ending,
    RankView,
    Verdict,
    ending_words,
    judge,
    place,
)

TICK_S = 0.1
GRACE_S = 0.5  # from SIGTERM to SIGKILL
LAST_GRACE_S = 3.0  # from there until guards that do not obey are killed
STOP_GRACE_S = 5.0  # for the others once a rank has ended at SIGTERM without saving, which they then cannot either
DRAIN_S = 1.0  # for what dead ranks have printed
LEAVE_S = 3.0  # for mpiexec or msrun to end
PAUSE_S = 2.0  # a turn of the loop that takes longer was stopped itself


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run. `command` starts all ranks below guards, `control` names the socket that they look for."""

    ranks: int
    starter: Starter
    command: Sequence[str]
    environment: Mapping[str, str]
    deadlines: Deadlines
    control: str
    run_id: str
    log_folder: Path | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How it ended: the exit code, and what there is to say when that is not as it should be."""

    exit_code: int
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class _End:
    """Why all ranks are being ended, and where they were. Without a verdict there may be a `problem`."""

    exit_code: int
    views: Sequence[RankView]
    verdict: Verdict | None = None
    problem: str | None = None


def supervise(job: Job, screen: Screen) -> Outcome:
    """Runs the job to its end, on the main thread. Whatever happens, and to whom, no process is left.

    Raises OSError: nothing can be started, or nobody reads the output any more.
    """
    logs = RankLogs(job.log_folder, job.run_id)
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(Hub(ranks=job.ranks, control=job.control, logs=logs, screen=screen))
        stop_signals = stack.enter_context(_stop_signals())
        process = stack.enter_context(_started(job))
        stack.callback(hub.close)  # guards end before mpiexec or msrun is waited for
        outcome = _Supervision(job, hub, process, stop_signals).run()
    if hub.screen_error is not None:
        raise hub.screen_error
    if logs.problem is None:
        return outcome
    return Outcome(exit_code=outcome.exit_code, message="\n".join(filter(None, [outcome.message, logs.problem])))


class _Supervision:
    """The ranks from their start to their end."""

    def __init__(self, job: Job, hub: Hub, process: subprocess.Popen[bytes], stop_signals: list[int]) -> None:
        self._job, self._hub, self._process, self._stop_signals = job, hub, process, stop_signals
        self._noise: deque[str] = deque(maxlen=20)  # what mpiexec or msrun itself says
        self._is_forwarded = False
        self._suspected_s: float | None = None
        self._end: _End | None = None
        self._kill_s = self._last_s = math.inf
        self._ended_s: float | None = None

    def run(self) -> Outcome:
        """Until no rank is left and all that they printed is shown."""
        assert self._process.stdout is not None
        self._hub.read_lines(self._process.stdout.fileno(), self._noise.append, lambda: None)
        turn_s = time.monotonic()
        while not self._is_over(turn_s):
            self._hub.poll(TICK_S)
            now_s = time.monotonic()
            if now_s - turn_s > PAUSE_S:
                self._hub.forgive(now_s - turn_s)
            turn_s = now_s
            if self._hub.screen_error is not None and not self._stop_signals:
                self._stop_signals.append(signal.SIGTERM)  # nobody looks any more: as `amt train` does then
            if self._end is None:
                self._end = self._found_end(now_s)
                if self._end is not None:
                    self._begin_to_end(now_s)
            self._insist(now_s)
        return self._outcome()

    def _found_end(self, now_s: float) -> _End | None:
        """A reason to end all ranks, if there is one by now."""
        views = [member.view(now_s) for member in self._hub.members]
        return self._asked(views, now_s) or self._without_starter(views, now_s) or self._judged(views, now_s)

    def _asked(self, views: Sequence[RankView], now_s: float) -> _End | None:
        """Forwards the first signal that asks for a stop; the second ends all, as does one before all have started."""
        if not self._stop_signals:
            return None
        end = _End(exit_code=128 + self._stop_signals[0], views=views)
        if len(self._stop_signals) > 1 or any(view.pid is None for view in views):
            return end
        if not self._is_forwarded:
            self._is_forwarded = True
            self._hub.order(Command.SIGNAL, signal.SIGTERM)
        unsaved = [view.ending.at_s for view in views if view.ending is not None and not view.is_finished]
        return end if unsaved and now_s - min(unsaved) > STOP_GRACE_S else None

    def _without_starter(self, views: Sequence[RankView], now_s: float) -> _End | None:
        """It outlives the guards, and so all ranks, unless something is wrong with it.

        When a guard has been killed or MPI was told to end everything, it ends by itself, and the ranks tell more.
        """
        code = self._process.poll()
        if code is None or (code >= 0 and all(view.pid is not None for view in views)):
            return None
        ending = Ending(at_s=now_s, code=code) if code >= 0 else Ending(at_s=now_s, signal_number=-code)
        said = f": {self._noise[-1]}" if self._noise else ""
        problem = f"error: {self._job.starter} {ending_words(ending)} before its ranks did{said}"
        return _End(exit_code=ending.exit_code or 1, views=views, problem=problem)

    def _judged(self, views: Sequence[RankView], now_s: float) -> _End | None:
        """The verdict, once what may still change it had its time."""
        verdict = judge(views, self._job.deadlines, now_s, stopping=bool(self._stop_signals))
        if verdict is None:
            self._suspected_s = None
            return None
        self._suspected_s = self._suspected_s or now_s
        if now_s - self._suspected_s < verdict.settle_s:
            return None
        return _End(exit_code=verdict.exit_code, views=views, verdict=verdict)

    def _begin_to_end(self, now_s: float) -> None:
        self._hub.mute()
        if self._end is not None and self._end.exit_code == EXIT_STALLED:
            self._hub.order(Command.SIGNAL, signal.SIGUSR1)  # for the logs: what Python is doing on each rank
            self._hub.poll(TICK_S)
        self._hub.order(Command.SIGNAL, signal.SIGTERM)
        self._kill_s = now_s if len(self._stop_signals) > 1 else now_s + GRACE_S
        self._last_s = self._kill_s + LAST_GRACE_S

    def _insist(self, now_s: float) -> None:
        """Ends by force what did not end when it was told to."""
        if len(self._stop_signals) > 1:
            self._kill_s = min(self._kill_s, now_s)
        if now_s >= self._kill_s:
            self._hub.order(Command.KILL)
            self._kill_s = math.inf
        if now_s >= self._last_s:
            self._hub.kill_guards()
            self._process.kill()
            self._last_s = math.inf

    def _is_over(self, now_s: float) -> bool:
        """Whether all ranks have ended, and all that they printed has come."""
        members = self._hub.members
        decided = self._end is not None or (self._suspected_s is None and all(member.ending for member in members))
        if not decided or any(member.is_alive for member in members):
            return False
        self._ended_s = self._ended_s or now_s
        return not self._hub.has_open_streams or now_s - self._ended_s > DRAIN_S

    def _outcome(self) -> Outcome:
        end, members = self._end, self._hub.members
        if end is None:
            code = max(member.ending.exit_code for member in members if member.ending is not None)
            return Outcome(exit_code=128 + self._stop_signals[0] if code and self._stop_signals else code)
        blamed = None if end.verdict is None else members[end.verdict.rank]
        # MPI prints who told it to end all ranks, and mpiexec kills them at once: the first to go says nothing
        ender = next((member for member in members if member.abort is not None), None)
        if ender is not None and ender.abort is not None and (blamed in (None, ender) or _was_lost(blamed)):
            code, line = ender.abort
            words = f"error: rank {ender.rank} ended MPI {place(end.views[ender.rank])}: {line}"
            return Outcome(exit_code=code % 256 or 1, message=words)
        if end.verdict is None or blamed is None:
            return Outcome(exit_code=end.exit_code, message=end.problem)
        message = failure_report(end.verdict, end.views, blamed.last_lines, self._job.log_folder)
        return Outcome(exit_code=end.exit_code, message=message)


def _was_lost(member: Member | None) -> bool:
    return member is not None and member.ending is not None and member.ending.was_lost


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The signals that ask for a stop, as they come. Ignored ones stay so: Ctrl-C in the background of a shell."""
    found: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    installed = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in installed:
        signal.signal(number, lambda caught, frame: found.append(caught))
    try:
        yield found
    finally:
        for number, handler in installed.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _started(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """The process that starts the ranks, in a session of its own, where no Ctrl-C reaches it; ended at the end."""
    process = subprocess.Popen(
        [*python(), "-m", "ascend_moe_train.cluster.tether", str(os.getpid()), *job.command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(job.environment),
        start_new_session=True,
        bufsize=0,
    )
    with process:
        try:
            yield process
        finally:
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
