"""Connections to the agents of all hosts, each a socket here: over SSH, or of a child process on the own host. Pure.

SSH has its own thread. What is run on a host is always the same words; everything else goes there as data, through the
connection.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from ascend_moe_train.closing import Closing
from ascend_moe_train.cluster.hostfile import Host
from ascend_moe_train.cluster.mpiexec import PACKAGE_ROOT, is_installed, python
from ascend_moe_train.cluster.remote import Limits, RemoteError, session

KEEPALIVE_S = 5.0
LEAVE_S = 3.0  # for an agent to end, once its connection is closed
_PIECE_BYTES = 2**16
_LAST_LINES = 20
# The first line of its input is where the package is, where the interpreter does not find it by itself.
_BOOTSTRAP = (
    "import sys; path = open(0, 'rb', 0, closefd=False).readline().decode().rstrip(chr(10)); "
    "sys.path[:0] = [path] if path else []; "
    "from ascend_moe_train.cluster.agent import main; sys.exit(main())"
)


class Link:
    """A connection to one agent. `errors` are the last lines that it, or what started it, wrote to standard error."""

    def __init__(self, host: Host, near: socket.socket) -> None:
        self.host, self.socket = host, near
        self.errors: deque[str] = deque(maxlen=_LAST_LINES)


class Links(Closing):
    """Agents that are started together. At the end all are told so by the end of their connections, and then ended."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits(keepalive_s=KEEPALIVE_S)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ssh", daemon=True)
        self._thread.start()
        self._links: list[Link] = []
        self._tasks: list[Future[None]] = []
        self._children: list[subprocess.Popen[bytes]] = []

    def open(self, hosts: Sequence[Host]) -> list[Future[Link]]:
        """Starts an agent on each host; a future raises RemoteError for one that cannot be reached."""
        return [self._open_here(host) if is_here(host.address) else self._open_there(host) for host in hosts]

    def close(self) -> None:
        """Ends all connections."""
        for link in self._links:
            link.socket.close()
        for child in self._children:
            with child:
                try:
                    child.wait(LEAVE_S)
                except subprocess.TimeoutExpired:
                    child.kill()
        stopped = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        with contextlib.suppress(TimeoutError):
            stopped.result(2 * LEAVE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LEAVE_S)

    async def _stop(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            return
        _, left = await asyncio.wait(others, timeout=LEAVE_S)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=LEAVE_S / 2)

    def _pair(self, host: Host) -> tuple[Link, socket.socket]:
        near, far = socket.socketpair()
        link = Link(host, near)
        self._links.append(link)
        return link, far

    def _open_here(self, host: Host) -> "Future[Link]":
        link, far = self._pair(host)
        opened: Future[Link] = Future()
        with far:
            child = subprocess.Popen(
                agent_words(), stdin=far.fileno(), stdout=far.fileno(), stderr=subprocess.PIPE, start_new_session=True
            )
        self._children.append(child)
        link.socket.sendall(_first_line())
        threading.Thread(target=_read_errors, args=(child.stderr, link.errors), daemon=True).start()
        opened.set_result(link)
        return opened

    def _open_there(self, host: Host) -> "Future[Link]":
        opened: Future[Link] = Future()
        self._tasks.append(asyncio.run_coroutine_threadsafe(self._serve(host, opened), self._loop))
        return opened

    async def _serve(self, host: Host, opened: "Future[Link]") -> None:
        """One agent over SSH, from its start to the end of its connection."""
        try:
            async with session(host, self._limits) as reached:
                process = await reached.open(agent_words())
                link, far = self._pair(host)
                far.setblocking(False)
                process.stdin.write(_first_line())
                opened.set_result(link)
                with far:
                    await _carry(process, far, link)
        except RemoteError as error:
            if not opened.done():
                opened.set_exception(error)


async def _carry(process: Any, far: socket.socket, link: Link) -> None:
    """Bytes both ways, until the agent's output ends."""
    loop = asyncio.get_running_loop()

    async def there() -> None:
        with contextlib.suppress(OSError):
            while piece := await loop.sock_recv(far, _PIECE_BYTES):
                process.stdin.write(piece)
                await process.stdin.drain()
            process.stdin.write_eof()

    async def errors() -> None:
        async for line in process.stderr:
            link.errors.append(line.decode(errors="replace").rstrip())

    tasks = [asyncio.ensure_future(each()) for each in (there, errors)]
    try:
        while piece := await process.stdout.read(_PIECE_BYTES):
            await loop.sock_sendall(far, piece)
        await asyncio.wait(tasks[1:], timeout=1.0)
    except (OSError, RuntimeError):  # one of the two ends has gone, and the other one sees its end
        return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def agent_words() -> list[str]:
    """What starts an agent: on another host too it is the interpreter of this path."""
    return [*python(), "-c", _BOOTSTRAP]


def is_here(address: str) -> bool:
    """Whether an address is one of this machine, which needs no SSH to itself."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False


def _first_line() -> bytes:
    return b"\n" if is_installed() else f"{PACKAGE_ROOT}\n".encode()


def _read_errors(stream: Any, kept: "deque[str]") -> None:
    with stream:
        for line in stream:
            kept.append(line.decode(errors="replace").rstrip())


def missing_interpreter(errors: Sequence[str]) -> str:
    """The last that an agent which did not begin has said."""
    return errors[-1][:300] if errors else f"no agent answers; it needs {sys.executable} with this package"
