"""Losses by layout: what any layout saves, any other goes on from, and all are those kept in tests/golden."""

from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from ascend_moe_train.selftest.curve import MORE, ONE_PROCESS, SAVED_AFTER, STEPS, TOLERANCE
from tests.parity.curve_cases import (
    GOLDEN,
    LAYOUTS,
    NUM_RANKS,
    golden_losses,
    golden_path,
    golden_text,
    num_ranks,
    on_ranks,
)

NEXT = slice(SAVED_AFTER, SAVED_AFTER + MORE)
# Of weights that are cut, and of those that are dealt to stages and replicas; all pairs are in `make test-all`.
QUICK = (ONE_PROCESS, "tp2+sp x ep2", "pp2 x 2 chunks x dp2 zero1")


def is_quick(*layouts: str) -> bool:
    return set(layouts) <= set(QUICK)


@cache
def of_ranks(quick: bool) -> list[dict[str, Any]]:
    """What each rank has of some layouts, or of all."""
    with TemporaryDirectory() as folder:
        return on_ranks("reshards", Path(folder), deadline_s=1200, layouts=QUICK if quick else tuple(LAYOUTS))


def assert_equal(found: Any, wanted: Any) -> None:
    """Loss and gradient norm of each step."""
    assert len(found) == len(wanted)
    for each, expected in zip(found, wanted, strict=True):
        assert each == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[pytest.mark.slow] * (not is_quick(each))) for each in LAYOUTS]
)
def test_every_rank_sees_the_losses_of_the_golden_file(layout: str) -> None:
    by_rank = of_ranks(is_quick(layout))
    curves = [result["curves"][layout] for result in by_rank[: num_ranks(layout)]]
    for curve in curves:
        assert_equal(curve, by_rank[0]["curves"][ONE_PROCESS])
        assert [loss for loss, _ in curve] == pytest.approx(golden_losses(layout), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [pytest.param(*pair, marks=[pytest.mark.slow] * (not is_quick(*pair))) for pair in product(LAYOUTS, LAYOUTS)],
)
def test_a_layout_goes_on_from_what_another_saved(saved: str, loaded: str) -> None:
    by_rank = of_ranks(is_quick(saved, loaded))
    unbroken = by_rank[0]["curves"][ONE_PROCESS][NEXT]
    for result in by_rank[: num_ranks(loaded)]:
        assert_equal(result["continued"][loaded][saved], unbroken)


@pytest.mark.parametrize("name", ["first moments", "second moments", "balance biases"])
def test_what_is_not_loaded_would_be_seen(name: str) -> None:
    by_rank = of_ranks(True)
    unbroken, lost = by_rank[0]["curves"][ONE_PROCESS][NEXT], by_rank[0]["lost"][name]
    assert max(abs(found / wanted - 1) for (found, _), (wanted, _) in zip(lost, unbroken, strict=True)) > 5 * TOLERANCE


def test_golden_files_are_of_these_layouts() -> None:
    assert max(map(num_ranks, LAYOUTS)) == NUM_RANKS
    assert sorted(GOLDEN.glob("loss_*.txt")) == sorted(golden_path(each) for each in LAYOUTS if each != ONE_PROCESS)
    for layout in LAYOUTS:
        losses = golden_losses(layout)
        assert len(losses) == STEPS
        assert golden_path(layout).read_text() == golden_text(layout, losses)


def test_golden_files_agree() -> None:
    one = golden_losses(ONE_PROCESS)
    assert one[-1] < 0.7 * one[0]
    for layout in LAYOUTS:
        assert golden_losses(layout) == pytest.approx(one, rel=TOLERANCE)
