"""What ranks say together: waits, clocks, stages, stragglers, the critical path; and the advice that follows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ascend_moe_train.profile.analysis import Analysis, analyse
from ascend_moe_train.profile.groups import kind_of, kind_of_pattern
from ascend_moe_train.profile.intervals import Intervals, Stamps
from ascend_moe_train.profile.load import load
from ascend_moe_train.profile.thresholds import Threshold
from tests.profile_folders import EXAMPLE, Folder, Kernel, Message, write_torch

CROSS = "hcom_allReduce__473_{}_1"
SEND = "hcom_batchSendRecv__9{}_1_1"


def analysed(home: Path, folders: Sequence[Folder]) -> Analysis:
    for rank, folder in enumerate(folders):
        write_torch(home, rank, folder)
    return analyse(load(home))


def pair(late_by: float, *, computing: float = 50.0, free: float = 10.0, shift: float = 0.0) -> list[Folder]:
    """Two ranks: the second comes late to the only all-reduce, and both leave it together."""
    messages = [Message(start=50.0, duration=40.0 + late_by)]
    late = [Message(start=50.0 + late_by + shift, duration=40.0)]
    on_time = replace(EXAMPLE, messages=messages, parts=(50.0, 30.0, 10.0, 10.0))
    return [on_time, replace(EXAMPLE, messages=late, parts=(computing, 30.0, 10.0, free))]


def test_waits_are_own_time_less_the_shortest(tmp_path: Path) -> None:
    matching = analysed(tmp_path, pair(25.0)).matching
    assert matching.waits_ms() == {0: pytest.approx(0.025), 1: 0.0}
    assert matching.times_last() == {1: 1}


def test_clocks_are_compared_at_the_ends(tmp_path: Path) -> None:
    matching = analysed(tmp_path, pair(25.0, shift=5_000_000.0)).matching
    assert matching.offsets_ns[1] - matching.offsets_ns[0] == pytest.approx(5_000_000_000, abs=1000)
    assert matching.times_last() == {1: 1}


def test_groups_with_other_counts_are_left_out(tmp_path: Path) -> None:
    folders = pair(25.0)
    more = [*folders[1].messages, Message(start=95.0, duration=1.0, name=CROSS.format(1))]
    found = analysed(tmp_path, [folders[0], replace(folders[1], messages=more)])
    assert found.matching.shared == ()
    assert "1 groups have other numbers of collectives on some ranks" in found.warnings[0]


@pytest.mark.parametrize(
    ("computing", "free", "cause"),
    [(75.0, 10.0, "slow compute"), (50.0, 35.0, "host-bound"), (50.0, 10.0, "late arrival")],
)
def test_cause_of_a_straggler(tmp_path: Path, computing: float, free: float, cause: str) -> None:
    (late,) = analysed(tmp_path, pair(25.0, computing=computing, free=free)).stragglers
    assert (late.rank, late.times) == (1, 1)
    assert late.delay_ms == pytest.approx(0.025)
    assert late.cause.startswith(cause)


def test_more_tokens_and_slow_links_are_causes(tmp_path: Path) -> None:
    def experts(rows: int) -> Kernel:
        return Kernel(start=0, duration=70, type="GroupedMatmul", shapes=f"{rows},64;8,64,64")

    first, second = pair(25.0, computing=75.0)
    few, many = (replace(each, kernels=[experts(rows)]) for each, rows in ((first, 1000), (second, 1500)))
    found = analysed(tmp_path / "tokens", [few, many])
    assert found.stragglers[0].cause == "more tokens: 1.50 times the rows of its peers in grouped matmuls"
    advice = next(each for each in found.advice if each.title == "experts are not equally busy")
    assert advice.gain_ms == pytest.approx(0.070 * (1 - 1.25 / 1.5))
    assert "model.moe.aux_loss_coef" in advice.keys
    first, second = pair(25.0)
    slow = replace(second, messages=[replace(second.messages[0], size_mb=1.0)])
    fast = replace(first, messages=[replace(first.messages[0], size_mb=100.0)])
    assert analysed(tmp_path / "links", [fast, slow]).stragglers[0].cause.startswith("slow link: 25.0 GB/s against")


def pipeline() -> list[Folder]:
    """Two stages of two ranks: stage 1 computes twice as long, and stage 0 waits for its messages."""
    found = []
    for rank in range(4):
        stage = rank % 2
        computing = 40.0 + 40.0 * stage
        name = SEND.format(rank // 2)
        message = Message(start=40.0 + 40.0 * stage, duration=50.0 - 40.0 * stage, name=name, group=f"p{rank // 2}")
        kernels = [Kernel(start=0, duration=computing, mac=0.8)]
        parts = (computing, 50.0 - 40.0 * stage, 0.0, 0.0)
        found.append(Folder(kernels=kernels, messages=[message], parts=parts, pp=2, stage=stage))
    return found


def test_stages_and_the_bubble(tmp_path: Path) -> None:
    found = analysed(tmp_path, pipeline())
    assert [each.ranks for each in found.stages] == [(0, 2), (1, 3)]
    assert [each.computing_ms for each in found.stages] == [pytest.approx(0.040), pytest.approx(0.080)]
    assert [each.p2p_ms for each in found.stages] == [pytest.approx(0.050), pytest.approx(0.010)]
    assert [each.p2p_wait_ms for each in found.stages] == [pytest.approx(0.040), pytest.approx(0.0)]
    assert found.value("p2p_exposed", 0) == pytest.approx(50 / 90)
    assert found.stragglers == ()  # another stage is no peer
    first = found.advice[0]
    assert first.title == "the pipeline's stages do not compute equally long"
    assert first.gain_ms == pytest.approx(0.020)
    assert "parallel.stage_layers" in first.keys
    assert "the file's own column Bubble says 0" in first.figures[1]


def test_critical_path_goes_through_the_rank_that_was_late(tmp_path: Path) -> None:
    first, second = pair(25.0)
    more = Message(start=100.0, duration=30.0, name=CROSS.format(1))
    late_first = Message(start=120.0, duration=10.0, name=CROSS.format(1))
    folders = [
        replace(first, messages=[replace(first.messages[0], start=40.0, duration=50.0), late_first]),
        replace(second, messages=[replace(second.messages[0], start=70.0, duration=20.0), more]),
    ]
    path = analysed(tmp_path, folders).path
    assert [(each.rank, round(each.start_ms, 3), round(each.end_ms, 3)) for each in path] == [
        (1, 0.0, 0.07),
        (1, 0.07, 0.09),
        (0, 0.09, 0.12),
        (0, 0.12, 0.13),
    ]


def test_thresholds_are_of_the_worst_rank(tmp_path: Path) -> None:
    for rank, folder in enumerate(pair(25.0, free=110.0)):
        write_torch(tmp_path, rank, folder)
    wanted = [
        Threshold(metric="free", share=0.2, at_least=False),
        Threshold(metric="cache_hit", share=0.9, at_least=True),
    ]
    free, cache = analyse(load(tmp_path), wanted).verdicts
    assert (free.passed, free.worst_rank) == (False, 1)
    assert free.worst == pytest.approx(110 / 190)
    assert cache.passed is None
    assert cache.words.startswith("cache_hit >= 90 %: not collected: set aic_metrics=L2Cache")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("dp_cp", "DP"), ("tp", "TP"), ("exp", "EP"), ("pp", "PP"), ("cp", "CP"), ("embd", "embedding"), ("x", None)],
)
def test_names_of_groups(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


def test_groups_without_a_name_are_told_by_their_operators() -> None:
    assert kind_of_pattern(frozenset({"alltoallv", "allGather"})) == "EP"
    assert kind_of_pattern(frozenset({"send", "receive"})) == "PP"
    assert kind_of_pattern(frozenset({"allReduce"})) == "unknown"


def test_groups_without_a_name_are_told_by_their_ranks(tmp_path: Path) -> None:
    message = Message(start=50.0, duration=40.0, group="123")
    found = analysed(tmp_path, [replace(EXAMPLE, messages=[message])] * 2)
    assert [each.kind for each in found.kinds] == ["DP"]
    alone = analysed(tmp_path / "alone", [replace(EXAMPLE, messages=[message])])
    assert [each.kind for each in alone.kinds] == ["unknown"]


def test_intervals_against_a_line_of_cells() -> None:
    source = np.random.default_rng(1)
    for _ in range(50):
        starts, sizes = source.integers(0, 60, (2, 12))
        other_starts, other_sizes = source.integers(0, 60, (2, 7))
        cells = np.zeros((2, 130), bool)
        for row, pairs in enumerate((zip(starts, sizes, strict=True), zip(other_starts, other_sizes, strict=True))):
            for start, size in pairs:
                cells[row, start : start + size] = True
        one = sorted_union(starts, starts + sizes)
        other = sorted_union(other_starts, other_starts + other_sizes)
        assert one.total_ns == cells[0].sum()
        assert one.common_with(other) == (cells[0] & cells[1]).sum()


def sorted_union(starts: Stamps, ends: Stamps) -> Intervals:
    order = np.argsort(starts, kind="stable")
    return Intervals.merged(starts[order].astype(np.int64), ends[order].astype(np.int64))
