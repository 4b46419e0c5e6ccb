"""The ranks of several hosts as one: what their agents tell, and what they are told. Pure."""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from ascend_moe_train.closing import Closing
from ascend_moe_train.cluster.agent import BEAT_S
from ascend_moe_train.cluster.board import Failure, Status
from ascend_moe_train.cluster.control import Command
from ascend_moe_train.cluster.frames import (
    FROM_AGENT,
    Beat,
    FrameError,
    FrameReader,
    FromAgent,
    Go,
    Leave,
    Line,
    Noise,
    Order,
    Proxies,
    RankState,
    RankStates,
    Ready,
    Refused,
    Stacks,
    StacksOf,
    StarterEnded,
    Task,
    frame,
)
from ascend_moe_train.cluster.intake import LineSink
from ascend_moe_train.cluster.links import Link, missing_interpreter
from ascend_moe_train.cluster.member import Member
from ascend_moe_train.cluster.stacks import MOST_RANKS, WITHIN_S
from ascend_moe_train.cluster.verdict import PAUSE_S, Ending, RankView
from ascend_moe_train.part import Part

OVERDUE_S = 3.0  # a host that has said nothing for so long may be lost
_SEND_S = 5.0
_PIECE_BYTES = 2**18


class HostMember(Member):
    """A rank of another host, as its agent tells."""

    has_guard = False

    @property
    def is_alive(self) -> bool:
        """See Member."""
        return self.ending is None and self.has_guard

    def tell(self, state: RankState, now_s: float) -> None:
        """Takes in what its agent knows."""
        self.has_guard, self.pid = state.has_guard, state.pid
        self._changed_s = now_s - state.idle_s
        self._stopped_since_s = None if state.stopped_s is None else now_s - state.stopped_s
        self._stop_signal = state.stop_signal
        if state.ending is not None and self.ending is None:
            known = state.ending
            self.ending = Ending(at_s=now_s - known.ago_s, code=known.code, signal_number=known.signal_number)
        told = state.status
        if told is None:
            return
        before = None if self.status is None else self.status.failure
        failure = before
        if told.failure is not None and before is None:
            line, is_user_error = told.failure.line, told.failure.is_user_error
            failure = Failure(line=line, is_user_error=is_user_error, at_s=now_s - told.failure.ago_s)
        self.status = Status(
            pid=told.pid,
            phase=told.phase,
            step=told.step,
            verb=told.verb,
            group=told.group,
            sequence=told.sequence,
            entered_s=self._changed_s,
            updates=told.updates,
            failure=failure,
        )

    def lose_host(self, host: str, at_s: float) -> None:
        """Nothing more will be heard of it."""
        self.has_guard = False
        if self.ending is None:
            self.ending = Ending(at_s=at_s, lost_with=f"host {host}")


class HostEnd:
    """The launcher's end of one agent."""

    def __init__(self, link: Link, task: Task, members: Sequence[HostMember], now_s: float) -> None:
        self.link, self.task, self.members = link, task, members
        self.reader: FrameReader[FromAgent] = FrameReader(FROM_AGENT)
        self.heard_s = now_s
        self.ready: Ready | None = None
        self.refusal: str | None = None
        self.is_drained = True
        self.noise = ""  # the last that what starts its ranks has said
        self.lost: str | None = None
        self.stacks: dict[int, str] | None = None
        link.socket.settimeout(_SEND_S)

    @property
    def name(self) -> str:
        """The host's."""
        return self.link.host.name

    def send(self, message: Part) -> None:
        """A host that does not take it is met again when it says nothing."""
        if self.lost is None:
            with contextlib.suppress(OSError):
                self.link.socket.sendall(frame(message))


class HostsHub(Closing):
    """All ranks of a job. It is also what starts them (`supervise.RanksHub` and `RanksStarter`)."""

    def __init__(self, links: Sequence[Link], tasks: Sequence[Task], lines: LineSink, silence_s: float) -> None:
        now_s = time.monotonic()
        self._lines, self._silence_s = lines, silence_s
        self._selector = selectors.DefaultSelector()
        self._beat_s, self._polled_s = 0.0, now_s
        self._ended: tuple[HostEnd, StarterEnded] | None = None
        self.members: list[HostMember] = []
        self.hosts: list[HostEnd] = []
        for link, task in zip(links, tasks, strict=True):
            own = [HostMember(task.first_rank + n, now_s) for n in range(task.ranks)]
            self.members += own
            host = HostEnd(link, task, own, now_s)
            self.hosts.append(host)
            self._selector.register(link.socket, selectors.EVENT_READ, host)
            host.send(task)

    @property
    def lost(self) -> list[HostEnd]:
        """Hosts that have gone."""
        return [host for host in self.hosts if host.lost is not None]

    @property
    def has_open_streams(self) -> bool:
        """See RanksHub."""
        return any(not host.is_drained and host.lost is None for host in self.hosts)

    def poll(self, timeout_s: float) -> None:
        """See RanksHub."""
        for key, _ in self._selector.select(timeout_s):
            self._read(key.data)
        now_s = time.monotonic()
        pause_s, self._polled_s = now_s - self._polled_s, now_s
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self._send_all(Beat())
        for host in self.hosts:
            if pause_s > PAUSE_S:  # the launcher was stopped, and perhaps all hosts with it
                host.heard_s += pause_s
            # an agent that is being started says nothing: for how long is up to who waits for it
            if host.lost is None and host.ready is not None and now_s - host.heard_s > self._silence_s:
                self._lose(host, f"nothing was heard of it for {self._silence_s:g} s")

    def start(self) -> None:
        """Has all ranks started, once all agents are ready: MPI's by the first host's agent, which finds out how."""
        port = self.hosts[0].ready.port if self.hosts[0].ready is not None else 0
        if self.hosts[0].task.starter == "mpiexec":
            self.hosts[0].send(Go())
        else:
            self._send_all(Go(port=port))

    def order(self, what: Command, number: int = 0) -> None:
        """See RanksHub."""
        self._send_all(Order(what=int(what), number=number))

    def forgive(self, pause_s: float) -> None:
        """See RanksHub."""
        for member in self.members:
            member.forgive(pause_s)

    def kill_guards(self) -> None:
        """See RanksHub: an agent that leaves takes all with it, and one that does not is given up."""
        self._send_all(Leave())
        for host in self.hosts:
            if any(member.is_alive for member in host.members):
                self._lose(host, "it did not end its ranks when it was told to")

    def stacks(self, views: Sequence[RankView]) -> dict[int, str]:
        """See RanksHub."""
        wanted = [view.rank for view in views][:MOST_RANKS]
        asked = [host for host in self.hosts if host.lost is None and self._of(host, wanted)]
        for host in asked:
            host.stacks = None
            host.send(StacksOf(ranks=tuple(self._of(host, wanted))))
        until_s = time.monotonic() + WITHIN_S + BEAT_S
        while any(host.stacks is None and host.lost is None for host in asked) and time.monotonic() < until_s:
            self.poll(0.1)
        return {rank: text for host in asked for rank, text in (host.stacks or {}).items()}

    def is_unsure(self) -> bool:
        """Whether some host has not been heard of for a while and is not given up."""
        now_s = time.monotonic()
        return any(host.lost is None and now_s - host.heard_s > OVERDUE_S for host in self.hosts)

    def ending(self) -> tuple[str, int] | None:
        """See RanksStarter."""
        if self._ended is None:
            return None
        host, ended = self._ended
        return f"{ended.name} on host {host.name}", ended.code

    @property
    def last_words(self) -> str:
        """See RanksStarter: on the host where it ended."""
        return "" if self._ended is None else self._ended[0].noise

    def kill(self) -> None:
        """See RanksStarter: agents do it."""
        self._send_all(Leave())

    def close(self) -> None:
        """Tells all agents to leave."""
        self._send_all(Leave())
        for host in self.hosts:
            with contextlib.suppress(OSError):
                host.link.socket.shutdown(socket.SHUT_WR)
        self._selector.close()

    def _of(self, host: HostEnd, ranks: Sequence[int]) -> list[int]:
        return [member.rank for member in host.members if member.rank in ranks]

    def _send_all(self, message: Part) -> None:
        for host in self.hosts:
            host.send(message)

    def _lose(self, host: HostEnd, why: str) -> None:
        if host.lost is not None:
            return
        host.lost = why
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(host.link.socket)
        for member in host.members:
            member.lose_host(f"{host.name} ({why})", host.heard_s)

    def _read(self, host: HostEnd) -> None:
        try:
            piece = host.link.socket.recv(_PIECE_BYTES)
        except OSError:
            piece = b""
        if not piece:
            begun = host.ready is not None
            self._lose(host, "its connection ended" if begun else missing_interpreter(host.link.errors))
            return
        now_s = host.heard_s = time.monotonic()
        try:
            for message in host.reader.feed(piece):
                self._take(host, message, now_s)
        except FrameError as error:
            self._lose(host, f"it sent {error}")

    def _take(self, host: HostEnd, message: FromAgent, now_s: float) -> None:
        match message:
            case Ready():
                host.ready = message
            case Refused(message=text):
                host.refusal = text
            case Proxies(words=words) if host is self.hosts[0] and len(words) == len(self.hosts):
                for each, arguments in zip(self.hosts, words, strict=True):
                    each.send(Go(words=arguments))
            case RankStates(states=states, is_drained=is_drained):
                host.is_drained = is_drained
                for state in states:
                    if (member := self._member(host, state.rank)) is not None:
                        member.tell(state, now_s)
            case Line(rank=rank, text=text, is_error=is_error):
                if (member := self._member(host, rank)) is not None:
                    self._lines.take(member, text, is_error=is_error)
            case Noise(text=text):
                host.noise = text
            case StarterEnded() as ended:
                # MPI's proxies end with their ranks, one by one
                if self._ended is None and (ended.code != 0 or all(member.ending for member in host.members)):
                    self._ended = host, ended
            case Stacks(texts=texts):
                host.stacks = dict(texts)
            case _:
                pass

    def _member(self, host: HostEnd, rank: int) -> HostMember | None:
        """A rank of this host: an agent tells of no others."""
        place = rank - host.task.first_rank
        return host.members[place] if 0 <= place < len(host.members) else None


def wait_until(hub: HostsHub, is_so: Callable[[], bool], within_s: float) -> bool:
    """Polls until something is so, and whether it came to that."""
    until_s = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > until_s:
            return False
        hub.poll(0.1)
    return True
