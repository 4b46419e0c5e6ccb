"""Figures as text."""

import math

import pytest

from ascend_moe_train import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_500_000_000, "1.50 GB"),
        (999_999, "1.00 MB"),
        (12_345, "12.3 kB"),
        (2e18, "2000 PB"),
    ],
)
def test_bytes(value: float, text: str) -> None:
    assert units.format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.042, "42 ms"), (7.5, "7.5 s"), (59.96, "1:00"), (200, "3:20"), (7384, "2:03:04"), (math.nan, "n/a")],
)
def test_seconds(value: float, text: str) -> None:
    assert units.format_seconds(value) == text


def test_rates_counts_shares() -> None:
    assert units.format_flops_per_s(70.6e9) == "70.6 GFLOP/s"
    assert units.format_flops_per_s(math.inf) == "n/a"
    assert units.format_count(30_500_000_000) == "30.5 B"
    assert units.format_count(512) == "512"
    assert units.format_share(0.531) == "53.1 %"
    assert units.format_share(None) == "n/a"
