"""What the launcher and its agents on hosts say to each other: JSON in frames of known length, checked. Pure.

A frame is four bytes (its length, big-endian) and so many bytes of one JSON object with a `kind`. Moments are told as
seconds ago, since hosts have clocks of their own.
"""

import struct
from collections.abc import Iterator
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from ascend_moe_train.cluster.board import Phase
from ascend_moe_train.cluster.member import Member
from ascend_moe_train.cluster.variables import Starter
from ascend_moe_train.errors import UserError
from ascend_moe_train.part import Part

MAX_FRAME_BYTES = 32 * 2**20  # a line of a rank has up to 4 MiB, each byte up to six characters
MAX_WORLD = 2**16
Message = TypeVar("Message")
_LENGTH = struct.Struct(">I")

Rank = Annotated[int, Field(ge=0, lt=MAX_WORLD)]
Ago = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Word = Annotated[str, Field(min_length=1, max_length=4096)]


class FrameError(UserError):
    """What came is no frame of ours."""


class Task(Part):
    """To an agent, first: its ranks, from `first_rank` on, of `world`, and what each of them runs."""

    kind: Literal["task"] = "task"
    version: str
    world: Annotated[int, Field(gt=0, le=MAX_WORLD)]
    first_rank: Rank
    ranks: Annotated[int, Field(gt=0, le=MAX_WORLD)]
    node: Rank
    slots_by_node: tuple[Annotated[int, Field(gt=0)], ...]
    module: Word
    arguments: tuple[Annotated[str, Field(max_length=2**20)], ...]
    starter: Starter
    master: Word
    folder: Word
    log_folder: Word
    environment: dict[str, str]
    run_id: Word
    control: Word
    started_s: float
    meet_s: Annotated[int, Field(gt=0)]
    silence_s: Annotated[float, Field(gt=0)]


class Go(Part):
    """To an agent: starts its ranks. `words` are the arguments of MPI's proxy; `port` is where msrun's ranks meet."""

    kind: Literal["go"] = "go"
    words: tuple[Word, ...] = ()
    port: Annotated[int, Field(ge=0, lt=2**16)] = 0


class Order(Part):
    """To an agent: what all guards of its ranks are told, as `control.Command` has it."""

    kind: Literal["order"] = "order"
    what: Annotated[int, Field(ge=0, le=255)]
    number: Annotated[int, Field(ge=0, le=255)] = 0


class StacksOf(Part):
    """To an agent: it reads the stacks of these ranks, and answers."""

    kind: Literal["stacks_of"] = "stacks_of"
    ranks: tuple[Rank, ...]


class Leave(Part):
    """To an agent: it ends, with all that is left of its ranks."""

    kind: Literal["leave"] = "leave"


class Beat(Part):
    """Both ways, every second: the other end is there."""

    kind: Literal["beat"] = "beat"


class Ready(Part):
    """From an agent: it can start its ranks, and nobody listens at `port` of its host."""

    kind: Literal["ready"] = "ready"
    host: str
    port: Annotated[int, Field(gt=0, lt=2**16)]


class Refused(Part):
    """From an agent: why it cannot."""

    kind: Literal["refused"] = "refused"
    message: str


class Proxies(Part):
    """From the agent of the first host: the arguments of MPI's proxy on each."""

    kind: Literal["proxies"] = "proxies"
    words: tuple[tuple[Word, ...], ...]


class Noise(Part):
    """From an agent: a line of what starts its ranks."""

    kind: Literal["noise"] = "noise"
    text: str


class StarterEnded(Part):
    """From an agent: what starts its ranks has ended, with this code or by minus this signal."""

    kind: Literal["starter_ended"] = "starter_ended"
    name: str
    code: Annotated[int, Field(ge=-64, le=255)]


class FailureOf(Part):
    """As `board.Failure`."""

    line: str
    is_user_error: bool
    ago_s: Ago


class StatusOf(Part):
    """As `board.Status`."""

    pid: Count
    phase: Phase
    step: Count
    verb: str
    group: str
    sequence: Count
    updates: Count
    failure: FailureOf | None = None


class EndingOf(Part):
    """As `verdict.Ending`."""

    ago_s: Ago
    code: int | None = None
    signal_number: int | None = None


class RankState(Part):
    """What an agent knows of a rank, as `Member` does."""

    rank: Rank
    has_guard: bool
    pid: Count | None
    idle_s: Ago
    stopped_s: Ago | None
    stop_signal: int
    ending: EndingOf | None
    status: StatusOf | None


def rank_state(member: Member, now_s: float) -> RankState:
    """A member, as it is told."""
    view, status = member.view(now_s), member.status
    ending = None
    if view.ending is not None:
        ago_s = max(0.0, now_s - view.ending.at_s)
        ending = EndingOf(ago_s=ago_s, code=view.ending.code, signal_number=view.ending.signal_number)
    told = None
    if status is not None:
        failure = status.failure
        told = StatusOf(
            pid=status.pid,
            phase=status.phase,
            step=status.step,
            verb=status.verb,
            group=status.group,
            sequence=status.sequence,
            updates=status.updates,
            failure=None
            if failure is None
            else FailureOf(
                line=failure.line, is_user_error=failure.is_user_error, ago_s=max(0.0, now_s - failure.at_s)
            ),
        )
    return RankState(
        rank=member.rank,
        has_guard=member.connection is not None,
        pid=view.pid,
        idle_s=max(0.0, view.idle_s),
        stopped_s=None if view.stopped_s is None else max(0.0, view.stopped_s),
        stop_signal=view.stop_signal,
        ending=ending,
        status=told,
    )


class RankStates(Part):
    """From an agent: what has changed; `is_drained` once its ranks cannot print any more."""

    kind: Literal["ranks"] = "ranks"
    states: tuple[RankState, ...]
    is_drained: bool


class Line(Part):
    """From an agent: a line that a rank printed."""

    kind: Literal["line"] = "line"
    rank: Rank
    text: str
    is_error: bool


class Stacks(Part):
    """From an agent: what was asked for."""

    kind: Literal["stacks"] = "stacks"
    texts: tuple[tuple[Rank, str], ...]


ToAgent = Task | Go | Order | StacksOf | Leave | Beat
FromAgent = Ready | Refused | Proxies | Noise | StarterEnded | RankStates | Line | Stacks | Beat
TO_AGENT: TypeAdapter[ToAgent] = TypeAdapter(Annotated[ToAgent, Field(discriminator="kind")])
FROM_AGENT: TypeAdapter[FromAgent] = TypeAdapter(Annotated[FromAgent, Field(discriminator="kind")])


def frame(message: Part) -> bytes:
    """A message on its way."""
    body = message.model_dump_json().encode()
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[Message]):
    """Bytes as they come, to messages."""

    def __init__(self, adapter: TypeAdapter[Message]) -> None:
        self._adapter = adapter
        self._rest = bytearray()

    def feed(self, piece: bytes) -> Iterator[Message]:
        """The messages that are whole with this piece. Raises FrameError: it is none of ours."""
        self._rest += piece
        while len(self._rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length:,} bytes, more than {MAX_FRAME_BYTES:,}")
            if len(self._rest) < _LENGTH.size + length:
                return
            body = bytes(self._rest[_LENGTH.size : _LENGTH.size + length])
            del self._rest[: _LENGTH.size + length]
            try:
                yield self._adapter.validate_json(body)
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False, include_context=False)[0]
                place = ".".join(map(str, first["loc"]))
                raise FrameError(f"a frame that is none of ours: {place}: {first['msg']}") from None
