"""The parent of one rank: starts it with the launcher's pipes, tells how it fares, ends when the launcher does. Pure.

`mpiexec -n N python -m ascend_moe_train.cluster.guard COMMAND...` runs one guard per rank, and each of them COMMAND; so
does msrun, which runs it once more as the scheduler.
What mpiexec and MPI do when a rank dies differs and says little; a parent knows how its child ended, at once.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ascend_moe_train.cluster import variables
from ascend_moe_train.cluster.control import (
    Command,
    Event,
    abstract_address,
    is_own,
    new_socket,
    received_command,
    report,
)
from ascend_moe_train.cluster.cores import num_cores, own_cores, side_by_side
from ascend_moe_train.cluster.tether import die_with_parent

NUM_PASSED = 3  # descriptors that the launcher passes: standard output, standard error, the board
_RANK_BY_STARTER: Mapping[str, str] = {"mpiexec": "PMI_RANK", "msrun": "RANK_ID"}
_MPI_CONNECTION = "PMI_FD"
_ROLE, _SCHEDULER_ROLE = "MS_ROLE", "MS_SCHED"
_SCHEDULER = "ascend_moe_train.parallel.scheduler"
_EXIT_NO_LAUNCHER = 125
_EXIT_NO_COMMAND = 127


class Guard:
    """One rank's process and the connection to the launcher."""

    def __init__(self, connection: socket.socket, child: int) -> None:
        self._connection, self._child = connection, child
        self._alive = True

    def watch(self) -> None:
        """Reports what becomes of the rank and obeys the launcher, until it says so or goes away."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._pass_on)
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        self._report_changes()
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 512)
                self._report_changes()
            if self._connection in ready and not self._obey():
                return

    def _pass_on(self, number: int, frame: object) -> None:
        self._signal(number)

    def _signal(self, number: int) -> None:
        # it has not been waited for, so that its id is still its own
        if self._alive:
            with contextlib.suppress(OSError):
                os.kill(self._child, number)

    def _kill(self) -> None:
        if self._alive:
            with contextlib.suppress(OSError):
                os.killpg(self._child, signal.SIGKILL)

    def _obey(self) -> bool:
        """Does what the launcher says; whether to go on."""
        try:
            packet = self._connection.recv(64)
        except OSError:
            packet = b""
        found = received_command(packet)
        if found is None:  # the launcher has gone
            self._kill()
            return False
        match found:
            case Command.SIGNAL, number if number in signal.valid_signals():
                self._signal(number)
            case Command.KILL, _:
                self._kill()
            case Command.LEAVE, _:
                self._kill()
                return False
        return True

    def _report_changes(self) -> None:
        """Reports what the kernel has noted of the rank since the last call."""
        if not self._alive:
            return
        halts = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        with contextlib.suppress(ChildProcessError):  # it has ended, and cannot have stopped or gone on
            while (found := os.waitid(os.P_PID, self._child, halts)) is not None:
                stopped = found.si_code != os.CLD_CONTINUED
                event = Event.STOPPED if stopped else Event.CONTINUED
                report(self._connection, event, found.si_status if stopped else 0, time.monotonic())
        if os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            at_s = time.monotonic()
            self._kill()  # what it has started and left behind: its id is taken until the next line
            self._alive = False
            report(self._connection, Event.ENDED, os.waitpid(self._child, 0)[1], at_s)


def start_rank(command: Sequence[str], environment: Mapping[str, str], passed: Sequence[int]) -> int:
    """Starts the rank in a process group of its own; its id. `passed` is what the launcher passed."""
    guard = os.getpid()
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        return child
    try:
        os.setpgid(0, 0)
        die_with_parent(guard)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and a new program would inherit that
            signal.signal(number, signal.SIG_DFL)
        output, errors, board = passed
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        with contextlib.suppress(OSError):  # cores were taken away meanwhile: then it has those that are left
            os.sched_setaffinity(0, own_cores(environment, side_by_side(list(os.sched_getaffinity(0)))))
        _keep_only({board, int(environment.get(_MPI_CONNECTION, board))})
        os.execve(command[0], list(command), environment)
    except OSError as error:
        os.write(2, f"error: {command[0]}: {error.strerror}\n".encode())
    os._exit(_EXIT_NO_COMMAND)


def _keep_only(kept: set[int]) -> None:
    """What a new program inherits besides the standard streams; mpiexec leaks the pipes of all ranks into each."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if (descriptor := int(entry.name)) > 2:
            with contextlib.suppress(OSError):  # that of the listing itself is closed by now
                os.set_inheritable(descriptor, descriptor in kept)


def connect(name: str, rank: int) -> tuple[socket.socket, list[int]]:
    """The connection to the launcher and the descriptors that it passes. Raises OSError: there is no such launcher."""
    connection = new_socket()
    connection.connect(abstract_address(name))
    if not is_own(connection):
        raise PermissionError("the launcher belongs to another user")
    report(connection, Event.HELLO, rank, time.monotonic())
    _, passed, _, _ = socket.recv_fds(connection, 64, NUM_PASSED)
    if len(passed) != NUM_PASSED:
        raise ConnectionError("the launcher passed nothing")
    return connection, passed


def main(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the rank that mpiexec's or msrun's variables name, and returns when the launcher says so."""
    die_with_parent(os.getppid())
    if environment.get(_ROLE) == _SCHEDULER_ROLE:
        os.execve(sys.executable, [sys.executable, "-P", "-m", _SCHEDULER], environment)
    try:
        rank = int(environment[_RANK_BY_STARTER[environment[variables.STARTER]]])
        connection, passed = connect(environment[variables.CONTROL], rank)
    except (KeyError, ValueError, OSError) as error:
        print(f"error: a rank is started by 'amt launch', and there is none: {error}", file=sys.stderr)
        return _EXIT_NO_LAUNCHER
    board = f"/proc/self/fd/{passed[2]}"
    own = {variables.RANK: str(rank), variables.BOARD: board, variables.CORES: str(num_cores())}
    child = start_rank(command, {**environment, **own}, passed)
    for descriptor in passed:
        os.close(descriptor)
    report(connection, Event.STARTED, child, time.monotonic())
    Guard(connection, child).watch()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
