"""The launcher's agent on one of several hosts: it starts the ranks of its host, tells how they fare, ends them. Pure.

It is started over SSH, or as a child process where the launcher itself runs, reads frames from standard input and
writes frames to standard output. When its launcher goes, or is not heard of for long, it ends and its ranks with it.
"""

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from ascend_moe_train.cluster import msrun, variables
from ascend_moe_train.cluster.control import Command
from ascend_moe_train.cluster.frames import (
    TO_AGENT,
    Beat,
    FrameReader,
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
    ToAgent,
    frame,
    rank_state,
)
from ascend_moe_train.cluster.hub import Hub
from ascend_moe_train.cluster.member import Member
from ascend_moe_train.cluster.mpiexec import (
    find_mpiexec,
    hosts_command_line,
    proxy_command,
    proxy_words,
    rank_command,
    rank_environment,
)
from ascend_moe_train.cluster.starter import StarterProcess, started
from ascend_moe_train.cluster.verdict import PAUSE_S
from ascend_moe_train.errors import ConfigError, UserError
from ascend_moe_train.part import Part

BEAT_S = 1.0
FIRST_TASK_S = 60.0
EXIT_NO_LAUNCHER = 125
_TICK_S = 0.1
_PIECE_BYTES = 2**16
_QUEUED_FRAMES = 4096
_STATES_PER_S = 1000  # of all hosts together: the launcher takes in each of them


class GoneError(Exception):
    """The launcher is not there any more."""


class Channel:
    """Frames to and from the launcher. A thread writes, so that a launcher that does not read holds nobody up."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self._sink = source, sink
        self._reader: FrameReader[ToAgent] = FrameReader(TO_AGENT)
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED_FRAMES)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()
        self.heard_s = time.monotonic()
        self.silence_s = FIRST_TASK_S

    def send(self, message: Part) -> None:
        """Raises GoneError: the launcher has not read, nor said anything, for too long."""
        packed = frame(message)
        while True:
            try:
                self._queue.put(packed, timeout=BEAT_S)
            except queue.Full:
                self.check()
            else:
                return

    def check(self) -> None:
        """Raises GoneError: the launcher has not said anything for too long."""
        if time.monotonic() - self.heard_s > self.silence_s:
            raise GoneError

    def received(self) -> list[ToAgent]:
        """What has come, once something has. Raises GoneError: the end; FrameError."""
        piece = os.read(self.source, _PIECE_BYTES)
        if not piece:
            raise GoneError
        self.heard_s = time.monotonic()
        return list(self._reader.feed(piece))

    def finish(self) -> None:
        """Returns once what was sent is written, or after a while."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=BEAT_S)
        self._thread.join(BEAT_S)

    def _write(self) -> None:
        while (packed := self._queue.get()) is not None:
            try:
                while packed:
                    packed = packed[os.write(self._sink, packed) :]
            except OSError:  # the launcher has gone: the end of what it sends tells
                return


class Agent:
    """The ranks of this host from their start to their end."""

    def __init__(self, task: Task, channel: Channel, stack: contextlib.ExitStack) -> None:
        self._task, self._channel, self._stack = task, channel, stack
        self._command = rank_command(task.module, task.arguments)
        self._mpiexec = find_mpiexec() if task.starter == "mpiexec" else None
        ranks = range(task.first_rank, task.first_rank + task.ranks)
        self._control = f"{task.control}-{task.node}"
        self._hub = stack.enter_context(Hub(ranks=ranks, control=self._control, lines=self))
        self._environment = self._make_environment()
        self._starters: list[StarterProcess] = []
        self._proxies: list[tuple[str, ...]] = []
        self._sent: dict[int, tuple[object, ...]] = {}
        self._urgent: list[object] = []
        self._sent_s = self._beat_s = 0.0
        self._was_drained = True
        self._must_leave = False

    def take(self, member: Member, text: str, *, is_error: bool) -> None:
        """A line of a rank, after what the rank said on the board."""
        if is_error and member.status is not None and member.status.failure is not None:
            self._send_states()
        self._channel.send(Line(rank=member.rank, text=text, is_error=is_error))

    def run(self) -> None:
        """Until the launcher says so. Raises GoneError, FrameError."""
        self._hub.listen(self._channel.source, self._obey)
        self._channel.send(Ready(host=socket.gethostname(), port=msrun.free_port()))
        turn_s = time.monotonic()
        while not self._must_leave:
            self._hub.poll(_TICK_S)
            now_s = time.monotonic()
            if now_s - turn_s > PAUSE_S:  # this host was stopped, and perhaps the launcher's with it
                self._channel.heard_s += now_s - turn_s
            turn_s = now_s
            self._channel.check()
            if now_s - self._beat_s >= BEAT_S:
                self._beat_s = now_s
                self._channel.send(Beat())
            urgent = [(m.is_alive, m.pid, m.ending, m.is_stopped, m.has_failed) for m in self._hub.members]
            is_due = now_s - self._sent_s >= max(_TICK_S, self._task.world / _STATES_PER_S)
            is_drained = not self._hub.has_open_streams
            if urgent != self._urgent or is_due or is_drained != self._was_drained:
                self._urgent, self._sent_s, self._was_drained = list(urgent), now_s, is_drained
                self._send_states()
            for starter in self._starters:
                if (ending := starter.ending()) is not None:
                    self._hub.poll(0.0)  # the last that it said
                    self._channel.send(StarterEnded(name=ending[0], code=ending[1]))
                    self._starters.remove(starter)
                    break

    def _send_states(self) -> None:
        now_s = time.monotonic()
        states: list[RankState] = []
        for member in self._hub.members:
            key = (member.is_alive, member.pid, member.ending, member.is_stopped, member.status)
            if self._sent.get(member.rank) != key:
                self._sent[member.rank] = key
                states.append(rank_state(member, now_s))
        self._channel.send(RankStates(states=tuple(states), is_drained=not self._hub.has_open_streams))

    def _obey(self) -> None:
        for message in self._channel.received():
            match message:
                case Go():
                    self._go(message)
                case Order(what=what, number=number) if what in set(Command):
                    self._hub.order(Command(what), number)
                case StacksOf(ranks=ranks):
                    now_s = time.monotonic()
                    views = [member.view(now_s) for member in self._hub.members if member.rank in ranks]
                    self._channel.send(Stacks(texts=tuple(self._hub.stacks(views).items())))
                case Leave():
                    self._must_leave = True
                case _:
                    pass

    def _go(self, go: Go) -> None:
        task = self._task
        if self._mpiexec is None:
            node = msrun.Node(number=task.node, world=task.world, master=task.master)
            words = msrun.command_line(
                task.ranks,
                msrun.guarded(self._command),
                log_folder=Path(task.log_folder) / f"node-{task.node}",
                port=go.port,
                meet_s=task.meet_s,
                node=node,
            )
            self._start(words, "msrun", self._say)
        elif go.words:
            self._start(proxy_command(self._mpiexec, go.words), "hydra_pmi_proxy", self._say)
        else:
            words = hosts_command_line(self._mpiexec, task.master, task.slots_by_node, self._command)
            self._start(words, "mpiexec", self._take_proxy)

    def _start(self, words: list[str], name: str, take: Callable[[str], None]) -> None:
        starter = self._stack.enter_context(started(words, self._environment, name))
        self._stack.callback(self._hub.close)  # guards end before what started them is waited for
        self._hub.read_lines(starter.output, take, lambda: None)
        self._starters.append(starter)

    def _say(self, text: str) -> None:
        self._channel.send(Noise(text=text))

    def _take_proxy(self, text: str) -> None:
        words = proxy_words(text)
        if words is None:
            if not text.startswith("HYDRA_LAUNCH"):
                self._say(text)
            return
        self._proxies.append(tuple(words))
        if len(self._proxies) == len(self._task.slots_by_node):
            self._channel.send(Proxies(words=tuple(self._proxies)))

    def _make_environment(self) -> dict[str, str]:
        task, given = self._task, {**os.environ, **self._task.environment}
        own = {
            variables.RUN_ID: task.run_id,
            variables.CONTROL: self._control,
            variables.STARTER: task.starter,
            variables.STARTED: repr(task.started_s),
            variables.FIRST_RANK: str(task.first_rank),
            variables.RANKS: str(task.world),
        }
        if task.starter == "msrun":
            own["PATH"] = msrun.path_variable(given)
        return rank_environment(task.ranks, given, own)


def _first_task(channel: Channel) -> Task:
    messages: list[ToAgent] = []
    while not messages:
        messages = channel.received()
    task = messages[0]
    if not isinstance(task, Task):
        raise ConfigError(f"the launcher began with {task.kind!r} instead of a task")
    channel.silence_s = task.silence_s
    here = version("ascend-moe-train")
    if task.version != here:
        raise ConfigError(f"has ascend-moe-train {here}, the launcher {task.version}: all hosts need the same")
    try:
        os.chdir(task.folder)
    except OSError as error:
        raise ConfigError(f"{task.folder}: {error.strerror}: all hosts need the launcher's working folder") from None
    return task


def main() -> int:
    """Runs the agent; its exit code."""
    sink = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed here is no frame
    for number in (signal.SIGINT, signal.SIGHUP):  # the end of the connection tells
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(0, sink)
    try:
        with contextlib.ExitStack() as stack:
            Agent(_first_task(channel), channel, stack).run()
    except GoneError:
        return EXIT_NO_LAUNCHER
    except UserError as error:
        channel.send(Refused(message=str(error)))
        channel.finish()
        return EXIT_NO_LAUNCHER
    channel.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
