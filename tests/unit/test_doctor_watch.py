"""`amt doctor watch`: stalls and drifts of a run that goes on, each said once."""

import itertools
from pathlib import Path

import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.doctor.rule import rule_book
from ascend_moe_train.doctor.watch import Watch, watching
from tests.unit.test_doctor_training import write


def test_a_stall_is_said_once_for_a_step(tmp_path: Path) -> None:
    write(tmp_path, lambda step: {}, steps=30)
    written_s = (tmp_path / "metrics.jsonl").stat().st_mtime
    clock = itertools.chain([written_s + 4.0, written_s + 60.0], itertools.repeat(written_s + 61.0))
    watch = Watch(run_dir=tmp_path, book=rule_book(), now=lambda: next(clock))
    assert watch.look() == []
    lines = watch.look()
    assert len(lines) == 1
    assert "after step 30; a step takes" in lines[0]
    assert watch.look() == []


def test_a_drift_is_said_once(tmp_path: Path) -> None:
    write(tmp_path, lambda step: {"step_s": 0.5 + step / 200})
    watch = Watch(run_dir=tmp_path, book=rule_book(), now=lambda: 0.0)
    slept: list[float] = []
    lines = watching(watch, 3.0, slept.append)
    assert next(lines).startswith("warning: a step takes ")
    assert watch.look() == []


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "watch", "--once", str(tmp_path)]) == 2
    assert "there is no metrics.jsonl" in capsys.readouterr().err
    write(tmp_path, lambda step: {"drop_rate": 0.4})
    assert main(["doctor", "watch", "--once", "--json", str(tmp_path)]) == 1
    assert "40% of the routed tokens were dropped" in capsys.readouterr().out
    assert main(["doctor", "watch", "--every", "0", str(tmp_path)]) == 2
