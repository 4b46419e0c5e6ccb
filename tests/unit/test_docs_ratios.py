"""The ratios of the READMEs are those of benchmarks/*.json (that the pages have them: test_docs_regions.py)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.docs_pages import ROOT
from scripts.docs_ratios import CLAIMS, HEADS, ratios


def altered(folder: Path, page: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the results in which `change` has been made to one."""
    for claim in CLAIMS:
        shutil.copy(ROOT / "benchmarks" / f"{claim.page}.json", folder)
    place = folder / f"{page}.json"
    result = json.loads(place.read_text(encoding="utf-8"))
    change(result)
    place.write_text(json.dumps(result), encoding="utf-8")
    return folder


@pytest.mark.parametrize("language", HEADS)
def test_each_claim_has_a_row_with_its_page(language: str) -> None:
    rows = ratios(language)[2:]
    assert len(rows) == len(CLAIMS)
    for claim, row in zip(CLAIMS, rows, strict=True):
        assert claim.says[language] in row
        assert row.endswith(f"(benchmarks/{claim.page}.md) |")


def test_another_result_is_another_row(tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        result["machine"] |= {"date": "2031-05-06", "processor": "abacus"}
        for row in result["rows"]:
            row["exposed against plain"] = {"dp2": 0.125, "zero1": 0.25, "ep2": 0.5}[row["layout"]]

    old, new = ratios("en"), ratios("en", altered(tmp_path, "overlap", change))
    ((before, after),) = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
    assert after.startswith(before.split(" | ")[0])
    assert after.endswith("| 0.125 – 0.5 | [2031-05-06, abacus](benchmarks/overlap.md) |")


def test_rows_are_divided(tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        for row in result["rows"]:
            row["seconds"] = {"transformers": 9.0, "export": 2.0}.get(row["variant"], 1.0)

    table = ratios("en", altered(tmp_path, "convert", change))
    assert [row for row in table if "| 4.5 | [" in row]


def test_the_best_of_ours_counts(tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        rows = {"ours, one process": 3, "ours, two ranks": 5.5, "theirs": 7}
        result["rows"] = [
            {"variant": name, "against the best peer": ratio, "share of the peak": ratio / 10}
            for name, ratio in rows.items()
        ]

    table = ratios("en", altered(tmp_path, "step_speed", change))
    assert [row.split(" | ")[1] for row in table if "/step_speed.md" in row] == ["5.5", "0.55"]


def test_ends_of_a_range_count(tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        result["rows"] = [
            {"of the run": "5", "1-bit over Adam": "0.5 to 2"},
            {"of the run": "5", "1-bit over Adam": "1"},
        ]

    table = ratios("en", altered(tmp_path, "onebit", change))
    assert len([row for row in table if "| 0.5 – 2 | [" in row]) == 1
    assert len([row for row in table if "| 5 | [" in row]) == 1


def test_a_figure_that_is_gone_is_named(tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        result["rows"] = [row for row in result["rows"] if row["rung"] != "kernels"]

    with pytest.raises(ValueError, match=r"ablate\.json.*'kernels'.*against_first"):
        ratios("en", altered(tmp_path, "ablate", change))
