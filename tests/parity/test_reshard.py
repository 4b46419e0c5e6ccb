"""Losses by layout: what any layout saves, any other goes on from, and all are those kept in tests/golden."""

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


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks("reshards", tmp_path_factory.mktemp("runs"), deadline_s=1200)


def assert_equal(found: Any, wanted: Any) -> None:
    """Loss and gradient norm of each step."""
    assert len(found) == len(wanted)
    for each, expected in zip(found, wanted, strict=True):
        assert each == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_sees_the_losses_of_the_golden_file(layout: str, by_rank: list[dict[str, Any]]) -> None:
    curves = [result["curves"][layout] for result in by_rank[: num_ranks(layout)]]
    for curve in curves:
        assert_equal(curve, by_rank[0]["curves"][ONE_PROCESS])
        assert [loss for loss, _ in curve] == pytest.approx(golden_losses(layout), rel=TOLERANCE)


@pytest.mark.parametrize("loaded", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_a_layout_goes_on_from_what_another_saved(saved: str, loaded: str, by_rank: list[dict[str, Any]]) -> None:
    unbroken = by_rank[0]["curves"][ONE_PROCESS][NEXT]
    for result in by_rank[: num_ranks(loaded)]:
        assert_equal(result["continued"][loaded][saved], unbroken)


@pytest.mark.parametrize("name", ["first moments", "second moments", "balance biases"])
def test_what_is_not_loaded_would_be_seen(name: str, by_rank: list[dict[str, Any]]) -> None:
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
