"""Pipeline schedules as lists of actions, one list a stage. Pure.

A stage holds `chunks` pieces of the model; piece v = chunk * num_stages + stage is the v-th from the input on, so
activations go from piece v to v + 1 and their gradients back. A stage does its list from the first action to the last.
A receive waits for its message, a send does not wait. Activations and gradients from one stage to another are two
channels, each in order. Inside one stage, which happens with a single one, nothing is sent.

`schedule_check` proves the lists, `timeline` says how long they take, `drive` does them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, get_args

from ascend_moe_train.parallel.config import ScheduleName

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


class Kind(StrEnum):
    """What a stage does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The whole backward pass; in zero_bubble its first part, the gradient of the input."""
    WEIGHT = "weight"
    """The second part of the backward pass, the gradients of the weights. In zero_bubble only."""
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
SENT_BY = {Kind.RECV_FORWARD: Kind.SEND_FORWARD, Kind.RECV_BACKWARD: Kind.SEND_BACKWARD}
# +1: the peer is the next stage; -1: the previous one
_PEER = {Kind.SEND_FORWARD: 1, Kind.RECV_FORWARD: -1, Kind.SEND_BACKWARD: -1, Kind.RECV_BACKWARD: 1}


class Action(NamedTuple):
    """One entry of a stage's list. `chunk` is this stage's: the one whose output is sent or whose input is received."""

    kind: Kind
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro}, chunk {self.chunk}"


Actions = tuple[Action, ...]
Channel = tuple[int, int, Kind]
"""From stage, to stage, and as what it is sent."""
_Pass = tuple[int, int]  # micro-batch and chunk


def schedule(name: ScheduleName, num_stages: int, num_micro: int, chunks: int = 1) -> tuple[Actions, ...]:
    """The actions of every stage.

    gpipe: all forward passes, then all backward passes (Huang et al., 2019, arXiv 1811.06965).
    1f1b: one forward and one backward in turn as soon as a gradient can come (Narayanan et al., 2021, arXiv
    2104.04473, section 2.2.1, there PipeDream-Flush).
    interleaved: 1f1b over the chunks of each stage, num_stages micro-batches at a time (there, section 2.2.2), for any
    number of micro-batches.
    zero_bubble: ZB-H1 (Qi et al., 2024, arXiv 2401.10241, section 2.3): 1f1b whose backward pass hands on the input's
    gradient first; the weights' gradients come later, the later the further back the stage, and fill the end.

    Raises ValueError for an unknown name, for sizes below 1, for interleaved with one chunk or another with several.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} does not exist: there are {', '.join(SCHEDULES)}")
    for what, value in {"stages": num_stages, "micro-batches": num_micro, "chunks": chunks}.items():
        if value < 1:
            raise ValueError(f"schedule {name} with {value} {what}: must be 1 or more")
    if name == "interleaved" and chunks == 1:
        raise ValueError("schedule interleaved with 1 chunk: must be 2 or more (with one it is 1f1b)")
    if name != "interleaved" and chunks > 1:
        raise ValueError(f"schedule {name} with {chunks} chunks: must be 1 (only interleaved takes more)")
    stages = range(num_stages)
    return tuple(
        tuple(_with_messages(_computed(name, stage, num_stages, num_micro, chunks), stage, num_stages, chunks))
        for stage in stages
    )


def bounds(name: ScheduleName, num_stages: int, num_micro: int, chunks: int = 1) -> tuple[int, ...]:
    """What `in_flight` of each stage is at most.

    gpipe: every micro-batch. 1f1b and zero_bubble: num_stages - stage. interleaved:
    2 (num_stages - stage - 1) + (chunks - 1) num_stages + 1 passes through one chunk.
    """
    return tuple(
        min(_warm_up(name, stage, num_stages, num_micro, chunks) + 1, num_micro * chunks) for stage in range(num_stages)
    )


def in_flight(actions: Iterable[Action]) -> int:
    """The most (micro-batch, chunk) pairs of a stage's list whose forward pass is done and whose backward pass, in
    zero_bubble its first part, is not."""
    return _most_alive(actions, Kind.BACKWARD)


def held(actions: Iterable[Action]) -> int:
    """As `in_flight`, until the weights' gradients too are there: for so many, inputs of layers must be kept."""
    listed = tuple(actions)
    return _most_alive(listed, Kind.WEIGHT if any(each.kind is Kind.WEIGHT for each in listed) else Kind.BACKWARD)


def peer(kind: Kind, stage: int, num_stages: int) -> int:
    """The stage at the other end of a send or receive."""
    return (stage + _PEER[kind]) % num_stages


def messages(stage: int, num_stages: int, chunks: int, chunk: int) -> tuple[bool, bool]:
    """Whether a chunk's input comes from another stage, and whether its output goes to one."""
    piece = chunk * num_stages + stage
    return num_stages > 1 and piece > 0, num_stages > 1 and piece < chunks * num_stages - 1


def channels(stage: int, num_stages: int) -> dict[Kind, Channel]:
    """Where the sends of a stage put their messages, and its receives take them."""
    sent = {kind: (stage, peer(kind, stage, num_stages), kind) for kind in SENDS}
    return {**sent, **{kind: (peer(kind, stage, num_stages), stage, by) for kind, by in SENT_BY.items()}}


def walk(actions: Sequence[Sequence[Action]], room: int | None = None) -> Iterator[tuple[int, Action]]:
    """(stage, action) of all lists in an order in which they can be done: each stage goes on as far as it can.

    With `room` a send waits while its channel holds so many messages. What a stage can do does not depend on which
    stage goes on first, so if one order comes to the end, all do. Raises ValueError, naming what each stage waits at,
    if they wait for each other.
    """
    num_stages = len(actions)
    ways = [channels(stage, num_stages) for stage in range(num_stages)]
    places = [0] * num_stages
    waiting: dict[Channel, int] = {}
    ready = deque(range(num_stages))
    while ready:
        stage = ready.popleft()
        listed = actions[stage]
        while places[stage] < len(listed):
            each = listed[places[stage]]
            if (way := ways[stage].get(each.kind)) is not None:
                held_up, is_send = waiting.get(way, 0), each.kind in SENDS
                if held_up == (room if is_send else 0):
                    break
                waiting[way] = held_up + (1 if is_send else -1)
                ready.append(way[1] if is_send else way[0])
            places[stage] += 1
            yield stage, each
    stuck = [
        f"stage {stage} at {listed[place]}"
        for stage, (listed, place) in enumerate(zip(actions, places, strict=True))
        if place < len(listed)
    ]
    if stuck:
        raise ValueError(f"the stages wait for each other: {'; '.join(stuck)}")


def _most_alive(actions: Iterable[Action], last: Kind) -> int:
    alive = most = 0
    for action in actions:
        alive += (action.kind is Kind.FORWARD) - (action.kind is last)
        most = max(most, alive)
    return most


def _warm_up(name: ScheduleName, stage: int, num_stages: int, num_micro: int, chunks: int) -> int:
    """Forward passes before the first pair of a forward and a backward pass."""
    after = num_stages - stage - 1
    if name == "gpipe":
        return num_micro
    return 2 * after + (chunks - 1) * num_stages if name == "interleaved" else after


def _computed(name: ScheduleName, stage: int, num_stages: int, num_micro: int, chunks: int) -> Iterator[Action]:
    forwards, backwards = _orders(num_stages, num_micro, chunks)
    delay = stage if name == "zero_bubble" else None
    warm_up = _warm_up(name, stage, num_stages, num_micro, chunks)
    # with the micro-batches that fill the last round of an interleaved schedule, which nobody does: a list that can be
    # done still can, and needs no more time or memory, when all that belongs to one micro-batch is taken out
    everything = _paired(forwards, backwards, warm_up, delay)
    return (action for action in everything if action.micro < num_micro)


def _orders(num_stages: int, num_micro: int, chunks: int) -> tuple[list[_Pass], list[_Pass]]:
    """Forward and backward passes in the order of every stage. With several chunks, num_stages micro-batches go
    through one chunk after the other before the next ones start."""
    size = 1 if chunks == 1 else num_stages
    rounds = [range(first, first + size) for first in range(0, num_micro, size)]
    up, down = range(chunks), range(chunks - 1, -1, -1)
    forwards = [(micro, chunk) for each in rounds for chunk in up for micro in each]
    backwards = [(micro, chunk) for each in rounds for chunk in down for micro in each]
    return forwards, backwards


def _paired(forwards: Sequence[_Pass], backwards: Sequence[_Pass], warm_up: int, delay: int | None) -> Iterator[Action]:
    """`warm_up` forward passes, then forward and backward in turn, then what is left of backward passes. With a
    `delay` the weights' gradients are so many backward passes late."""
    yield from (Action(Kind.FORWARD, *each) for each in forwards[:warm_up])
    waiting = list(backwards)
    for index, each in enumerate(backwards):
        if index + warm_up < len(forwards):
            yield Action(Kind.FORWARD, *forwards[index + warm_up])
        yield Action(Kind.BACKWARD, *each)
        if delay is not None and index >= delay:
            yield Action(Kind.WEIGHT, *waiting.pop(0))
    if delay is not None:
        yield from (Action(Kind.WEIGHT, *each) for each in waiting)


def _with_messages(computed: Iterable[Action], stage: int, num_stages: int, chunks: int) -> Iterator[Action]:
    """Receives just before the pass that needs them, sends just after the one that made them."""
    both = [messages(stage, num_stages, chunks, chunk) for chunk in range(chunks)]
    around = {Kind.FORWARD: (0, Kind.RECV_FORWARD, 1, Kind.SEND_FORWARD)}
    around[Kind.BACKWARD] = (1, Kind.RECV_BACKWARD, 0, Kind.SEND_BACKWARD)
    for each in computed:
        if each.kind not in around:
            yield each
            continue
        source, recv, target, send = around[each.kind]
        if both[each.chunk][source]:
            yield Action(recv, each.micro, each.chunk)
        yield each
        if both[each.chunk][target]:
            yield Action(send, each.micro, each.chunk)
