"""SIGTERM and Ctrl-C end a run after the step in hand, with a checkpoint. Pure."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """The first SIGTERM or SIGINT, asked for between steps; a second one acts as if nothing were installed.

    MindSpore's graphs replace whatever handles SIGINT by a handler that sends SIGTERM to the process. So SIGINT is kept
    blocked, and looked for where it waits. Threads inherit that from the one that starts them, and any that does not
    block it would be given it: enter this before NumPy is imported, whose threads are the first.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._before: dict[int, Any] = {}
        self._blocked_before: set[int] = set()

    def is_made(self) -> bool:
        """Whether a signal has arrived by now; `signal_number` is which."""
        if self._before and _take_interrupt() and self._before[signal.SIGINT] is not signal.SIG_IGN:
            self._note(signal.SIGINT, None)
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
