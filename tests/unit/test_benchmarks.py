"""`make bench`: every benchmark has its share of half an hour, says what it took, and one that fails stops no other."""

import subprocess
import sys
from typing import Any

import pytest

from benchmarks import __main__ as every


def test_budgets_are_of_the_benchmarks_there_are_and_make_half_an_hour() -> None:
    assert set(every.BUDGET_S) == set(every.NAMES)
    assert sum(every.BUDGET_S.values()) <= every.MOST_S == 30 * 60


def test_all_run_and_the_one_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def run(command: list[str], *, check: bool) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, int(command[-1] == "benchmarks.convert"))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "convert", "overlap"])
    with pytest.raises(SystemExit, match=r"^failed: convert$"):
        every.main()
    assert commands == [[sys.executable, "-m", f"benchmarks.{name}"] for name in ("convert", "overlap")]
    said = capsys.readouterr().out
    assert f"convert: 0 s of {every.BUDGET_S['convert']}, " in said
    assert f"overlap: 0 s of {every.BUDGET_S['overlap']}, " in said
