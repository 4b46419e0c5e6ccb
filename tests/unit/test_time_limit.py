"""A run ends before its time is up, saved, and goes on from there."""

from pathlib import Path

import pytest

from ascend_moe_train.cluster.rank import started_s
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.train.stop import TimeLimit
from tests.small_run import MemoryView, newest_state, run, run_to_end, small_run


def test_the_longest_step_until_now_has_to_fit() -> None:
    limit = TimeLimit(end_s=100.0, reserve_s=20.0)
    # 60 s of compilation do not count, the step of 5 s does
    assert [limit.is_near(now_s) for now_s in (0.0, 60.0, 65.0, 70.0, 75.0, 75.5)] == [False] * 5 + [True]


def test_a_reserve_alone_may_end_it_at_once() -> None:
    assert TimeLimit(end_s=100.0, reserve_s=20.0).is_near(80.1)


@pytest.mark.parametrize("given", ["soon", "nan", "inf", ""])
def test_a_start_that_is_no_number(given: str) -> None:
    assert started_s({}) is None and started_s({"AMT_STARTED": "12.5"}) == 12.5
    with pytest.raises(ConfigError, match=f"^AMT_STARTED '{given}': must be seconds since 1970"):
        started_s({"AMT_STARTED": given})


def test_a_reserve_that_leaves_nothing(tmp_path: Path, small_corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"time_limit_s 100 leaves nothing to train in: time_reserve_s 120"):
        small_run(tmp_path, small_corpus, "run.time_limit_s=100")


def test_a_run_stops_in_time_and_goes_on(tmp_path: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = ("run.time_limit_s=3000", "run.time_reserve_s=100")
    config = small_run(tmp_path, small_corpus, "run.steps=8", "data.valid=[]", "batch.micro_sequences=4", *limit)
    view = MemoryView()
    # so that the clock of steps, and nothing else, comes to the end: one more step is 700 s
    monkeypatch.setattr("ascend_moe_train.train.stop.time.time", lambda: 700.0 * len(view.steps))
    assert run(config, view) == 143
    assert len(view.steps) == 4
    assert any(note.startswith("stopped by run.time_limit_s 3000 after step 4, saved") for note in view.notes)
    assert newest_state(tmp_path / "run")[0] == 4
    monkeypatch.undo()
    assert [record.step for record in run_to_end(config).steps] == [5, 6, 7, 8]
