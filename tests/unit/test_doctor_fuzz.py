"""Logs that are nonsense, cut, mixed or hostile: a verdict every time, never a trace, in time that grows with size."""

import random

import pytest

from ascend_moe_train.doctor.rule import LANGS, rule_book
from ascend_moe_train.doctor.words import as_json, verdict_lines
from tests.doctored import verdict_on

LINES = [log.encode() for rule in rule_book().rules.values() for log in rule.cases]
NAMES = ("worker_0.log", "rank_3/x.log", "scheduler.log", "msrun.log", "dmesg", "plog-7_1.log", "device-2/device-9.log")
BITS = (
    b"rank[",
    b"SeqNum=",
    b"2026-13-45-99:99:99",
    b"\xff\xfe",
    b"\0",
    b"[local]",
    b"{who}",
    b"-9",
    b"loss: nan",
    b"9" * 40,
)


def fuzzed(generator: random.Random) -> dict[str, str | bytes]:
    """Up to three sources of lines that are known, changed, or noise."""
    return {
        generator.choice(NAMES): b"\n".join(line(generator) for _ in range(generator.randrange(12)))
        for _ in range(generator.randrange(1, 4))
    }


def line(generator: random.Random) -> bytes:
    """A line."""
    kind = generator.randrange(5)
    if kind == 0:
        return generator.randbytes(generator.randrange(80))
    text = generator.choice(LINES)
    if kind == 1:
        return text[: generator.randrange(len(text) + 1)]
    if kind == 2:
        place = generator.randrange(len(text) + 1)
        return text[:place] + generator.choice(BITS) + text[place:]
    return f"[rank{generator.randrange(4)}]: ".encode() + text if kind == 3 else text


def check(seed: int) -> None:
    verdict = verdict_on(fuzzed(random.Random(seed)))
    for lang in LANGS:
        assert verdict_lines(verdict, rule_book(), lang, with_all=True)
    assert as_json(verdict, rule_book())["confidence"] in ("high", "medium", "low")


def test_a_few() -> None:
    for seed in range(150):
        check(seed)


@pytest.mark.slow
def test_ten_thousand() -> None:
    for seed in range(150, 10_150):
        check(seed)


def test_work_grows_with_size() -> None:
    """What is kept of hostile logs is bounded, however often a line comes."""
    for text in (b"[ERROR] remote rank:[" * 40, *LINES[:2]):
        verdict = verdict_on({"a.log": (text + b"\n") * 2200})
        assert len(verdict.evidence.events) <= 2100
