"""docs/models.md says what the presets count now, and has a line within tolerance for every golden file."""

import re

import pytest

from scripts.parity_table import PAGE, between, size_lines
from tests.model_run import KERNEL_SETS
from tests.oracle.golden import FAMILY_CASES

TOLERANCE = 1e-4


def test_sizes_are_those_of_the_presets() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert between(text, "sizes", list(size_lines())) == text


def test_every_family_is_in_the_table_of_parity() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for case in FAMILY_CASES:
        for kernel_set in KERNEL_SETS:
            (line,) = re.findall(rf"^\| {case} \| .* \| {kernel_set} \| (.*)$", text, re.MULTILINE)
            logits, loss, gradient, _, tokens = line.strip(" |").split(" | ")
            assert max(map(float, (logits, loss, gradient))) < TOLERANCE
            assert tokens == "64 of 64"


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no markers"):
        between("# Models\n", "sizes", [])
