"""Long sequences over ranks: a test of memory, not of speed."""

import math

import pytest

from tests.parity.long_context_worker import VOCAB
from tests.ranks import run_ranks

RANKS = 4
SHORT, MIDDLE, LONG = 2048, 8192, 32768
# what is measured of a whole process, in which other things are too
SLACK = 1.25


def peak_bytes(seq_len: int) -> list[int]:
    """Of each rank, in fresh processes."""
    case = {"seq_len": seq_len, "parallel": {"cp": RANKS}}
    results = run_ranks(RANKS, "tests.parity.long_context_worker:on_rank", case, deadline_s=1500)
    for result in results:
        assert result["loss"] == pytest.approx(math.log(VOCAB), rel=0.1)
    return [result["peak_bytes"] for result in results]


@pytest.mark.slow
def test_memory_of_a_rank_grows_with_the_length_and_not_with_its_square() -> None:
    times = (LONG - MIDDLE) / (MIDDLE - SHORT)
    by_rank = zip(*(peak_bytes(seq_len) for seq_len in (SHORT, MIDDLE, LONG)), strict=True)
    for rank, (short, middle, long) in enumerate(by_rank):
        assert long - middle <= SLACK * times * (middle - short), f"rank {rank}: {short}, {middle}, {long} bytes"
