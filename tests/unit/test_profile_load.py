"""Whole captures: links, several devices in one folder, ranks side by side, and what is kept for the next look."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ascend_moe_train.profile import kept, load
from ascend_moe_train.profile.across import link_classes
from ascend_moe_train.profile.settings import level_of, metrics_of
from benchmarks.profile_capture import write_capture
from tests.profile_folders import EXAMPLE, OP_SUMMARY, csv_text, kernel_rows, write_msprof, write_torch

LINK = {"Transport Type": "HCCS", "Transit Size(MB)": 30.0, "Transit Time(ms)": 2.0}
LOCAL = {**LINK, "Transport Type": "LOCAL"}


def test_links_are_of_the_totals(tmp_path: Path) -> None:
    ops = {"allreduce-total@1": {"0-0": LOCAL, "0-1": LINK}, "allreduce-top1@1": {"0-1": LINK}}
    text = json.dumps({"step7": {"p2p": {}, "collective": ops}})
    write_torch(tmp_path, 0, replace(EXAMPLE, extra={"communication_matrix.json": text}))
    (found,) = link_classes(load.load(tmp_path).ranks)
    assert (found.transport, found.size_mb, found.gb_per_s) == ("HCCS", 30.0, 15.0)


def test_links_of_msprof_are_a_list(tmp_path: Path) -> None:
    write_msprof(tmp_path, 0)
    (place,) = tmp_path.iterdir()
    link = {"Src Rank": 0, "Dst Rank": 1, "Transport Type": "RDMA", "Transit Size(MB)": 8.0, "Transit Time(ms)": 4.0}
    content = [{"op_name": "hcom_allReduce__473_0_1", "link info": [link]}]
    (place / "analyze" / "communication_matrix.json").write_text(json.dumps(content))
    (found,) = link_classes(load.load(tmp_path).ranks)
    assert (found.transport, found.gb_per_s) == ("RDMA", 2.0)


def test_several_devices_in_one_folder(tmp_path: Path) -> None:
    output = write_msprof(tmp_path, 0)
    (output.parent / "device_3").mkdir()
    head, *rows = kernel_rows(EXAMPLE, OP_SUMMARY)
    table = [["Device_id", *head], *([3 if place else 0, *row] for place, row in enumerate(rows))]
    (output / "op_summary_20260101120000.csv").write_text(csv_text(table))
    first, second = load.load(tmp_path).ranks
    assert (first.rank, second.rank) == (0, 3)
    assert [sum(each.count for each in rank.kernels) for rank in (first, second)] == [1, 2]


def test_ranks_read_side_by_side_are_those_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_capture(tmp_path, 4, 0.4)
    alone = load.load(tmp_path)
    monkeypatch.setattr(load, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert load.load(tmp_path) == alone
    assert [rank.rank for rank in alone.ranks] == [0, 1, 2, 3]


def test_what_was_read_is_kept_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, cache = tmp_path / "home", tmp_path / "cache"
    output = write_torch(home, 0)
    monkeypatch.setattr(kept, "KEPT_FROM_BYTES", 0)
    first = load.load(home, cache=cache)
    assert len(list(cache.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(kept, "read_rank", lambda source: pytest.fail("was read again"))
        assert load.load(home, cache=cache) == first
    (output / "kernel_details.csv").write_text("Name,Duration(us)\nnew,5\n")
    assert [each.type for each in load.load(home, cache=cache).ranks[0].kernels] == ["new"]
    for path in cache.iterdir():
        path.write_text("{}")
    assert load.load(home, cache=cache).ranks[0].kernels[0].total_us == 5.0


@pytest.mark.parametrize(
    ("given", "level"),
    [("Level1", "Level1"), ("ProfilerLevel.Level0", "Level0"), ("Level_none", "LevelNone"), (None, None)],
)
def test_names_of_levels(given: str | None, level: str | None) -> None:
    assert level_of({"a": {"profiler_level": given}}) == level


@pytest.mark.parametrize(
    ("given", "metrics"),
    [
        ("ACL_AICORE_PIPE_UTILIZATION", "PipeUtilization"),
        ("PipeUtilization", "PipeUtilization"),
        ("AicoreMetrics.L2Cache", "L2Cache"),
        ("ACL_AICORE_L0B_AND_WIDTH", "MemoryL0"),
        ("ACL_AICORE_NONE", None),
    ],
)
def test_names_of_counters(given: str, metrics: str | None) -> None:
    assert metrics_of({"_aic_metrics": given}) == metrics
