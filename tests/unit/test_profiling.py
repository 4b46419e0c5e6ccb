"""Section `profile` of a run: what it refuses, when it collects, and what a run leaves."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import call, create_autospec

import pytest
from mindspore import profiler

from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.comm import Group
from ascend_moe_train.parallel.spans import Spans
from ascend_moe_train.profile.load import load
from ascend_moe_train.train.config import ProfileConfig
from ascend_moe_train.train.profiling import AscendSession, Profiling
from ascend_moe_train.train.ranks import Ranks, alone
from tests.launched import launched
from tests.small_run import make_corpus, run_to_end, small_run, write_run

Configured = Callable[..., RunConfig]
PAIR = Group(name="ep", ranks=(0, 1), index=0)


@pytest.fixture
def configured(tmp_path: Path, small_corpus: Path) -> Configured:
    return lambda *overrides: small_run(tmp_path, small_corpus, *overrides)


@pytest.mark.parametrize("steps", ["12:10", "0:3", "0", "-1", "3:", "a", "1:2:3", "1.5", "10 : 12", "true", "[1, 2]"])
def test_what_is_no_range_is_refused_in_one_line(steps: str, configured: Configured) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(f"profile.steps={steps}")
    assert "profile" in str(caught.value) and "\n" not in str(caught.value)


def test_steps_beyond_the_run_are_refused(configured: Configured) -> None:
    with pytest.raises(ConfigError, match=r"profile\.steps '39:41' goes beyond the last step: run\.steps is 40"):
        configured("profile.steps=39:41")


def test_both_ends_are_meant(configured: Configured) -> None:
    assert list(configured("profile.steps=39:40").profile.span) == [39, 40]
    assert list(configured("profile.steps=7").profile.span) == [7]
    assert list(configured().profile.span) == []


def watched(config: RunConfig) -> tuple[Ranks, Spans]:
    spans = Spans()
    return replace(alone(config), spans=spans), spans


def test_only_the_steps_are_collected_once(configured: Configured) -> None:
    config, notes = configured("profile.steps=3:4"), list[str]()
    ranks, spans = watched(config)
    profiling = Profiling(config, ranks, "cpu", 1, notes.append)
    has_log = []
    for step in (1, 2, 3, 4, 5, 3, 4, 5):  # back to step 2 after 5
        profiling.begin(step)
        with profiling.phase("update"):
            spans.ran("all_reduce", PAIR, 8, 0.0)
        has_log.append(spans.log is not None)
    profiling.close()
    assert has_log == [False, False, True, True, *[False] * 4]
    (rank,) = load(profiling.folder).ranks
    assert [each.step for each in rank.steps] == ["3", "4"] and len(rank.collectives) == 2
    assert notes == [f"profiled up to step 4: amt profile show {profiling.folder}"]


def test_a_run_that_ends_early_leaves_what_there_is(configured: Configured) -> None:
    config, notes = configured("profile.steps=3:40"), list[str]()
    with Profiling(config, alone(config), "cpu", 1, notes.append) as profiling:
        profiling.begin(3)
    (rank,) = load(profiling.folder).ranks
    assert [each.step for each in rank.steps] == ["3"]


def test_a_folder_that_is_not_empty_is_left_alone(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    config, notes = configured("profile.steps=3", f"profile.dir={tmp_path}"), list[str]()
    with Profiling(config, alone(config), "cpu", 1, notes.append) as profiling:
        profiling.begin(3)
    assert not list(tmp_path.glob("rank_*"))
    assert notes == [
        f"profile.steps '3': not profiled: {tmp_path} is not empty: remove it, or name another as profile.dir"
    ]


def test_steps_that_are_done_are_not_waited_for(configured: Configured) -> None:
    config, notes = configured("profile.steps=3"), list[str]()
    Profiling(config, alone(config), "cpu", 9, notes.append).close()
    assert notes == ["profile.steps '3': not profiled: step 9 is next"]


def test_a_profile_that_cannot_be_written_does_not_end_the_run(configured: Configured, tmp_path: Path) -> None:
    config, notes = configured("profile.steps=3", f"profile.dir={tmp_path / 'file' / 'in'}"), list[str]()
    with Profiling(config, alone(config), "cpu", 1, notes.append) as profiling:
        profiling.begin(3)
        (tmp_path / "file").write_text("no folder")
    assert notes == [f"the profile could not be written: {tmp_path / 'file' / 'in'}: Not a directory"]


def stand_in(made: Any) -> Any:
    """The module with its real names and values, whose profiler takes only what the real one does."""
    names = ("ProfilerLevel", "AicoreMetrics", "ExportType", "ProfilerActivity", "schedule", "_ExperimentalConfig")
    real = {name: getattr(profiler, name) for name in names}
    handler = create_autospec(profiler.tensorboard_trace_handler)
    return SimpleNamespace(**real, profile=made, tensorboard_trace_handler=handler)


def test_mindspores_profiler_is_called_as_it_wants_to_be(tmp_path: Path) -> None:
    """Against the signatures of the installed MindSpore; it runs on an NPU only."""
    made = create_autospec(profiler.profile)
    api = stand_in(made)
    session = AscendSession(ProfileConfig(steps="3:5", level="Level2", aic_metrics="L2Cache"), tmp_path, 3, api)
    for step in (3, 4, 5):
        session.step(step)
    session.finish()
    assert made.return_value.method_calls == [call.start(), call.step(), call.step(), call.stop()]
    given = made.call_args.kwargs
    settings, schedule = given["experimental_config"], given["schedule"]
    assert (settings.profiler_level, settings.aic_metrics) == (
        profiler.ProfilerLevel.Level2,
        profiler.AicoreMetrics.L2Cache,
    )
    assert [schedule(step).name for step in range(4)] == ["RECORD", "RECORD", "RECORD_AND_SAVE", "NONE"]
    assert given["start_profile"] is False
    api.tensorboard_trace_handler.assert_called_once_with(str(tmp_path))


def test_every_choice_is_one_of_mindspores() -> None:
    fields = ProfileConfig.model_fields
    for name, names in (("level", profiler.ProfilerLevel), ("aic_metrics", profiler.AicoreMetrics)):
        assert set(get_args(fields[name].annotation)) <= set(names.__members__)


def test_a_run_is_profiled(configured: Configured) -> None:
    config = configured(
        "run.steps=4", "optim.warmup_steps=1", "data.valid=[]", "profile.steps=2:3", "checkpoint.every=3"
    )
    view = run_to_end(config)
    folder = Path(config.run.dir) / "profile"
    assert f"profiled up to step 3: amt profile show {folder}" in view.notes
    (rank,) = load(folder).ranks
    assert [each.step for each in rank.steps] == ["2", "3"]
    assert {each.type for each in rank.kernels} == {"forward, backward", "update"}
    assert {each.name for each in rank.host_calls} == {"data", "checkpoint"}
    for step, record in zip(rank.steps, view.steps[1:3], strict=True):
        assert 0 < step.computing_us < 1e6 * record.step_s <= step.e2e_us


@pytest.mark.slow
def test_ranks_are_profiled_together(tmp_path: Path) -> None:
    run_yaml = write_run(tmp_path, make_corpus(tmp_path))
    launched(2, run_yaml, "run.steps=6", "batch.micro_sequences=1", "parallel.ep=2", "profile.steps=3:4")
    ranks = load(tmp_path / "run" / "profile").ranks
    assert [each.rank for each in ranks] == [0, 1]
    names = [[each.name for each in rank.collectives] for rank in ranks]
    assert names[0] == names[1] and any("alltoallv" in name for name in names[0])
