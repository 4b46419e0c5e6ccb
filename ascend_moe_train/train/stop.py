"""SIGTERM, Ctrl-C and a time limit end a run after the step in hand, with a checkpoint. Pure."""

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

BY_CLOCK = signal.SIGALRM  # stands for the end of the time, among the numbers of signals


class TimeLimit:
    """Whether there is time for another step, by a clock that ranks have in common: that of seconds since 1970."""

    def __init__(self, *, end_s: float, reserve_s: float) -> None:
        self._end_s, self._reserve_s = end_s, reserve_s
        self._longest_s = 0.0
        self._asked_s: float | None = None
        self._has_compiled = False

    def is_near(self, now_s: float) -> bool:
        """Asked before each step: whether one that takes as long as the longest until now, with all that came after
        it, would reach into the reserve. The first, with its compilation, does not count."""
        if self._asked_s is not None:
            if self._has_compiled:
                self._longest_s = max(self._longest_s, now_s - self._asked_s)
            self._has_compiled = True
        self._asked_s = now_s
        return now_s + self._longest_s > self._end_s - self._reserve_s


class StopRequest:
    """The first SIGTERM or SIGINT, asked for between steps; a second one acts as if nothing were installed.

    MindSpore's graphs replace whatever handles SIGINT by a handler that sends SIGTERM to the process. So SIGINT is kept
    blocked, and looked for where it waits. Threads inherit that from the one that starts them, and any that does not
    block it would be given it: enter this before NumPy is imported, whose threads are the first.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.limit: TimeLimit | None = None
        self.since_s = time.time()
        self._before: dict[int, Any] = {}
        self._blocked_before: set[int] = set()

    def is_made(self) -> bool:
        """Whether a signal has arrived by now, or time is up; `signal_number` is which, or BY_CLOCK."""
        if self._before and _take_interrupt() and self._before[signal.SIGINT] is not signal.SIG_IGN:
            self._note(signal.SIGINT, None)
        if self.signal_number is None and self.limit is not None and self.limit.is_near(time.time()):
            self.signal_number = BY_CLOCK
        return self.signal_number is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._let_go()

    def _let_go(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before and signal.SIGINT not in self._blocked_before:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._before = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self._blocked_before = set(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}))
        signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            _take_interrupt()  # too late to stop anything
        self._let_go()


def _take_interrupt() -> bool:
    """Removes a waiting SIGINT; whether there was one."""
    if signal.SIGINT not in signal.sigpending():
        return False
    signal.sigwait({signal.SIGINT})
    return True
