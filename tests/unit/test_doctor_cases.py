"""The doctor's score on real cases with known causes, where they are at hand beside the repository."""

from functools import cache
from pathlib import Path

import pytest

from ascend_moe_train.doctor.matcher import Matcher
from ascend_moe_train.doctor.rule import rule_book
from scripts.doctor_accuracy import Score, scored
from scripts.doctor_case import cases
from scripts.doctor_herrings import herring_texts, herrings

FOLDER = Path(__file__).parents[3] / "shared" / "cases" / "doctor"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the cases are not part of the repository: {FOLDER}")


@cache
def scores() -> tuple[Score, ...]:
    book = rule_book()
    return tuple(scored(case, book, Matcher(book)) for case in cases(FOLDER))


@pytest.mark.parametrize(("confidence", "least"), [("high", 0.95), ("medium", 0.85)])
def test_causes(confidence: str, least: float) -> None:
    right = [each.is_right for each in scores() if each.case.confidence == confidence]
    assert sum(right) >= least * len(right) > 0


def test_first_failing_ranks() -> None:
    right = [each.is_rank_right for each in scores() if each.case.is_multi and each.case.confidence == "high"]
    assert sum(right) >= 0.95 * len(right) > 0


def test_no_herring_is_chosen() -> None:
    assert [each.case.name for each in scores() if each.is_herring] == []


def test_no_herring_is_chosen_alone_or_beside_the_cause() -> None:
    book = rule_book()
    found = list(herrings(cases(FOLDER), herring_texts(FOLDER), book, Matcher(book)))
    assert len(found) > 100
    assert [each.text for each in found if each.is_chosen_alone or each.is_chosen_beside] == []


def test_sure_verdicts_are_right() -> None:
    sure = [each for each in scores() if each.verdict.confidence == "high"]
    assert sum(each.is_right for each in sure) >= 0.95 * len(sure) > 0


@pytest.mark.parametrize(("confidence", "least"), [("high", 0.7), ("medium", 0.6)])
def test_general_rules_find_most_of_it(confidence: str, least: float) -> None:
    right = [each.is_right_without for each in scores() if each.case.confidence == confidence]
    assert sum(right) >= least * len(right)
