"""The launcher's loop: starts all ranks, watches them, and ends all of them when one fails. Pure."""

import contextlib
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ascend_moe_train.cluster.control import Command
from ascend_moe_train.cluster.evidence import Failed
from ascend_moe_train.cluster.hub import Hub
from ascend_moe_train.cluster.intake import Intake
from ascend_moe_train.cluster.member import Member
from ascend_moe_train.cluster.output import RankLogs, Screen
from ascend_moe_train.cluster.report import failure_report
from ascend_moe_train.cluster.starter import started
from ascend_moe_train.cluster.variables import Starter
from ascend_moe_train.cluster.verdict import (
    EXIT_STALLED,
    PAUSE_S,
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

    def run(self, screen: Screen) -> "Outcome":
        """See `supervise`."""
        return supervise(self, screen)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How it ended: the exit code, and what there is to say when that is not as it should be. `failed` is what is known
    of a failure, as which a stop that was asked for does not count."""

    exit_code: int
    message: str | None = None
    failed: Failed | None = None


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
        intake = Intake(logs, screen)
        stack.callback(logs.close)
        hub = stack.enter_context(Hub(ranks=range(job.ranks), control=job.control, lines=intake))
        found_signals = stack.enter_context(stop_signals())
        starter = stack.enter_context(started(job.command, job.environment, job.starter))
        stack.callback(hub.close)  # guards end before mpiexec or msrun is waited for
        hub.read_lines(starter.output, starter.noise.append, lambda: None)
        outcome = Supervision(job, hub, starter, intake, found_signals).run()
    return with_problems(outcome, intake, logs)


def with_problems(outcome: Outcome, intake: Intake, logs: RankLogs) -> Outcome:
    """With what there is to say of the logs. Raises OSError: nobody reads the output any more."""
    if intake.screen_error is not None:
        raise intake.screen_error
    if logs.problem is None:
        return outcome
    return replace(outcome, message="\n".join(filter(None, [outcome.message, logs.problem])))


class RanksHub(Protocol):
    """All ranks and what comes from them: `Hub` on this machine, `HostsHub` on several."""

    @property
    def members(self) -> Sequence[Member]:
        """By rank."""

    @property
    def has_open_streams(self) -> bool:
        """Whether any rank may still print something."""

    def poll(self, timeout_s: float) -> None:
        """Takes in what has come, or waits for it."""

    def order(self, what: Command, number: int = 0) -> None:
        """Tells all guards to do something."""

    def forgive(self, pause_s: float) -> None:
        """Time in which the launcher itself did not run counts for nothing."""

    def kill_guards(self) -> None:
        """Ends all guards, and with them their ranks."""

    def stacks(self, views: Sequence[RankView]) -> dict[int, str]:
        """What Python is doing on ranks, by rank, of the first that can be read."""

    def is_unsure(self) -> bool:
        """Whether a host may be lost, so that a verdict has to wait."""


class RanksStarter(Protocol):
    """What starts all ranks."""

    def ending(self) -> tuple[str, int] | None:
        """Which program has ended, and its exit code or minus the signal; None while all of it runs."""

    @property
    def last_words(self) -> str:
        """The last line that it said, and below that the lines before; empty if it said nothing."""

    def kill(self) -> None:
        """Ends it by force."""


class Supervised(Protocol):
    """What `Supervision` has to know of a job."""

    @property
    def deadlines(self) -> Deadlines:
        """See Job."""

    @property
    def log_folder(self) -> Path | None:
        """See Job."""


class Supervision:
    """The ranks from their start to their end."""

    def __init__(
        self, job: Supervised, hub: RanksHub, starter: RanksStarter, intake: Intake, stop_signals: list[int]
    ) -> None:
        self._job, self._hub, self._starter, self._intake = job, hub, starter, intake
        self._stop_signals = stop_signals
        self._is_forwarded = False
        self._suspected_s: float | None = None
        self._end: _End | None = None
        self._kill_s = self._last_s = math.inf
        self._ended_s: float | None = None
        self._stacks: dict[int, str] = {}

    def run(self) -> Outcome:
        """Until no rank is left and all that they printed is shown."""
        turn_s = time.monotonic()
        while not self._is_over(turn_s):
            self._hub.poll(TICK_S)
            now_s = time.monotonic()
            if now_s - turn_s > PAUSE_S:
                self._hub.forgive(now_s - turn_s)
            turn_s = now_s
            if self._intake.screen_error is not None and not self._stop_signals:
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
        found = self._starter.ending()
        if found is None or (found[1] >= 0 and all(view.pid is not None for view in views)):
            return None
        name, code = found
        ending = Ending(at_s=now_s, code=code) if code >= 0 else Ending(at_s=now_s, signal_number=-code)
        said = f": {self._starter.last_words}" if self._starter.last_words else ""
        problem = f"error: {name} {ending_words(ending)} before its ranks did{said}"
        return _End(exit_code=ending.exit_code or 1, views=views, problem=problem)

    def _judged(self, views: Sequence[RankView], now_s: float) -> _End | None:
        """The verdict, once what may still change it had its time."""
        verdict = judge(views, self._job.deadlines, now_s, stopping=bool(self._stop_signals))
        if verdict is None:
            self._suspected_s = None
            return None
        self._suspected_s = self._suspected_s or now_s
        if now_s - self._suspected_s < verdict.settle_s or self._hub.is_unsure():
            return None
        return _End(exit_code=verdict.exit_code, views=views, verdict=verdict)

    def _begin_to_end(self, now_s: float) -> None:
        self._intake.mute()
        if self._end is not None and self._end.exit_code == EXIT_STALLED:
            self._hub.order(Command.SIGNAL, signal.SIGUSR1)  # for the logs: what Python is doing on each rank
            self._hub.poll(TICK_S)
            alive = [view for view in self._end.views if view.ending is None and view.pid is not None]
            first = -1 if self._end.verdict is None else self._end.verdict.rank
            self._stacks = self._hub.stacks(sorted(alive, key=lambda view: view.rank != first))
            now_s = time.monotonic()
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
            self._starter.kill()
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
            return self._failure(end, code % 256 or 1, words, ender.rank)
        if end.verdict is None or blamed is None:
            # without a problem it is the stop that was asked for
            return Outcome(exit_code=end.exit_code) if end.problem is None else self._failure(end, 0, end.problem)
        message = failure_report(end.verdict, end.views, blamed.last_lines, self._job.log_folder)
        return self._failure(end, 0, message, blamed.rank)

    def _failure(self, end: _End, exit_code: int, message: str, rank: int | None = None) -> Outcome:
        """That of a rank, with the exit code of the end unless there is another."""
        code = exit_code or end.exit_code
        if self._stop_signals:  # what goes wrong then is the end that was asked for
            return Outcome(exit_code=code, message=message)
        failed = Failed(rank=rank, exit_code=code, message=message, views=end.views, stacks=self._stacks)
        return Outcome(exit_code=code, message=message, failed=failed)


def _was_lost(member: Member | None) -> bool:
    return member is not None and member.ending is not None and member.ending.was_lost


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
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
