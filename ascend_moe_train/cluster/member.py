"""One rank as the launcher sees it: its guard's connection, its pipes, its slot of the board. Pure."""

import contextlib
import os
import signal
import socket
from collections import deque
from pathlib import Path

from ascend_moe_train.cluster.board import Status
from ascend_moe_train.cluster.control import Command, Event, Report, command
from ascend_moe_train.cluster.output import LineCutter
from ascend_moe_train.cluster.verdict import Ending, RankView

LAST_LINES = 60


class Member:
    """What is known of one rank. Times are by the system's monotonic clock."""

    def __init__(self, rank: int, now_s: float) -> None:
        self.rank = rank
        self.connection: socket.socket | None = None
        self.guard_pid: int | None = None
        self.pid: int | None = None
        self.ending: Ending | None = None
        self.status: Status | None = None
        self.streams: dict[int, tuple[LineCutter, bool]] = {}  # by descriptor; whether it is standard error
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)  # of standard error once it has given up
        self.abort: tuple[int, str] | None = None  # its code and line, once this rank told MPI to end all ranks
        self._changed_s = now_s
        self._stopped_since_s: float | None = None
        self._stop_signal: int = signal.SIGSTOP

    @property
    def is_alive(self) -> bool:
        """Whether its process may still run."""
        return self.ending is None and self.connection is not None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal holds it."""
        return self._stopped_since_s is not None

    @property
    def has_failed(self) -> bool:
        """Whether it has said that it gives up."""
        return self.status is not None and self.status.failure is not None

    def observe(self, status: Status | None, now_s: float) -> None:
        """Takes in its slot as it is now."""
        if status != self.status:
            self.status = status
            self._changed_s = now_s

    def take(self, report: Report, now_s: float) -> None:
        """Takes in what its guard reports. Its times are believed unless they lie in the future."""
        at_s = min(report.at_s, now_s)
        self._changed_s = now_s
        match report.event:
            case Event.STARTED:
                self.pid = report.number
            case Event.STOPPED:
                self._stopped_since_s, self._stop_signal = now_s, report.number
            case Event.CONTINUED:
                self._stopped_since_s = None
            case Event.ENDED if os.WIFSIGNALED(report.number):
                self.ending = Ending(at_s=at_s, signal_number=os.WTERMSIG(report.number))
            case Event.ENDED:
                self.ending = Ending(at_s=at_s, code=os.WEXITSTATUS(report.number))

    def lose(self, now_s: float) -> None:
        """Its guard is gone, and the kernel has ended the rank with it."""
        if self.ending is None:
            self.ending = Ending(at_s=now_s)

    def forgive(self, pause_s: float) -> None:
        """Time in which the launcher itself did not run, and all ranks perhaps neither, counts for nothing."""
        self._changed_s += pause_s
        if self._stopped_since_s is not None:
            self._stopped_since_s += pause_s

    def order(self, what: Command, number: int = 0) -> None:
        """Tells its guard to do something."""
        if self.connection is not None:
            command(self.connection, what, number)

    def kill_guard(self) -> None:
        """Ends the guard, and with it the rank: for a guard that obeys no more."""
        if self.guard_pid is not None and self.is_alive and _is_guard(self.guard_pid):
            with contextlib.suppress(OSError):
                os.kill(self.guard_pid, signal.SIGKILL)

    def view(self, now_s: float) -> RankView:
        """The rank as it is now."""
        stopped = self._stopped_since_s
        return RankView(
            rank=self.rank,
            pid=self.pid,
            status=self.status,
            idle_s=now_s - self._changed_s,
            stopped_s=None if stopped is None else now_s - stopped,
            stop_signal=self._stop_signal,
            ending=self.ending,
        )


def _is_guard(pid: int) -> bool:
    """Whether a process is a guard, not another one that has got its id."""
    try:
        return b"ascend_moe_train.cluster.guard" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
