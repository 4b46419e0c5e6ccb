"""The launcher's end of all connections: guards that report, streams of lines, the board. Pure."""

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ascend_moe_train.closing import Closing
from ascend_moe_train.cluster.board import Board
from ascend_moe_train.cluster.control import Command, Event, abstract_address, is_own, new_socket, peer, received_report
from ascend_moe_train.cluster.intake import LineSink
from ascend_moe_train.cluster.member import Member
from ascend_moe_train.cluster.output import LineCutter
from ascend_moe_train.cluster.stacks import dump_stacks
from ascend_moe_train.cluster.verdict import RankView

_PIECE_BYTES = 2**16


class Hub(Closing):
    """Members, which are the ranks of this machine, and what comes from them. Use it as a context manager: at its end
    no rank is left."""

    def __init__(self, *, ranks: range, control: str, lines: LineSink) -> None:
        now_s = time.monotonic()
        self.members = [Member(rank, now_s) for rank in ranks]
        self._first, self._lines = ranks.start, lines
        self._selector = selectors.DefaultSelector()
        self._board_descriptor = os.memfd_create("amt-board")
        self._board = Board.create(Path(f"/proc/self/fd/{self._board_descriptor}"), len(ranks))
        self._listener = new_socket()
        self._listener.bind(abstract_address(control))
        self._listener.listen(len(ranks))
        self._open_streams: set[int] = set()
        self._remarks: set[Callable[[], None]] = set()  # what reads standard error
        self._is_closed = False
        self._on_read(self._listener, self._accept)

    @property
    def has_open_streams(self) -> bool:
        """Whether any rank may still print something."""
        return bool(self._open_streams)

    def poll(self, timeout_s: float) -> None:
        """Takes in what has come, or waits for it. Remarks follow the records that came with them."""
        ready = [key.data for key, _ in self._selector.select(timeout_s)]
        for call in sorted(ready, key=self._remarks.__contains__):
            call()
        now_s = time.monotonic()
        for member, status in zip(self.members, self._board.read(), strict=True):
            member.observe(status, now_s)

    def listen(self, descriptor: int, call: Callable[[], None]) -> None:
        """Has something called whenever a descriptor can be read; it goes on until the end."""
        self._on_read(descriptor, call)

    def read_lines(
        self, descriptor: int, take: Callable[[str], None], ended: Callable[[], None], *, is_error: bool = False
    ) -> None:
        """Has every line of a stream taken, and its end."""
        cutter = LineCutter()

        def read() -> None:
            piece = os.read(descriptor, _PIECE_BYTES)
            for line in cutter.feed(piece) if piece else cutter.finish():
                take(line)
            if not piece:
                self._selector.unregister(descriptor)
                self._remarks.discard(read)
                ended()

        if is_error:
            self._remarks.add(read)
        self._on_read(descriptor, read)

    def forgive(self, pause_s: float) -> None:
        """Time in which the launcher itself did not run counts for nothing."""
        for member in self.members:
            member.forgive(pause_s)

    def order(self, what: Command, number: int = 0) -> None:
        """Tells all guards to do something."""
        for member in self.members:
            member.order(what, number)

    def kill_guards(self) -> None:
        """Ends all guards, and with them their ranks."""
        for member in self.members:
            member.kill_guard()

    def stacks(self, views: Sequence[RankView]) -> dict[int, str]:
        """See `dump_stacks`."""
        return dump_stacks(views)

    def is_unsure(self) -> bool:
        """What is on this machine is seen."""
        return False

    def close(self) -> None:
        """Leaves all guards, which end what is left of their ranks. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self.order(Command.LEAVE)
        for member in self.members:
            if member.connection is not None:
                member.connection.close()
        for descriptor in self._open_streams:
            os.close(descriptor)
        self._selector.close()
        self._listener.close()
        os.close(self._board_descriptor)

    def _on_read(self, source: Any, call: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, call)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if is_own(connection):
            self._on_read(connection, lambda: self._greet(connection))
        else:
            connection.close()

    def _greet(self, connection: socket.socket) -> None:
        """The first packet: which rank it is. A guard gets the ends of its pipes and the board."""
        self._selector.unregister(connection)
        found = received_report(_packet(connection))
        number = -1 if found is None or found.event is not Event.HELLO else found.number - self._first
        if number not in range(len(self.members)):
            connection.close()
            return
        member = self.members[number]
        if member.connection is not None:
            connection.close()
            return
        member.connection, member.guard_pid = connection, peer(connection)[0]
        ends = [self._new_stream(member, is_error=is_error) for is_error in (False, True)]
        with contextlib.suppress(OSError):  # a guard that has gone is met again when it is read from
            socket.send_fds(connection, [b"take"], [*ends, self._board_descriptor])
        for end in ends:
            os.close(end)
        self._on_read(connection, lambda: self._hear(member, connection))

    def _hear(self, member: Member, connection: socket.socket) -> None:
        found = received_report(_packet(connection))
        if found is not None:
            member.take(found, time.monotonic())
            return
        self._selector.unregister(connection)
        connection.close()
        member.connection = None
        member.lose(time.monotonic())

    def _new_stream(self, member: Member, *, is_error: bool) -> int:
        """The end of a new pipe that the rank writes to."""
        source, end = os.pipe()
        self._open_streams.add(source)

        def ended() -> None:
            self._open_streams.remove(source)
            os.close(source)

        def take(line: str) -> None:
            self._take_line(member, line, is_error=is_error)

        self.read_lines(source, take, ended, is_error=is_error)
        return end

    def _take_line(self, member: Member, text: str, *, is_error: bool) -> None:
        if is_error:
            # a rank says on the board why it gives up before it prints more about it
            member.observe(self._board.read_one(member.rank - self._first), time.monotonic())
        self._lines.take(member, text, is_error=is_error)


def _packet(connection: socket.socket) -> bytes:
    try:
        return connection.recv(64)
    except OSError:
        return b""
