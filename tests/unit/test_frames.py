"""Frames between the launcher and its agents: what goes in comes out, and what is none of ours is refused."""

import json
import random
import struct

import pytest

from ascend_moe_train.cluster.frames import (
    FROM_AGENT,
    MAX_FRAME_BYTES,
    TO_AGENT,
    Beat,
    FrameError,
    FrameReader,
    Go,
    Line,
    Order,
    RankStates,
    frame,
    rank_state,
)
from ascend_moe_train.cluster.hosts_hub import HostMember
from ascend_moe_train.cluster.member import Member
from ascend_moe_train.cluster.verdict import Ending
from tests.unit.test_supervise import NOW_S, gave_up, view


def raw(value: object) -> bytes:
    body = json.dumps(value).encode()
    return struct.pack(">I", len(body)) + body


def test_messages_come_out_whole_however_they_are_cut() -> None:
    messages = [
        Beat(),
        Line(rank=3, text='a "line"\n\x07 \N{SNOWMAN}', is_error=True),
        RankStates(states=(), is_drained=True),
    ]
    sent, reader, found = b"".join(map(frame, messages)), FrameReader(FROM_AGENT), []
    cuts = random.Random(3)
    while sent:
        size = cuts.randrange(1, 9)
        found += list(reader.feed(sent[:size]))
        sent = sent[size:]
    assert found == messages


def test_orders_come_out_as_they_went_in() -> None:
    messages = [Go(words=("--proxy-id", "1")), Order(what=1, number=15)]
    assert list(FrameReader(TO_AGENT).feed(b"".join(map(frame, messages)))) == messages


@pytest.mark.parametrize(
    "said",
    [
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        raw([]),
        raw({"kind": "run", "command": "rm"}),
        raw({"kind": "line", "rank": -1, "text": "x", "is_error": False}),
        raw({"kind": "line", "rank": "1", "text": "x", "is_error": False}),
        raw({"kind": "beat", "more": 1}),
        raw({"kind": "starter_ended", "name": "mpiexec", "code": 10**9}),
        struct.pack(">I", 3) + b"\xff\xfe\xfd",
    ],
)
def test_anything_else_is_refused_in_one_line(said: bytes) -> None:
    with pytest.raises(FrameError) as error:
        list(FrameReader(FROM_AGENT).feed(said))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_rank_is_seen_by_the_launcher_as_by_its_agent() -> None:
    there = Member(3, NOW_S - 9)
    there.pid = 77
    there.observe(view(3, "saving", verb="all_reduce", failure=gave_up("ValueError: x", ago_s=0.5)).status, NOW_S - 2)
    there.ending = Ending(at_s=NOW_S - 1, signal_number=9)
    other_clock_s = 50.0
    here = HostMember(3, other_clock_s - 9)
    here.tell(rank_state(there, NOW_S), other_clock_s)
    seen, told = there.view(NOW_S), here.view(other_clock_s)
    assert (told.rank, told.pid, told.phase) == (3, 77, "saving") and told.idle_s == pytest.approx(2.0)
    assert told.ending is not None and told.ending.signal_number == 9
    assert told.ending.at_s == pytest.approx(other_clock_s - 1)
    assert seen.status is not None and told.status is not None
    assert (told.status.verb, told.status.step, told.status.updates) == ("all_reduce", 3, 5)
    assert told.status.failure is not None and told.status.failure.at_s == pytest.approx(other_clock_s - 0.5)
    here.lose_host("far", other_clock_s)
    assert here.ending == told.ending
