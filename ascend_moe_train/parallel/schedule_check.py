"""Proof that the stages' lists of actions can be done together. Pure."""

from collections import deque
from collections.abc import Sequence
from itertools import zip_longest

from ascend_moe_train.parallel.schedule import (
    SENDS,
    SENT_BY,
    Action,
    Channel,
    Kind,
    channels,
    in_flight,
    messages,
    walk,
)

_Lists = Sequence[Sequence[Action]]
# the message's other end: what is sent is received by, and how many pieces of the model further
_SENT = {Kind.SEND_FORWARD: (Kind.RECV_FORWARD, 1), Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1)}
_NEEDS = {
    Kind.SEND_FORWARD: Kind.FORWARD,
    Kind.SEND_BACKWARD: Kind.BACKWARD,
    Kind.WEIGHT: Kind.BACKWARD,
}


def check(actions: _Lists, num_micro: int, chunks: int = 1, bounds: Sequence[int] | None = None) -> None:
    """Raises ValueError, naming the stage and the action, unless

    - every stage has each pass of each (micro-batch, chunk) once, weight parts for all of them or for none, and the
      messages between them,
    - nothing comes before what it needs, on its stage,
    - messages of each channel are received in the order in which they are sent,
    - all lists come to their end together even if a send waits as long as its channel holds one message,
    - and, with `bounds` (see `schedule.bounds`), no stage has more in flight than its bound.
    """
    for stage, listed in enumerate(actions):
        _check_whole(stage, listed, len(actions), num_micro, chunks)
        _check_order(stage, listed, len(actions), chunks)
    _check_channels(actions)
    deque(walk(actions, room=1), maxlen=0)
    for stage, (listed, bound) in enumerate(zip(actions, bounds or [], strict=bounds is not None)):
        if (found := in_flight(listed)) > bound:
            raise ValueError(f"stage {stage}: {found} in flight, at most {bound} may be")


def _check_whole(stage: int, listed: Sequence[Action], num_stages: int, num_micro: int, chunks: int) -> None:
    kinds = {Kind.FORWARD, Kind.BACKWARD}
    if any(each.kind is Kind.WEIGHT for each in listed):
        kinds.add(Kind.WEIGHT)
    expected = set()
    for chunk in range(chunks):
        has_source, has_target = messages(stage, num_stages, chunks, chunk)
        needed = kinds | ({Kind.RECV_FORWARD, Kind.SEND_BACKWARD} if has_source else set())
        needed |= {Kind.SEND_FORWARD, Kind.RECV_BACKWARD} if has_target else set()
        expected |= {Action(kind, micro, chunk) for kind in needed for micro in range(num_micro)}
    found = set(listed)
    for each in listed:
        if each not in expected:
            raise ValueError(f"stage {stage}: {each} has no place here")
    if len(found) < len(listed):
        twice = next(each for index, each in enumerate(listed) if each in listed[:index])
        raise ValueError(f"stage {stage}: {twice} comes twice")
    if missing := expected - found:
        raise ValueError(f"stage {stage}: {min(missing, key=str)} is missing")


def _check_order(stage: int, listed: Sequence[Action], num_stages: int, chunks: int) -> None:
    done: set[Action] = set()
    for each in listed:
        for needed in _needed(each, stage, num_stages, chunks):
            if needed not in done:
                raise ValueError(f"stage {stage}: {each} comes before {needed}")
        done.add(each)


def _needed(each: Action, stage: int, num_stages: int, chunks: int) -> list[Action]:
    """What must be done before, on the same stage."""
    kind, micro, chunk = each.kind, each.micro, each.chunk
    if kind in _NEEDS:
        return [Action(_NEEDS[kind], micro, chunk)]
    if kind in SENT_BY:
        return []
    has_source, has_target = messages(stage, num_stages, chunks, chunk)
    if kind is Kind.FORWARD:
        if has_source:
            return [Action(Kind.RECV_FORWARD, micro, chunk)]
        return [Action(Kind.FORWARD, micro, chunk - 1)] if chunk > 0 else []
    found = [Action(Kind.FORWARD, micro, chunk)]
    if has_target:
        found.append(Action(Kind.RECV_BACKWARD, micro, chunk))
    elif chunk < chunks - 1:
        found.append(Action(Kind.BACKWARD, micro, chunk + 1))
    return found


def _arriving(sent: Action, stage: int, num_stages: int) -> Action:
    """The receive of what is sent. Chunks follow each other where the last stage meets the first."""
    kind, step = _SENT[sent.kind]
    piece = sent.chunk * num_stages + stage + step
    return Action(kind, sent.micro, piece // num_stages)


def _check_channels(actions: _Lists) -> None:
    num_stages = len(actions)
    sent: dict[Channel, list[Action]] = {}
    received: dict[Channel, list[Action]] = {}
    for stage, listed in enumerate(actions):
        ways = channels(stage, num_stages)
        for each in listed:
            if each.kind in SENDS:
                sent.setdefault(ways[each.kind], []).append(_arriving(each, stage, num_stages))
            elif each.kind in SENT_BY:
                received.setdefault(ways[each.kind], []).append(each)
    for way, arriving in sent.items():
        source, target, _ = way
        for place, (comes, taken) in enumerate(zip_longest(arriving, received.get(way, []))):
            if comes != taken:
                raise ValueError(
                    f"message {place} from stage {source} to {target}: for {comes}, but stage {target} is at {taken}"
                )
