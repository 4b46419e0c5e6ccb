"""Pipeline schedules: every list is proven, the checker finds faults, and small lists are those of the papers."""

from collections import deque
from collections.abc import Callable

import pytest

from ascend_moe_train.parallel.config import ScheduleName
from ascend_moe_train.parallel.schedule import SCHEDULES, Action, Kind, bounds, held, in_flight, schedule
from ascend_moe_train.parallel.schedule import walk as walked
from ascend_moe_train.parallel.schedule_check import check
from ascend_moe_train.parallel.streams import Way, check_streams

STAGES, MICRO, CHUNKS = range(1, 9), range(1, 33), range(2, 5)
LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.WEIGHT: "W"}
Lists = list[list[Action]]


def lists(name: ScheduleName, num_stages: int, num_micro: int, chunks: int = 1) -> Lists:
    return [list(listed) for listed in schedule(name, num_stages, num_micro, chunks)]


def passes(listed: list[Action]) -> str:
    return " ".join(f"{LETTERS[each.kind]}{each.micro}" for each in listed if each.kind in LETTERS)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_list_is_proven(name: ScheduleName) -> None:
    for num_stages in STAGES:
        for num_micro in MICRO:
            for chunks in CHUNKS if name == "interleaved" else (1,):
                actions = schedule(name, num_stages, num_micro, chunks)
                check(actions, num_micro, chunks, bounds(name, num_stages, num_micro, chunks))
                check_streams(actions)


def test_streams_around_the_ring_would_wait_for_ever() -> None:
    def in_one(kind: Kind, stage: int, num_stages: int) -> Way:
        return "forward" if "forward" in kind else "backward"

    check_streams(schedule("1f1b", 4, 8), in_one)
    with pytest.raises(ValueError, match=r"stage 0 at recv_forward of micro-batch .* stage 1 at "):
        check_streams(schedule("interleaved", 4, 8, 2), in_one)


def test_what_is_in_flight() -> None:
    assert [in_flight(listed) for listed in schedule("gpipe", 4, 8)] == [8, 8, 8, 8]
    for name in ("1f1b", "zero_bubble"):
        assert [in_flight(listed) for listed in schedule(name, 4, 8)] == [4, 3, 2, 1]
    # Narayanan et al., 2021: of num_stages micro-batches, and (num_stages - 1) / chunks more
    assert [in_flight(listed) for listed in schedule("interleaved", 4, 8, 2)] == [11, 9, 7, 5]


def test_zero_bubble_holds_no_more_than_1f1b() -> None:
    for num_stages in STAGES:
        for num_micro in MICRO:
            most = max(map(held, schedule("zero_bubble", num_stages, num_micro)))
            assert most == max(map(held, schedule("1f1b", num_stages, num_micro)))


def test_lists_of_the_papers() -> None:
    assert passes(lists("gpipe", 4, 3)[2]) == "F0 F1 F2 B0 B1 B2"
    assert passes(lists("1f1b", 4, 6)[0]) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"
    assert passes(lists("1f1b", 4, 6)[3]) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"
    # Narayanan et al., 2021, figure 4, device 1
    expected = "F0 F1 F2 F3 F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 F4 B2 F5 B3 F6 B0 F7 B1 B2 B3 B4 B5 B6 B7 B4 B5 B6 B7"
    assert passes(lists("interleaved", 4, 8, 2)[0]) == expected
    # Qi et al., 2024, section 2.3: the weights follow as many backward passes late as there are stages before
    assert passes(lists("zero_bubble", 4, 6)[0]) == "F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5"
    assert passes(lists("zero_bubble", 4, 6)[3]) == "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5"


def test_messages_are_beside_their_pass() -> None:
    for listed in schedule("interleaved", 3, 4, 2):
        for place, each in enumerate(listed):
            if each.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
                assert listed[place + 1] == Action(Kind(each.kind.removeprefix("recv_")), each.micro, each.chunk)
            if each.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                assert listed[place - 1] == Action(Kind(each.kind.removeprefix("send_")), each.micro, each.chunk)


def test_one_stage_sends_nothing() -> None:
    for name in SCHEDULES:
        (listed,) = schedule(name, 1, 3, 2 if name == "interleaved" else 1)
        assert {each.kind for each in listed} <= set(LETTERS)


def swap(listed: list[Action], first: Action, second: Action) -> None:
    i, j = listed.index(first), listed.index(second)
    listed[i], listed[j] = second, first


def swapped_receives(of: Lists) -> None:
    for kind in (Kind.RECV_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD):
        swap(of[1], Action(kind, 0), Action(kind, 1))


def swapped_gradients(of: Lists) -> None:
    for kind in (Kind.RECV_BACKWARD, Kind.BACKWARD, Kind.WEIGHT, Kind.SEND_BACKWARD):
        swap(of[1], Action(kind, 1), Action(kind, 2))


def missing_send(of: Lists) -> None:
    of[0].remove(Action(Kind.SEND_FORWARD, 2))


def missing_weight(of: Lists) -> None:
    of[2].remove(Action(Kind.WEIGHT, 3))


def done_twice(of: Lists) -> None:
    of[1].append(Action(Kind.FORWARD, 0))


def send_of_the_last(of: Lists) -> None:
    of[2].insert(of[2].index(Action(Kind.FORWARD, 0)) + 1, Action(Kind.SEND_FORWARD, 0))


def too_many(of: Lists) -> None:
    of[0] += [Action(Kind.FORWARD, 4), Action(Kind.BACKWARD, 4)]


def backward_first(of: Lists) -> None:
    swap(of[2], Action(Kind.FORWARD, 1), Action(Kind.BACKWARD, 1))


def without_its_gradient(of: Lists) -> None:
    swap(of[0], Action(Kind.RECV_BACKWARD, 1), Action(Kind.BACKWARD, 1))


def weight_first(of: Lists) -> None:
    swap(of[1], Action(Kind.BACKWARD, 2), Action(Kind.WEIGHT, 2))


def sent_before_it_is_made(of: Lists) -> None:
    swap(of[1], Action(Kind.BACKWARD, 2), Action(Kind.SEND_BACKWARD, 2))


def received_too_early(of: Lists) -> None:
    of[0].remove(Action(Kind.RECV_BACKWARD, 0))
    of[0].insert(0, Action(Kind.RECV_BACKWARD, 0))


def one_more_in_flight(of: Lists) -> None:
    for kind in (Kind.FORWARD, Kind.SEND_FORWARD):
        of[0].remove(Action(kind, 3))
    of[0][of[0].index(Action(Kind.RECV_BACKWARD, 0)) : 0] = [Action(Kind.FORWARD, 3), Action(Kind.SEND_FORWARD, 3)]


FAULTS: dict[Callable[[Lists], None], str] = {
    swapped_receives: r"message 0 from stage 0 to 1: for recv_forward of micro-batch 0.* stage 1 is at .*-batch 1",
    swapped_gradients: r"message 1 from stage 1 to 0: for recv_backward of micro-batch 2.* stage 0 is at .*-batch 1",
    missing_send: "stage 0: send_forward of micro-batch 2, chunk 0 is missing",
    missing_weight: "stage 2: weight of micro-batch 3, chunk 0 is missing",
    done_twice: "stage 1: forward of micro-batch 0, chunk 0 comes twice",
    send_of_the_last: "stage 2: send_forward of micro-batch 0, chunk 0 has no place here",
    too_many: "stage 0: forward of micro-batch 4, chunk 0 has no place here",
    backward_first: "stage 2: backward of micro-batch 1, chunk 0 comes before forward of",
    without_its_gradient: "stage 0: backward of micro-batch 1, chunk 0 comes before recv_backward of",
    weight_first: "stage 1: weight of micro-batch 2, chunk 0 comes before backward of",
    sent_before_it_is_made: "stage 1: send_backward of micro-batch 2, chunk 0 comes before backward of",
    received_too_early: "wait for each other: stage 0 at recv_backward of micro-batch 0, chunk 0; stage 1 at",
    one_more_in_flight: "stage 0: 4 in flight, at most 3 may be",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_checker_finds(fault: Callable[[Lists], None]) -> None:
    of = lists("zero_bubble", 3, 4)
    limits = bounds("zero_bubble", 3, 4)
    check(of, 4, 1, limits)
    fault(of)
    with pytest.raises(ValueError, match=FAULTS[fault]):
        check(of, 4, 1, limits)


def test_one_message_must_be_enough_in_a_channel() -> None:
    """Each chunk for all micro-batches before the next one: stage 0 sends four times before it receives."""
    of = lists("interleaved", 2, 4, 2)
    for listed in of:
        is_forward = {each: each.kind.endswith("forward") for each in listed}
        forwards = sorted((each for each in listed if is_forward[each]), key=lambda each: each.chunk)
        listed[:] = forwards + [each for each in listed if not is_forward[each]]
    deque(walked(of), maxlen=0)
    with pytest.raises(ValueError, match="wait for each other: stage 0 at send_forward of micro-batch 3, chunk 0"):
        check(of, 4, 2)


def test_chunks_of_one_stage_follow_each_other() -> None:
    of = lists("interleaved", 1, 2, 2)
    check(of, 2, 2)
    swap(of[0], Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 0, 1))
    with pytest.raises(ValueError, match=r"forward of micro-batch 0, chunk 1 comes before forward of .* chunk 0"):
        check(of, 2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 4, 8, 1), "schedule '2f2b' does not exist: there are gpipe, 1f1b, interleaved, zero_bubble"),
        (("1f1b", 0, 8, 1), "schedule 1f1b with 0 stages: must be 1 or more"),
        (("gpipe", 4, -1, 1), "schedule gpipe with -1 micro-batches: must be 1 or more"),
        (("interleaved", 4, 8, 1), "schedule interleaved with 1 chunk: must be 2 or more"),
        (("zero_bubble", 4, 8, 2), "schedule zero_bubble with 2 chunks: must be 1"),
    ],
)
def test_what_there_is_no_schedule_for(arguments: tuple[ScheduleName, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)
