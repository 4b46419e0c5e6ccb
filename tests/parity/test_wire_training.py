"""Runs whose token rows travel in fewer bits learn what others learn, and send what the formulas say."""

import pytest

from tests.parity.test_training import assert_payloads_are_as_computed, assert_same_order, reference
from tests.parity.wire_worker import cases
from tests.ranks import run_ranks

NEAR = 1e-4


@pytest.mark.parametrize(
    "layouts", [["ep2 in int8 and chunks"], pytest.param(["ep2 in bf16", "ep2 in fp16"], marks=pytest.mark.slow)]
)
def test_losses_and_bytes(layouts: list[str]) -> None:
    of_ranks = run_ranks(2, "tests.parity.wire_worker:on_rank", layouts, deadline_s=600)
    for number, layout in enumerate(layouts):
        case, by_rank = cases()[layout], [results[number] for results in of_ranks]
        expected = [figures["loss"] for figures in reference(case.reference)["figures"]]
        for result in by_rank:
            assert [figures["loss"] for figures in result["figures"]] == pytest.approx(expected, rel=NEAR)
            assert all(figures["applied"] for figures in result["figures"])
        assert_same_order(case, by_rank)
        assert_payloads_are_as_computed(case, by_rank)
