"""Counts of captures, as words."""

import pytest

from ascend_moe_train.profile.numbers import counted


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 steps"), (1, "1 step"), (1.04, "1 step"), (4.41667, "4.4 steps"), (1200, "1200 steps")]
)
def test_counted(count: float, words: str) -> None:
    assert counted(count, "step") == words
