"""Logs that are nonsense, cut, mixed, packed or hostile: a verdict or one line every time, and bounded work."""

import random

import pytest

from tests.doctored import verdict_on
from tests.fuzzed_logs import fuzzed, judged, own_texts

QUICK, ALL = 300, 10_000
LINES = own_texts()


def outcomes(first: int, count: int) -> set[str]:
    return {judged(fuzzed(random.Random(seed), LINES)) for seed in range(first, first + count)}


def test_a_few() -> None:
    found = outcomes(0, QUICK)
    assert {"refused", "nothing"} < found
    assert len(found) > 50  # much of what is damaged is still told


@pytest.mark.slow
def test_ten_thousand() -> None:
    assert len(outcomes(QUICK, ALL)) > 100


def test_work_grows_with_size() -> None:
    """What is kept of hostile logs is bounded, however often a line comes."""
    for text in (b"[ERROR] remote rank:[" * 40 + b"\n", *LINES[:2]):
        verdict = verdict_on({"a.log": text * 2200})
        assert len(verdict.evidence.events) <= 2100
