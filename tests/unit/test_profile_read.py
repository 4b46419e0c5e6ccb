"""Readers of profilers' folders: every layout, and every trap of docs/profile.md."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ascend_moe_train.profile.groups import hashed
from ascend_moe_train.profile.load import load
from ascend_moe_train.profile.metrics import figures
from ascend_moe_train.profile.tables import Rank
from ascend_moe_train.profile.text import stamp_ns
from ascend_moe_train.profile.trace_stream import CHUNK_BYTES, events
from tests.profile_folders import (
    EXAMPLE,
    GROUP,
    GROUP_ID,
    Kernel,
    Message,
    communication,
    csv_text,
    kernel_rows,
    stamp,
    step_rows,
    trace_events,
    write_database,
    write_mindspore,
    write_mindspore_1,
    write_msprof,
    write_old_msprof,
    write_torch,
    write_trace,
)


def only(folder: Path) -> Rank:
    (rank,) = load(folder).ranks
    return rank


def value(rank: Rank, name: str) -> float | None:
    return next(each.value for each in figures(rank) if each.name == name)


def missing(rank: Rank, name: str) -> str:
    return next(each.missing for each in figures(rank) if each.name == name)


def parts(rank: Rank) -> list[float]:
    (step,) = rank.steps
    return [step.computing_us, step.exposed_us, step.overlapped_us, step.free_us]


def test_torch_folder(tmp_path: Path) -> None:
    write_torch(tmp_path, 3)
    rank = only(tmp_path)
    assert (rank.rank, rank.writer, rank.level, rank.metrics) == (3, "torch_npu", "Level1", "PipeUtilization")
    assert parts(rank) == [50.0, 30.0, 10.0, 10.0]
    assert {(each.type, each.core, each.count, each.total_us) for each in rank.kernels} == {
        ("MatMulV3", "AI_CORE", 1, 20.0),
        ("Cast", "AI_VECTOR_CORE", 1, 20.0),
        ("FlashAttentionScore", "MIX_AIC", 1, 20.0),
    }
    assert value(rank, "cube_utilisation") == pytest.approx(0.85)
    (collective,) = rank.collectives
    assert (collective.kind, collective.group, collective.idle_ms) == ("allReduce", GROUP_ID, 0.0)
    assert collective.exposed_ms == pytest.approx(0.030, abs=3e-4)  # its time stamp is a double in microseconds
    assert rank.groups[hashed(GROUP)].name == "dp_cp"


def test_group_numbers_are_hashes_of_names() -> None:
    assert hashed(GROUP) == GROUP_ID


def test_mindspore_folder_and_messages_in_the_wrong_bucket(tmp_path: Path) -> None:
    messages = [Message(start=50.0, duration=40.0, name="hcom_receive__473_0_1")]
    write_mindspore(tmp_path, 0, replace(EXAMPLE, messages=messages))
    rank = only(tmp_path)
    assert (rank.writer, rank.level, rank.metrics) == ("MindSpore", "Level1", "PipeUtilization")
    assert value(rank, "p2p") == pytest.approx(0.040)
    assert value(rank, "p2p_exposed") == pytest.approx(0.030 / 0.090, rel=0.01)


def test_rank_is_of_the_file_name_not_of_the_device(tmp_path: Path) -> None:
    output = write_torch(tmp_path, 2)
    head, row = step_rows(EXAMPLE)
    (output / "step_trace_time.csv").write_text(csv_text([["Device_id", *head], [4, *row]]))
    assert only(tmp_path).rank == 2


def test_newest_capture_of_a_rank_is_taken(tmp_path: Path) -> None:
    write_torch(tmp_path, 0, replace(EXAMPLE, step="8"), stamp="20260201120000000")
    write_torch(tmp_path, 0, replace(EXAMPLE, step="7"), stamp="20260101120000000")
    assert only(tmp_path).steps[0].step == "8"


@pytest.mark.parametrize("slices", [1, 3])
def test_msprof_folder_newest_export_in_slices(tmp_path: Path, slices: int) -> None:
    write_msprof(tmp_path, 5, slices=slices)
    rank = only(tmp_path)
    assert (rank.rank, rank.writer) == (5, "msprof")
    assert sum(each.count for each in rank.kernels) == 3
    assert parts(rank) == [50.0, 30.0, 10.0, 10.0]
    assert [each.name for each in rank.collectives] == [f"hcom_allReduce__473_0_1@{GROUP_ID}"]


def test_steps_of_a_year_2023_export_are_its_iterations(tmp_path: Path) -> None:
    write_old_msprof(tmp_path, 1)
    rank = only(tmp_path)
    assert (rank.rank, rank.writer) == (1, "msprof, per iteration")
    assert [each.step for each in rank.steps] == ["1", "2"]
    assert [each.e2e_us for each in rank.steps] == [90.0, 90.0]
    assert rank.iterations_us == (100.0, 200.0)
    assert {each.type for each in rank.kernels} == {"MatMulV3", "Cast", "FlashAttentionScore"}
    assert len(rank.collectives) == 2


def test_mindspore_1_folder(tmp_path: Path) -> None:
    write_mindspore_1(tmp_path / "profiler")
    ranks = load(tmp_path).ranks
    assert [rank.writer for rank in ranks] == ["MindSpore 1.x"] * 2
    assert ranks[1].sizes == {"pp": 2, "world": 2}
    assert [each.computing_us for each in ranks[1].steps] == [20_000.0] * 2
    assert [each.e2e_us for each in ranks[0].steps] == [20_000.0] * 2  # of the ticks, with 5 ms free
    (collective,) = ranks[0].collectives
    assert (collective.kind, collective.transit_ms, collective.wait_ms) == ("allReduce", 2.0, 1.0)
    assert collective.links == {"SDMA": (4.096, 2.0)}
    assert value(ranks[0], "p2p_exposed") == pytest.approx(3 / 20)


def test_database_gives_what_text_gives(tmp_path: Path) -> None:
    output = tmp_path / "a_1_20260101120000000_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    write_database(output / "ascend_pytorch_profiler_6.db")
    rank = only(tmp_path)
    assert rank.rank == 6
    assert parts(rank) == [50.0, 30.0, 10.0, 10.0]
    assert value(rank, "cube_mac") == 0.5
    assert value(rank, "vector_mte2") == 0.75
    assert rank.kernels[0].shapes == "128,64;64,32"
    assert [each.name for each in rank.collectives] == [f"hcom_allReduce__473_0_1@{GROUP_ID}"]
    assert value(rank, "cache_hit") == 0.75


def test_a_database_of_collectives_beside_text_changes_nothing(tmp_path: Path) -> None:
    output = write_torch(tmp_path, 0)
    before = only(tmp_path)
    write_database(output / "analysis.db", replace(EXAMPLE, kernels=[Kernel(start=0, duration=999)]))
    after = only(tmp_path)
    assert (after.kernels, after.steps, after.collectives) == (before.kernels, before.steps, before.collectives)


def test_kernels_on_two_streams_count_once(tmp_path: Path) -> None:
    output = write_torch(tmp_path, 0)
    (output / "step_trace_time.csv").unlink()
    rank = only(tmp_path)
    assert sum(each.total_us for each in rank.kernels) == 60.0
    assert parts(rank) == [50.0, 30.0, 10.0, 10.0]
    assert rank.sources["steps"] == "kernel_details.csv: union of its rows"


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("process", ["HCCL", "Communication"])
@pytest.mark.parametrize("name", ["trace_view.json", "trace_view.json.gz"])
def test_trace_alone(tmp_path: Path, as_text: bool, process: str, name: str) -> None:
    output = write_torch(tmp_path, 0)
    for path in output.iterdir():
        path.unlink()
    write_trace(output / name, trace_events(EXAMPLE, as_text=as_text, process=process))
    rank = only(tmp_path)
    assert parts(rank) == [50.0, 30.0, 10.0, 10.0]
    assert [each.kind for each in rank.collectives] == ["allReduce"]
    assert value(rank, "cache_hit") == 0.75
    assert rank.caches[0].weighted == pytest.approx(0.8125)


def test_gaps_before_a_launch_are_the_hosts(tmp_path: Path) -> None:
    output = write_torch(tmp_path, 0)
    write_trace(output / "trace_view.json", trace_events(EXAMPLE))
    launch = only(tmp_path).launch
    assert launch is not None
    # the only gap is from 30 to 40, and the kernel at 40 was launched at 38
    assert (launch.gaps_us, launch.host_bound_us, launch.delay_us) == (10.0, 8.0, 2.0)


def test_level_0_has_no_types_and_collectives_only_by_name(tmp_path: Path) -> None:
    output = write_torch(tmp_path, 0, replace(EXAMPLE, level="Level0"))
    rows = kernel_rows(EXAMPLE, {})
    place = {head: number for number, head in enumerate(rows[0])}
    for row in rows[1:]:
        row[place["Type"]] = row[place["Accelerator Core"]] = "N/A"
    kept = [number for number, head in enumerate(rows[0]) if "_ratio" not in str(head) and "cube" not in str(head)]
    (output / "kernel_details.csv").write_text(csv_text([[row[number] for number in kept] for row in rows]))
    (output / "communication.json").unlink()
    rank = only(tmp_path)
    assert {each.type for each in rank.kernels} == {"op0", "op1", "op2"}
    assert [each.kind for each in rank.collectives] == ["allReduce"]
    assert missing(rank, "cube_mac").startswith("not collected: set profiler_level=Level1 and aic_metrics")
    assert value(rank, "cube_mac") is None


def test_short_rows_are_read_by_name(tmp_path: Path) -> None:
    output = write_torch(tmp_path, 0)
    rows = kernel_rows(EXAMPLE, {})
    rows[1] = rows[1][:-1]
    (output / "kernel_details.csv").write_text(csv_text(rows))
    assert sum(each.count for each in only(tmp_path).kernels) == 3


@pytest.mark.parametrize(("preparing", "expected"), [("1.7e15", None), ("", None), ("-3.0", None), ("60.0", 0.060)])
def test_preparing_that_is_longer_than_the_step_is_none(tmp_path: Path, preparing: str, expected: float | None) -> None:
    write_torch(tmp_path, 0, replace(EXAMPLE, preparing=preparing))
    assert value(only(tmp_path), "preparing") == expected


def test_step_may_have_no_number_and_old_files_no_preparing(tmp_path: Path) -> None:
    output = write_torch(tmp_path, 0, replace(EXAMPLE, step=""))
    rows = [row[:-1] for row in step_rows(replace(EXAMPLE, step=""))]
    (output / "step_trace_time.csv").write_text(csv_text(rows))
    (output / "communication.json").write_text(json.dumps({"step": communication(EXAMPLE)["step7"]}))
    rank = only(tmp_path)
    assert rank.steps[0].step == rank.collectives[0].step == ""


def test_same_type_on_two_cores(tmp_path: Path) -> None:
    kernels = [Kernel(start=0, duration=10), Kernel(start=20, duration=5, core="MIX_AIC")]
    write_torch(tmp_path, 0, replace(EXAMPLE, kernels=kernels))
    assert [(each.type, each.core) for each in only(tmp_path).kernels] == [
        ("MatMulV3", "AI_CORE"),
        ("MatMulV3", "MIX_AIC"),
    ]


def test_time_stamps_keep_their_nanoseconds(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert stamp_ns("1790932512395153.069\t", path, 2, "ts") == 1790932512395153069
    assert stamp_ns("1695115378653323.5", path, 2, "ts") == 1695115378653323500
    assert stamp_ns("1695115378653323", path, 2, "ts") == 1695115378653323000
    assert stamp_ns("1.69512E+15", path, 2, "ts") == 1695120000000000000


def test_memory_units_and_owners(tmp_path: Path) -> None:
    heads = ["Component", "Timestamp(us)", "Total Allocated(MB)", "Total Reserved(MB)", "Device Type"]
    rows = [
        heads,
        ["PTA", stamp(1), 10, 20, "NPU:0"],
        ["PTA", stamp(5), 50, 80, "NPU:0"],
        ["APP", stamp(5), "", 90, ""],
    ]
    own = ["Name", "Size(KB)", "Allocation Time(us)", "Release Time(us)"]
    owners = [
        own,
        ["aten::empty", 2048, stamp(2), ""],
        ["aten::gone", 4096, stamp(2), stamp(3)],
        ["", -512, "", stamp(9)],
    ]
    extra = {"memory_record.csv": csv_text(rows), "operator_memory.csv": csv_text(owners)}
    write_torch(tmp_path, 0, replace(EXAMPLE, extra=extra))
    rank = only(tmp_path)
    assert value(rank, "memory_peak") == 90
    assert {each.component: each.peak_allocated_mb for each in rank.memory} == {"PTA": 50.0, "APP": 0.0}
    assert [(each.name, each.size_mb) for each in rank.owners] == [("aten::empty", 2.0)]


def test_kilobytes_of_msprof_are_megabytes_of_2_20(tmp_path: Path) -> None:
    output = write_msprof(tmp_path, 0)
    rows = [
        ["Device_id", "Component", "Timestamp(us)", "Total Reserved(KB)", "Device"],
        [0, "APP", stamp(0), 2048, "NPU"],
    ]
    (output / "npu_module_mem_20260101120000.csv").write_text(csv_text(rows))
    assert [each.peak_reserved_mb for each in only(tmp_path).modules] == [2.0]


def test_l2_cache_file_without_rates_is_no_rate(tmp_path: Path) -> None:
    rows = [["Stream Id", "Hit Rate", "Victim Rate", "Op Name"], [2, "N/A", 0.25, "a"], [2, "N/A", 1.25, "b"]]
    write_torch(tmp_path, 0, replace(EXAMPLE, extra={"l2_cache.csv": csv_text(rows)}))
    rank = only(tmp_path)
    assert value(rank, "cache_hit") is None
    assert "l2_cache.csv has no hit rate on this chip" in missing(rank, "cache_hit")
    assert rank.written["l2_victim_rate_mean"] == 0.75


def test_cache_counters_are_pooled(tmp_path: Path) -> None:
    output = write_torch(tmp_path, 0)
    head, *rows = kernel_rows(EXAMPLE, {})
    counters: list[list[object]] = [[9, 1, 0, 0], [0, 0, 70, 30], ["N/A"] * 4, ["N/A"] * 4]
    names = ["aic_write_cache_hit", "aic_write_cache_miss_allocate"]
    names += ["aiv_r0_read_cache_hit", "aiv_r0_read_cache_miss_allocate"]
    table = [[*head, *names], *([*row, *more] for row, more in zip(rows, counters, strict=True))]
    (output / "kernel_details.csv").write_text(csv_text(table))
    assert value(only(tmp_path), "cache_hit") == pytest.approx(79 / 110)


def test_one_kernel_of_msprof_op(tmp_path: Path) -> None:
    place = tmp_path / "OPPROF_20260101120000_ABCDEFGHIJKLMNOP"
    place.mkdir()
    (place / "OpBasicInfo.csv").write_text("Op Name,Op Type,Task Duration(us),\nmm,cube,25.5,\n")
    (place / "PipeUtilization.csv").write_text(
        "block_id,aic_total_cycles,aic_mac_ratio,aic_mte2_ratio,\n0,100,0.2,0.9,\n1,300,0.6,NA,\n"
    )
    (place / "L2Cache.csv").write_text(
        "block_id,aic_write_cache_hit,aic_write_cache_miss_allocate,\n0,90,10,\n1,10,90,\n2,NA,NA,\n"
    )
    rank = only(tmp_path)
    assert (rank.kernels[0].type, rank.kernels[0].total_us) == ("mm", 25.5)
    assert value(rank, "cube_mac") == pytest.approx(0.5)
    assert value(rank, "cache_hit") == 0.5
    (place / "OpBasicInfo.csv").unlink()
    assert value(only(tmp_path), "cache_hit") == 0.5


def test_cluster_output_gives_ranks_that_nothing_else_gives(tmp_path: Path) -> None:
    write_torch(tmp_path, 0)
    place = tmp_path / "cluster_analysis_output"
    place.mkdir()
    head, row = step_rows(EXAMPLE)
    rows = [[7, "rank", "0", *[1.0] * 9], [7, "rank", "1", *row[1:]], [7, "stage", "(0, 1)", *row[1:]]]
    table = csv_text([[head[0], "Type", "Index", *head[1:]], *rows])
    (place / "cluster_step_trace_time.csv").write_text(table)
    first, second = load(tmp_path).ranks
    assert (first.writer, second.writer) == ("torch_npu", "msprof-analyze")
    assert parts(first) == parts(second)


def test_kernels_that_are_not_all_leave_exposed_unknown(tmp_path: Path) -> None:
    write_torch(tmp_path, 0, replace(EXAMPLE, parts=(500.0, 30.0, 10.0, 10.0)))
    rank = only(tmp_path)
    assert rank.collectives[0].exposed_ms is None
    assert "is not whole" in rank.warnings[0]


def test_a_trace_is_cut_only_between_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tricky = {"ph": "X", "name": '}, {"', "args": {"list": [{"a": 1}, {"b": "]}, {"}], "quote": '\\"}, {'}}
    many = [{**tricky, "n": number} for number in range(CHUNK_BYTES // 40)]
    path.write_text(json.dumps(many))
    assert path.stat().st_size > 2 * CHUNK_BYTES
    assert [each["n"] for each in events(path)] == list(range(len(many)))
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": many[:9]}))
    assert len(list(events(path))) == 9
