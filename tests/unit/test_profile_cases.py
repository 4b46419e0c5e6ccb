"""Public captures, where they are: beside the repository, in shared/cases/profile. Each figure against what was worked
out by hand from the files (expected.json)."""

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.profile.analysis import Analysis, analyse
from ascend_moe_train.profile.groups import is_p2p
from ascend_moe_train.profile.load import load
from ascend_moe_train.profile.metrics import weighted
from ascend_moe_train.profile.tables import CUBE_CORES, VECTOR_CORES, Rank
from tests.rules.source import ROOT

CASES = ROOT.parent / "shared" / "cases" / "profile"
pytestmark = pytest.mark.skipif(not (CASES / "expected.json").is_file(), reason=f"needs the public captures in {CASES}")

STEP = {
    "computing_us": "computing_us",
    "comm_not_overlapped_us": "exposed_us",
    "overlapped_us": "overlapped_us",
    "communication_us": "communication_us",
    "free_us": "free_us",
    "stage_us": "stage_written_us",
    "bubble_us": "bubble_written_us",
    "preparing_us": "preparing_us",
    "e2e_us": "e2e_us",
}
TIMES = {
    "Elapse Time(ms)": "elapse_ms",
    "Transit Time(ms)": "transit_ms",
    "Wait Time(ms)": "wait_ms",
    "Synchronization Time(ms)": "sync_ms",
    "Idle Time(ms)": "idle_ms",
}


def near(expected: float, digits: int = 3) -> Any:
    """Relative 1e-6, or half of the last digit that expected.json has."""
    return pytest.approx(expected, rel=1e-6, abs=0.51 * 10**-digits)


@cache
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CASES / "expected.json").read_text())
    return found


@cache
def analysis_of(case: str) -> Analysis:
    return analyse(load(CASES / case))


def ranks_of(part: str) -> Iterator[tuple[str, int, Any, Rank]]:
    """Case, rank, what is expected of the part, and what was read."""
    for case, entry in expected().items():
        if not (CASES / case).is_dir():
            continue
        for key, values in entry.items():
            if key.startswith("rank_") and part in values:
                number = int(key.removeprefix("rank_"))
                rank = next(each for each in analysis_of(case).ranks if each.rank == number)
                yield case, number, values[part], rank


def test_steps() -> None:
    seen = 0
    for case, number, steps, rank in ranks_of("step_trace[hand from file]"):
        for step, found in zip(steps, rank.steps, strict=True):
            assert step["step"] == found.step
            for name, ours in STEP.items():
                if step[name] is not None:
                    assert getattr(found, ours) == near(step[name]), (case, number, name)
            share = step["computing_share"]
            assert found.computing_us / found.e2e_us == near(share, 6)
            seen += 1
    assert seen >= 10


def test_kernels() -> None:
    seen = 0
    for case, number, part, rank in ranks_of("kernel_details[hand]"):
        where = (case, number)
        assert sum(each.count for each in rank.kernels) == part["compute_rows"], where
        assert sum(each.total_us for each in rank.kernels) == near(part["compute_sum_duration_us"]), where
        times: dict[str, float] = {}
        for each in rank.kernels:
            times[each.type] = times.get(each.type, 0.0) + each.total_us
        for top in part["top_compute_types"]:
            assert times[top["op_type"]] == near(top["total_us"]), (where, top)
        cores: dict[str, float] = {}
        for each in rank.kernels:
            cores[each.core] = cores.get(each.core, 0.0) + each.total_us
        for core, total in part["duration_by_core_us"].items():
            assert core in ("HCCL", "COMMUNICATION") or cores[core] == near(total), (where, core)
        for name, of_cores, prefix in (("cube", CUBE_CORES, "aic"), ("vector", VECTOR_CORES, "aiv")):
            ratios = part.get(f"{name}_kernels_duration_weighted", {})
            groups = [each for each in rank.kernels if each.core in of_cores]
            for key, value in ratios.items():
                if key.endswith("_ratio"):
                    assert weighted(groups, key.split("_")[1]) == near(value, 6), (where, prefix, key)
            if "cube_utilization_pct" in ratios:
                found = analysis_of(case).value("cube_utilisation", number)
                assert found is not None
                assert 100 * found == near(ratios["cube_utilization_pct"], 6), where
        seen += 1
    assert seen >= 6


def test_collectives() -> None:
    seen = 0
    for case, number, steps, rank in ranks_of("communication[hand]"):
        for key, part in steps.items():
            own = [each for each in rank.collectives if f"step{each.step}" == key]
            assert len(own) == part["ops"]
            for name, ours in TIMES.items():
                assert sum(getattr(each, ours) for each in own) == near(part[name], 5), (case, number, name)
            blind = sum(each.elapse_ms for each in own if not each.transit_ms and not each.wait_ms)
            assert blind == near(part["elapse_ms_of_ops_with_no_transit_and_no_wait"], 5)
            for kind, total in part["elapse_ms_by_type"].items():
                assert sum(each.elapse_ms for each in own if each.kind == kind) == near(total, 5)
            p2p = sum(each.elapse_ms for each in own if is_p2p(each.kind))
            assert p2p == near(part["p2p_sendrecv_elapse_ms"], 5)
            seen += 1
    assert seen >= 10


def test_memory() -> None:
    seen = 0
    for case, number, part, rank in ranks_of("memory_record[hand]"):
        for component, peaks in part["by_component"].items():
            found = next(each for each in rank.memory if each.component == component)
            assert (found.rows, found.peak_reserved_mb, found.peak_allocated_mb) == (
                peaks["rows"],
                near(peaks["peak_reserved"]),
                near(peaks["peak_allocated"]),
            ), (case, number, component)
            seen += 1
    assert seen >= 10


def test_caches() -> None:
    for case, number, part, rank in ranks_of("l2_cache[file]"):
        assert rank.written["l2_cache_rows"] == part["rows"], (case, number)
        assert rank.written["l2_cache_rows_with_hit_rate"] == part["hit_rate_numeric_rows"]
        assert rank.written["l2_victim_rate_mean"] == near(part["victim_rate_mean"], 6)
        assert rank.written["l2_victim_rate_max"] == near(part["victim_rate_max"], 6)
    seen = 0
    for case, entry in expected().items():
        for key, part in entry.get("llc_hit_rate[hand from trace_view LLC 0 Read counters]", {}).items():
            rank = next(each for each in analysis_of(case).ranks if f"rank_{each.rank}" == key)
            found = next(each for each in rank.caches if each.kind == "LLC 0 Read")
            assert (found.samples, found.low, found.high) == (part["samples_llc0"], part["min"], part["max"])
            assert found.mean == near(part["mean"], 6)
            assert found.weighted == near(part["throughput_weighted_mean"], 6)
            seen += 1
    assert seen >= 4


def test_across_ranks() -> None:
    seen = 0
    for case, entry in expected().items():
        if (part := entry.get("cross_rank[hand]")) is None:
            continue
        matching = analysis_of(case).matching
        waits, last = matching.waits_ms(), matching.times_last()
        for rank, wait in part["wait_ms_by_rank"].items():
            assert waits[int(rank)] == near(wait), (case, rank)
        for rank, times in part["times_last_to_start"].items():
            assert last[int(rank)] == times, (case, rank)
        by_name = {each.name: each for each in matching.shared}
        for op in part["largest"]:
            found = by_name[op["op"]]
            assert (sorted(found.by_rank), found.last) == (op["ranks"], op["last_to_start"])
            assert found.spread_ms == near(op["spread_ms"]), op["op"]
        seen += 1
    assert seen >= 3


def test_pipeline_that_the_column_bubble_hides() -> None:
    case = "pt_qwen3_0p6b_pp2_4rank_l2"
    found, part = analysis_of(case), expected()[case]
    for rank, p2p_ms in part["pipeline_bubble[hand]"]["p2p_ms"].items():
        assert found.value("p2p", int(rank)) == near(p2p_ms, 5)
        share = part["pipeline_bubble[hand]"]["p2p_share_of_e2e"][rank]
        assert found.value("p2p_exposed", int(rank)) == near(share, 6)
    assert [each.bubble_written_ms for each in found.stages] == [0.0, 0.0]
    assert [each.ranks for each in found.stages] == [(0, 1), (2, 3)]
    words = next(each for each in found.advice if "stages" in each.title).figures
    assert "stage 1 (ranks 2, 3) computes 400.8 ms a step, stage 0 (ranks 0, 1) 231.1 ms: 169.7 ms more" in words[0]
    assert "ranks 0, 1 spend 318.4 ms a step (39 %)" in words[1]
    assert "the file's own column Bubble says 0" in words[1]


def test_iterations_of_2023() -> None:
    case = "ms_2p1_alexnet_dp2_prof"
    part = expected()[case]["overlap_analysis[hand: sum of dur on the Overlap Analysis track]"]
    seen = 0
    for rank in analysis_of(case).ranks:
        for step in rank.steps:
            values = part[f"device{rank.rank}_iter{step.step}"]
            assert step.computing_us == near(values["Computing"])
            assert step.exposed_us == near(values["Communication(Not Overlapped)"])
            assert step.communication_us == near(values["Communication"])
            assert step.free_us == near(values["Free"])
            assert step.e2e_us == near(values["e2e_us"])
            assert rank.iterations_us[int(step.step) - 1] == near(values["iteration_time_us_from_step_trace"])
            seen += 1
    assert seen == 6


def test_folders_of_mindspore_2_10() -> None:
    case = "ms_2p10_writer_on_real_timelines"
    by_folder = {each.folder: each for each in analysis_of(case).ranks}
    seen = 0
    for name, steps in expected()[case].items():
        if not isinstance(steps, list):
            continue
        for step, found in zip(steps, by_folder[name].steps, strict=True):
            for key, ours in STEP.items():
                assert getattr(found, ours) == near(step[key]), (name, key)
            seen += 1
    assert seen == 8


def test_mindspore_1() -> None:
    case = "ms_1x_pp2x4_cluster"
    for rank in analysis_of(case).ranks:
        part = expected()[case][f"rank{rank.rank}"]
        means = part["mean_ms"]
        assert len(rank.steps) == part["rows"]
        assert rank.computing_us / 1e3 == near(means["computation_time"], 4)
        assert rank.exposed_us / 1e3 == near(means["communication_alone_time"], 4)
        received = [each.bubble_written_us or 0.0 for each in rank.steps]
        assert sum(received) / len(received) / 1e3 == near(means["receive_alone_time"], 4)
        costs = part["hccl_raw_mean_ms[rows with numeric step]"]
        assert rank.written["communication_cost_ms"] == near(costs["communication_cost"], 4)
        assert rank.written["wait_cost_ms"] == near(costs["wait_cost"], 4)
        for name, value in part["flops_summary"].items():
            assert rank.written[name] == value


def test_cluster_output() -> None:
    case = "pt_910b_trimmed_8rank"
    part = expected()[case]["cluster_step_trace_time[hand]"]
    ranks = {each.rank: each for each in analysis_of(case).ranks}
    for row in part["ranks"]:
        rank = ranks[row["rank"]]
        assert rank.e2e_us == near(row["e2e_us"])
        assert rank.computing_us / rank.e2e_us == near(row["computing_share"], 6)
        assert rank.exposed_us / rank.e2e_us == near(row["comm_not_overlapped_share"], 6)


def test_verdicts() -> None:
    bounds = {"computing_share>0.85": "computing", "hccl_not_overlapped_share<0.15": "exposed_comm"}
    seen = 0
    for key, verdicts in expected()["_verdicts[hand]"]["by_case"].items():
        case, _, rank = key.partition("/rank_")
        if not (CASES / case).is_dir() or not rank.isdecimal():
            continue
        for name, metric in bounds.items():
            value = analysis_of(case).value(metric, int(rank))
            assert value is not None
            assert (value > 0.85 if metric == "computing" else value < 0.15) == verdicts[name], (key, name)
        cache_hit = analysis_of(case).value("cache_hit", int(rank))
        if isinstance(wanted := verdicts.get("llc0_read_hit_mean>0.90"), bool):
            assert cache_hit is not None and (cache_hit > 0.9) == wanted
        seen += 1
    assert seen >= 10


def test_databases_say_what_text_says(tmp_path: Path) -> None:
    case = "pt_qwen3_0p6b_pp2_4rank_l2"
    text = {"communication.json", "communication_matrix.json", "step_trace_time.csv"}
    shutil.copytree(CASES / case, tmp_path / case, ignore=lambda folder, names: text.intersection(names))
    found, wanted = analyse(load(tmp_path / case)), analysis_of(case)
    assert found.ranks[0].sources["collectives"] == "analysis.db: CommAnalyzerTime"
    assert found.matching.waits_ms() == pytest.approx(wanted.matching.waits_ms())
    assert found.matching.times_last() == wanted.matching.times_last()
    assert [each.gb_per_s for each in found.links] == pytest.approx([each.gb_per_s for each in wanted.links])
    for one, other in zip(found.kinds, wanted.kinds, strict=True):
        assert (one.kind, one.operators) == (other.kind, other.operators)
        assert (one.elapse_ms, one.size_mb) == (near(other.elapse_ms), near(other.size_mb))
    for name in ("step", "computing", "exposed_comm", "free"):
        assert found.value(name, 3) == near(wanted.value(name, 3) or 0.0, 6)
