"""Commands on other hosts, over SSH, as the user's own ssh would reach them: his agent and keys, his configuration, and
his known_hosts, which decides alone. Pure.

A host key that is not known, or another one, ends the connection; nothing is asked, accepted or written. A command is a
list of words, which is quoted here and nowhere else. Every wait has an end and every output a size.
"""

import asyncio
import contextlib
import re
import resource
import shlex
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import asyncssh

from ascend_moe_train.cluster.hostfile import Host
from ascend_moe_train.errors import UserError

GLOBAL_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")
_SSH_PORT = 22
_CHUNK_BYTES = 65_536
_FILES_PER_SESSION = 4  # its socket, the agent's, those of keys while they are read
_FILES_KEPT = 128  # for everything else of this process
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

T = TypeVar("T")
Reason = Literal[
    "unresolved",
    "refused",
    "unreachable",
    "silent",
    "unknown key",
    "changed key",
    "unchecked key",
    "denied",
    "broken",
    "no python",
]


class RemoteError(UserError):
    """A host that cannot be used: which, for what reason, and what was said of it."""

    def __init__(self, host: Host, reason: Reason, detail: str) -> None:
        super().__init__(f"host {host.name}: {detail}")
        self.host, self.reason, self.detail = host, reason, detail


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`sessions` are open at once, or fewer where this process may not open so many files. A host that says nothing is
    asked every `keepalive_s` whether it is there, and lost after the third time without an answer; None leaves that to
    ssh's configuration."""

    sessions: int = 64
    connect_s: float = 10.0
    keepalive_s: float | None = None

    @property
    def sessions_now(self) -> int:
        """How many sessions this process can have."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            return self.sessions
        return max(1, min(self.sessions, (files - _FILES_KEPT) // _FILES_PER_SESSION))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command gave: its output, which may hold anything, and its exit code, None if a signal ended it."""

    stdout: bytes
    stderr: bytes
    exit_code: int | None
    started_s: float  # of time.time() here, before it was sent
    took_s: float


class Session:
    """A connection to one host."""

    def __init__(self, host: Host, connection: asyncssh.SSHClientConnection) -> None:
        self.host = host
        self.connection = connection

    async def open(self, words: Sequence[str]) -> asyncssh.SSHClientProcess[bytes]:
        """Starts a command, whose output is read as it comes. Raises RemoteError: the host does not let it."""
        try:
            return await self.connection.create_process(quoted(words), encoding=None)
        except (asyncssh.Error, OSError) as error:
            raise RemoteError(self.host, "broken", f"cannot run {words[0]}: {_said(error)}") from error

    async def run(
        self, words: Sequence[str], *, timeout_s: float, most_bytes: int = _CHUNK_BYTES, given: bytes = b""
    ) -> Answer:
        """Runs a command to its end with `given` as its input.

        Raises RemoteError: it takes longer than `timeout_s`, says more than `most_bytes`, or the connection ends. The
        process is then told to end, as far as the host passes that on.
        """
        started_s, start_s = time.time(), time.monotonic()
        process: asyncssh.SSHClientProcess[bytes] | None = None
        try:
            async with asyncio.timeout(timeout_s):
                process = await self.open(words)
                process.stdin.write(given)
                process.stdin.write_eof()
                stdout, stderr = await asyncio.gather(
                    self._bounded(process.stdout, most_bytes), self._bounded(process.stderr, most_bytes)
                )
                ended = await process.wait()
        except TimeoutError:
            raise RemoteError(self.host, "silent", f"{words[0]} did not end within {timeout_s:g} s") from None
        except (asyncssh.Error, OSError) as error:
            raise RemoteError(self.host, "broken", f"{words[0]}: {_said(error)}") from error
        finally:
            if process is not None and process.returncode is None:
                with contextlib.suppress(OSError, asyncssh.Error):
                    process.kill()
                process.close()
        took_s = time.monotonic() - start_s
        return Answer(stdout=stdout, stderr=stderr, exit_code=ended.exit_status, started_s=started_s, took_s=took_s)

    async def _bounded(self, stream: asyncssh.SSHReader[bytes], most_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while part := await stream.read(_CHUNK_BYTES):
            size += len(part)
            if size > most_bytes:
                raise RemoteError(self.host, "broken", f"said more than {most_bytes:,} bytes")
            parts.append(part)
        return b"".join(parts)


def quoted(words: Sequence[str]) -> str:
    """The one string that ssh sends, in which a shell of the host finds exactly these words.

    Raises ValueError: there are none, or one has control characters, on which shells differ.
    """
    if not words or any(_CONTROL.search(word) for word in words):
        raise ValueError(f"not the words of a command: {words!r}")
    return shlex.join(words)


@contextlib.asynccontextmanager
async def session(host: Host, limits: Limits | None = None) -> AsyncIterator[Session]:
    """A connection, closed at the end. Raises RemoteError: there is none."""
    connection = await _connect(host, limits or Limits())
    try:
        yield Session(host, connection)
    finally:
        connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await connection.wait_closed()
        connection.abort()


async def on_each(
    hosts: Iterable[Host], work: Callable[[Session], Awaitable[T]], limits: Limits | None = None
) -> list[T | RemoteError]:
    """What `work` gives on each host, or why it could not, in the order of the hosts."""
    own_limits = limits or Limits()
    slots = asyncio.Semaphore(own_limits.sessions_now)

    async def one(host: Host) -> T | RemoteError:
        async with slots:
            try:
                async with session(host, own_limits) as opened:
                    return await work(opened)
            except RemoteError as error:
                return error

    return list(await asyncio.gather(*map(one, hosts)))


async def _connect(host: Host, limits: Limits) -> asyncssh.SSHClientConnection:
    chosen = _chosen(host, limits)
    try:
        options = asyncssh.SSHClientConnectionOptions(**chosen, client_keys=None)  # to see what the configuration says
        if options.known_hosts is None:
            detail = "UserKnownHostsFile none in the configuration of ssh would leave its key unchecked: remove it"
            raise RemoteError(host, "unchecked key", detail)
        files = _files(options.known_hosts)
        chosen["encryption_algs"] = _quickest_first(options.encryption_algs)
        known_hosts = _known_hosts(tuple((str(file), file.stat().st_mtime_ns) for file in files))
    except (asyncssh.Error, OSError, ValueError) as error:
        raise RemoteError(host, "broken", f"the configuration of ssh cannot be used: {_said(error)}") from error
    try:
        async with asyncio.timeout(limits.connect_s):
            return await asyncssh.connect(**chosen, known_hosts=known_hosts)
    except TimeoutError:
        raise RemoteError(host, "silent", f"does not answer within {limits.connect_s:g} s") from None
    except socket.gaierror as error:
        raise RemoteError(host, "unresolved", f"no address is found for {host.address}: {_said(error)}") from error
    except ConnectionRefusedError as error:
        raise RemoteError(host, "refused", f"nothing listens for SSH at {_target(host)}") from error
    except asyncssh.HostKeyNotVerifiable as error:
        raise _key_error(host, known_hosts, options, error) from error
    except asyncssh.PermissionDenied as error:
        detail = f"none of your keys lets {options.username} in, and passwords are not asked for"
        raise RemoteError(host, "denied", detail) from error
    except asyncssh.Error as error:
        raise RemoteError(host, "broken", f"SSH ends with: {_said(error)}") from error
    except OSError as error:
        raise RemoteError(host, "unreachable", f"cannot be reached: {_said(error)}") from error


def _chosen(host: Host, limits: Limits) -> dict[str, Any]:
    """What is set beside the user's configuration: nothing that needs him or would change a command."""
    chosen: dict[str, Any] = {
        "host": host.address,
        "config": (),  # reads the user's
        "password_auth": False,
        "kbdint_auth": False,
        "agent_forwarding": False,
        "x11_forwarding": False,
        "command": None,
        "request_pty": False,
        "env": None,
        "send_env": None,
        "compression_algs": None,
    }
    if host.user is not None:
        chosen["username"] = host.user
    if host.port is not None:
        chosen["port"] = host.port
    if limits.keepalive_s is not None:
        chosen["keepalive_interval"] = limits.keepalive_s
    return chosen


def _quickest_first(ciphers: Sequence[bytes]) -> list[str]:
    """The ciphers that the configuration allows, those first that take asyncssh one call for each packet instead of
    six: a sixth of the processor time of a preflight."""
    return sorted((each.decode("ascii") for each in ciphers), key=lambda name: "gcm" not in name)


def _files(named: object) -> list[Path]:
    """The files of known hosts: those of ssh's configuration, or the usual ones."""
    given = [Path(str(each)).expanduser() for each in named] if isinstance(named, list | tuple) else []
    files = given or [Path("~/.ssh/known_hosts").expanduser(), GLOBAL_KNOWN_HOSTS]
    return [each for each in files if each.is_file()]


@lru_cache(maxsize=16)
def _known_hosts(files: tuple[tuple[str, int], ...]) -> asyncssh.SSHKnownHosts:
    """What files, each with the time of its last change, say: read once for all hosts."""
    return asyncssh.read_known_hosts([name for name, _ in files])


def _key_error(
    host: Host, known_hosts: asyncssh.SSHKnownHosts, options: asyncssh.SSHClientConnectionOptions, error: Exception
) -> RemoteError:
    name = options.host_key_alias or options.host
    known = known_hosts.match(name, "", None if options.port == _SSH_PORT else options.port)
    if any(known[:3]):
        detail = f"its key is not the one of known_hosts ({_said(error)}): another machine, or one installed anew"
        return RemoteError(host, "changed key", detail)
    return RemoteError(host, "unknown key", "its key is not in known_hosts, and keys are never accepted here")


def _target(host: Host) -> str:
    return host.address if host.port is None else f"{host.address}, port {host.port}"


def _said(error: Exception) -> str:
    """One printable line of what others say."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())[:200] or type(error).__name__
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
