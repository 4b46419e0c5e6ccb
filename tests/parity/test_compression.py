"""Sums of gradients in few bits: what they are, what is made of what is lost, and what travels."""

from typing import Any

import numpy as np
import pytest

from ascend_moe_train.parallel.compress_costs import TwoStageSizes, low_rank_bytes
from ascend_moe_train.parallel.compressed import first_factor
from tests.oracle.compression import int8_blocks, low_rank, run_two_stage, sign_bits
from tests.oracle.differences import relative_error
from tests.parity.compression_worker import (
    BLOCK,
    HUGE,
    LENGTH,
    RANK,
    SHAPES,
    STEPS,
    TINY,
    gradient,
    matrices,
)
from tests.ranks import run_ranks

CODERS = {"int8": int8_blocks, "signs": sign_bits}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def of_ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, "tests.parity.compression_worker:on_rank", deadline_s=300)


@pytest.mark.parametrize("codec", CODERS)
def test_means_in_two_stages(codec: str, of_ranks: list[dict[str, Any]]) -> None:
    n = len(of_ranks)
    steps = [np.stack([gradient(rank, step) for rank in range(n)]) for step in range(STEPS)]
    expected = run_two_stage(steps, BLOCK, CODERS[codec])
    for result in of_ranks:
        found = result["two stages"][codec]
        # where rounding makes another code of a number, all later steps differ a little
        assert relative_error(found[0], expected[0]) < 1e-5
        close = [float(np.mean(np.abs(one - other) < 1e-3)) for one, other in zip(found, expected, strict=True)]
        assert min(close) > 0.98
        assert all(
            np.array_equal(one, other) for one, other in zip(found, of_ranks[0]["two stages"][codec], strict=True)
        )


@pytest.mark.parametrize("codec", CODERS)
def test_what_is_lost_comes_later(codec: str, of_ranks: list[dict[str, Any]]) -> None:
    n = len(of_ranks)
    true = np.cumsum([np.mean([gradient(rank, step) for rank in range(n)], axis=0) for step in range(STEPS)], axis=0)
    sums = np.cumsum(of_ranks[0]["two stages"][codec], axis=0)
    behind = [float(np.abs(one - other).mean()) for one, other in zip(sums, true, strict=True)]
    # without feedback it would grow with every step
    alone = np.cumsum(
        [np.abs(one - other).mean() for one, other in zip(np.diff(sums, axis=0), np.diff(true, axis=0), strict=True)]
    )
    assert behind[-1] < 0.4 * alone[-1] and behind[-1] < 2.0 * max(behind[: STEPS // 2])


def test_bytes_on_the_way(of_ranks: list[dict[str, Any]]) -> None:
    sizes = TwoStageSizes(size=LENGTH, ranks=len(of_ranks), block=BLOCK)
    for result in of_ranks:
        found = {verb: sum(size for name, size in result["sent"] if name == verb) for verb, _ in result["sent"]}
        assert found == sizes.sent_bytes(1)


def test_a_large_sum_of_signs_takes_a_thirty_second() -> None:
    sizes = TwoStageSizes(size=10_000_000, ranks=8, block=1024)
    whole = {verb: 4 * sizes.size // share for verb, share in (("all_to_all", 1), ("all_gather", 8))}
    for verb, size_bytes in sizes.sent_bytes(1).items():
        assert size_bytes * 32 == pytest.approx(whole[verb], rel=0.05)


def test_what_is_lost_of_a_skipped_step_is_not_remembered(of_ranks: list[dict[str, Any]]) -> None:
    for result in of_ranks:
        first, second, third = result["not good"]
        assert first == second > 0 and third != first


def test_products_of_two_thin_matrices(of_ranks: list[dict[str, Any]]) -> None:
    n, names = len(of_ranks), list(SHAPES)
    low = [name for name in names if name in ("wide", "tall")]
    factors = {name: first_factor(name, (SHAPES[name][1], RANK)) for name in low}
    lost = {name: np.zeros((n, *SHAPES[name])) for name in low}
    for step in range(STEPS):
        given = [matrices(rank, step) for rank in range(n)]
        for place, name in enumerate(names):
            x_n = np.stack([each[place] for each in given])
            expected = x_n.sum(axis=0)
            if name in low:
                mean, factors[name], lost[name] = low_rank(x_n, factors[name], lost[name])
                expected = n * mean
            for result in of_ranks:
                # rounding grows from step to step with what is lost
                assert relative_error(result["low rank"][step][place], expected) < (1e-5 if step == 0 else 2e-3), (
                    name,
                    step,
                )


def test_low_rank_loses_nothing_in_the_long_run(of_ranks: list[dict[str, Any]]) -> None:
    n, place = len(of_ranks), list(SHAPES).index("wide")
    true = np.sum([[matrices(rank, step)[place] for step in range(STEPS)] for rank in range(n)], axis=0)
    found = np.array([each[place] for each in of_ranks[0]["low rank"]])
    behind = np.abs(np.cumsum(found - true, axis=0)).mean(axis=(1, 2))
    assert behind[-1] < 0.5 * np.abs(found - true).mean(axis=(1, 2)).sum()


def test_low_rank_bytes() -> None:
    assert low_rank_bytes([(12, 40), (3, 2), (7,)], 2) == (4 * (52 * 2 + 6 + 7), 4 * (480 + 80))


def test_numbers_that_are_not_finite_are_seen_by_all_and_forgotten(of_ranks: list[dict[str, Any]]) -> None:
    seen = [True, False, False, True]
    for result in of_ranks:
        assert result["not finite"] == {"int8": seen, "powersgd": seen}


def test_sums_in_fp16_neither_overflow_nor_lose_what_is_small(of_ranks: list[dict[str, Any]]) -> None:
    n = len(of_ranks)
    true = np.sum([gradient(rank, 0).astype(np.float64) for rank in range(n)], axis=0)
    for result in of_ranks:
        found = result["fp16"]
        for name, factor in (("tiny", TINY), ("huge", HUGE)):
            assert relative_error(found[name], true * factor) < 2.0**-10, name
        assert not found["zero"].any()
        assert np.isnan(found["broken"][5]) and np.isfinite(np.delete(found["broken"], 5)).all()
