"""What the launcher and the guards of its ranks say to each other, one message per packet of a socket. Pure."""

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

_EVENT = struct.Struct("<BqQ")
_COMMAND = struct.Struct("<Bq")
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Event(IntEnum):
    """What a guard tells of its rank, with one number."""

    HELLO = 1  # number of the rank
    STARTED = 2  # process id
    STOPPED = 3  # number of the signal
    CONTINUED = 4  # 0
    ENDED = 5  # status as of wait(2)


class Command(IntEnum):
    """What a guard is told to do, with one number."""

    SIGNAL = 1  # number of the signal, for the rank's process
    KILL = 2  # 0: the rank and all that it has started
    LEAVE = 3  # 0: the guard itself ends


@dataclass(frozen=True, kw_only=True)
class Report:
    """One event; `at_s` is by the system's monotonic clock."""

    event: Event
    number: int
    at_s: float


def new_socket() -> socket.socket:
    """A socket that keeps packets apart."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def abstract_address(name: str) -> bytes:
    """The address of a name that is no file, and goes away with its socket."""
    return b"\0" + name.encode()


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def is_own(connection: socket.socket) -> bool:
    """Whether the other end belongs to the user of this process."""
    return peer(connection)[1] == os.getuid()


def report(connection: socket.socket, event: Event, number: int, at_s: float) -> None:
    """Sends an event. A launcher that has gone is noticed elsewhere."""
    with contextlib.suppress(OSError):
        connection.send(_EVENT.pack(event, number, int(at_s * 1e9)))


def received_report(packet: bytes) -> Report | None:
    """The event in a packet; None for anything else."""
    if len(packet) != _EVENT.size:
        return None
    event, number, at_ns = _EVENT.unpack(packet)
    return Report(event=Event(event), number=number, at_s=at_ns / 1e9) if event in set(Event) else None


def command(connection: socket.socket, what: Command, number: int = 0) -> None:
    """Sends a command. A guard that has gone needs none."""
    with contextlib.suppress(OSError):
        connection.send(_COMMAND.pack(what, number))


def received_command(packet: bytes) -> tuple[Command, int] | None:
    """The command in a packet; None for anything else."""
    if len(packet) != _COMMAND.size:
        return None
    what, number = _COMMAND.unpack(packet)
    return (Command(what), number) if what in set(Command) else None
