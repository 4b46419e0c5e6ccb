"""Timelines of the schedules: closed forms, messages that travel, unequal stages; `amt schedule`."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.parallel.config import ScheduleName
from ascend_moe_train.parallel.schedule import COMPUTE, Action, Kind, schedule
from ascend_moe_train.parallel.timeline import EqualStages, Timeline, equal_stages, simulate

STAGES, MICRO = (1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 16, 32)
FORWARD_S, BACKWARD_S, WEIGHT_S = 1.25, 2.0, 0.75


def timeline(name: ScheduleName, num_stages: int, num_micro: int, chunks: int = 1, send_s: float = 0.0) -> Timeline:
    durations = equal_stages(name, chunks, forward_s=FORWARD_S, backward_s=BACKWARD_S, weight_s=WEIGHT_S, send_s=send_s)
    return simulate(schedule(name, num_stages, num_micro, chunks), durations)


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("num_micro", MICRO)
def test_bubbles_in_closed_form(num_stages: int, num_micro: int) -> None:
    # Narayanan et al., 2021, section 2.2: (p - 1) / m, and 1 / chunks of it if the micro-batches divide by p
    ratio = (num_stages - 1) / num_micro
    for name in ("gpipe", "1f1b"):
        found = timeline(name, num_stages, num_micro)
        assert found.bubble_to_work == pytest.approx(ratio)
        assert found.bubble_share == pytest.approx(ratio / (1 + ratio))
    for chunks in (2, 3, 4):
        bubble = timeline("interleaved", num_stages, num_micro, chunks).bubble_to_work
        if num_micro % num_stages == 0:
            assert bubble == pytest.approx(ratio / chunks)
        assert bubble <= ratio * (1 + 1e-12)
    # Qi et al., 2024, table 2: (p - 1) (F + B - W), where B is the first part of the backward pass
    if num_micro >= num_stages:
        bubble_s = (num_stages - 1) * (FORWARD_S + BACKWARD_S - 2 * WEIGHT_S)
        expected = bubble_s / (num_micro * (FORWARD_S + BACKWARD_S))
        assert timeline("zero_bubble", num_stages, num_micro).bubble_to_work == pytest.approx(expected)


def test_zero_bubble_leaves_a_third() -> None:
    def bubble(name: ScheduleName) -> float:
        return simulate(
            schedule(name, 4, 8), equal_stages(name, 1, forward_s=1, backward_s=2, weight_s=1)
        ).bubble_to_work

    assert bubble("zero_bubble") == pytest.approx(bubble("1f1b") / 3)


def test_spans() -> None:
    found = simulate(schedule("1f1b", 2, 2), EqualStages(forward_s=1, backward_s=2, send_s=0.25))
    spans = {(stage, span.action): (span.start_s, span.end_s) for stage in range(2) for span in found.spans[stage]}
    assert spans[0, Action(Kind.FORWARD, 0)] == (0, 1)
    assert spans[0, Action(Kind.SEND_FORWARD, 0)] == (1, 1)
    assert spans[1, Action(Kind.RECV_FORWARD, 0)] == (0, 1.25)
    assert spans[1, Action(Kind.BACKWARD, 0)] == (2.25, 4.25)
    assert spans[1, Action(Kind.RECV_FORWARD, 1)] == (4.25, 4.25)
    assert spans[0, Action(Kind.RECV_BACKWARD, 0)] == (2, 4.5)
    assert spans[0, Action(Kind.BACKWARD, 1)] == (7.5, 9.5)
    assert (found.step_s, found.busy_s) == (9.5, (6, 6))
    assert found.bubble_shares == pytest.approx((3.5 / 9.5, 3.5 / 9.5))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_nothing_starts_before_what_it_needs(name: ScheduleName) -> None:
    """Against a look at the whole timeline: pieces of the model in turn, each stage one thing at a time."""
    chunks = 2 if name == "interleaved" else 1
    found = timeline(name, 3, 5, chunks, send_s=0.5)
    at = {
        (span.action.kind, span.action.micro, span.action.chunk * 3 + stage): span
        for stage in range(3)
        for span in found.spans[stage]
    }
    for (kind, micro, piece), span in at.items():
        if kind is Kind.FORWARD and piece > 0:
            assert span.start_s >= at[kind, micro, piece - 1].end_s + 0.5
        if kind is Kind.BACKWARD:
            source = at.get((kind, micro, piece + 1))
            needed_s = at[Kind.FORWARD, micro, piece].end_s if source is None else source.end_s + 0.5
            assert span.start_s >= needed_s
        if kind is Kind.WEIGHT:
            assert span.start_s >= at[Kind.BACKWARD, micro, piece].end_s
    for spans in found.spans:
        assert all(first.end_s <= second.start_s for first, second in pairwise(spans))


def test_the_slowest_stage_decides() -> None:
    def durations(stage: int, action: Action) -> float:
        return 0.0 if action.kind not in COMPUTE else 3.0 if stage == 2 else 1.0

    found = simulate(schedule("1f1b", 4, 8), durations)
    assert found.busy_s == (16, 16, 48, 16)
    assert found.step_s == 48 + 2 * (1 + 1)
    assert found.bubble_shares[2] < min(found.bubble_shares[stage] for stage in (0, 1, 3))


@pytest.mark.parametrize("duration_s", [-1.0, math.nan, math.inf])
def test_durations_that_cannot_be(duration_s: float) -> None:
    with pytest.raises(ValueError, match=r"stage 0: forward of micro-batch 0, chunk 0 takes .*: must be 0 or more"):
        simulate(schedule("1f1b", 2, 2), EqualStages(forward_s=duration_s, backward_s=1))
    with pytest.raises(ValueError, match="no pass takes any time"):
        simulate(schedule("1f1b", 2, 2), EqualStages(forward_s=0, backward_s=0, send_s=1))


def test_lists_that_wait_for_each_other() -> None:
    first, second = (list(listed) for listed in schedule("1f1b", 2, 1))
    second.remove(Action(Kind.SEND_BACKWARD, 0))
    with pytest.raises(ValueError, match="wait for each other: stage 0 at recv_backward of micro-batch 0"):
        simulate([first, second], EqualStages(forward_s=1, backward_s=1))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["schedule", *arguments]) == 0
    return capsys.readouterr().out


def test_drawing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--name", "zero_bubble", "--stages", "2", "--micro", "3")
    monkeypatch.setenv("COLUMNS", "60")
    lines = shown(capsys, *arguments).splitlines()
    assert lines[:2] == [
        "zero_bubble: 2 stages, 3 micro-batches",
        "Step 10.0 s, bubble 10.0 % of it, 11.1 % of the work",
    ]
    assert lines[3:5] == [
        "stage 0 |F0 F1 ...B0 W0 F2 B1 W1 B2 W2 |",
        "stage 1 |...F0 B0 F1 B1 W0 F2 B2 W1 W2 |",
    ]
    assert [line.split() for line in lines[-2:]] == [
        ["0", "10.0", "%", "2", "2"],
        ["1", "10.0", "%", "1", "2"],
    ]
    monkeypatch.setenv("COLUMNS", "30")
    assert shown(capsys, *arguments).splitlines()[3] == "stage 0 |F0F1..B0W0F2B1W1B2W2|"
    monkeypatch.setenv("COLUMNS", "1")
    assert shown(capsys, *arguments).splitlines()[3][:-1].startswith("stage 0 |")


def test_drawing_of_chunks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--name", "interleaved", "--stages", "2", "--micro", "2", "--chunks", "2", "--send-s", "0.5")
    monkeypatch.setenv("COLUMNS", "80")
    assert shown(capsys, *arguments).splitlines()[3:5] == [
        "stage 0 |F0aF1a......F0bF1b............B0b-- ...B1b-- ...B0a-- ...B1a-- |",
        "stage 1 |......F0aF1a......F0bB0b-- F1bB1b-- ...B0a-- ...B1a-- .........|",
    ]


def test_json_and_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "timeline.json"
    given = ["--name", "1f1b", "--stages", "4", "--micro", "8", "--forward-s", "0.5", "--json", "--out", str(out)]
    text = shown(capsys, *given)
    assert out.read_text() == text
    found: dict[str, Any] = json.loads(text)
    assert (found["step_s"], found["bubble_to_work"]) == (11 * 2.5, pytest.approx(3 / 8))
    assert [stage["in_flight"] for stage in found["stages"]] == [4, 3, 2, 1]
    action = {"kind": "forward", "micro": 0, "chunk": 0, "start_s": 0.0, "end_s": 0.5}
    assert found["stages"][0]["actions"][0] == action


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--name 1f1 --stages 4 --micro 8", "'1f1' is not one of 'gpipe', '1f1b', 'interleaved', 'zero_bubble'"),
        ("--name 1f1b --stages 0 --micro 8", "schedule 1f1b with 0 stages: must be 1 or more"),
        ("--name interleaved --stages 4 --micro 8", "schedule interleaved with 1 chunk: must be 2 or more"),
        ("--name 1f1b --stages 4 --micro 8 --chunks 2", "schedule 1f1b with 2 chunks: must be 1"),
        ("--name 1f1b --stages 99999 --micro 99999", "are 9999800001 passes: at most 50000 are shown"),
        ("--name 1f1b --stages 4 --micro 8 --send-s -1", "send_s -1.0 is not allowed: must be from 0 to 1000000"),
        ("--name 1f1b --stages 4 --micro 8 --forward-s nan", "forward_s nan is not allowed"),
        ("--name 1f1b --stages 4 --micro 8 --forward-s 0 --backward-s 0", "no pass takes any time"),
        ("--name zero_bubble --stages 4 --micro 8 --weight-s 3", "weight_s 3.0 is more than backward_s 2.0"),
        ("--name 1f1b --stages 4 --micro 8 --out /nowhere/x", "--out /nowhere/x: there is no folder /nowhere"),
    ],
)
def test_mistakes(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
