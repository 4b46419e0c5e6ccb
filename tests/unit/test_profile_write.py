"""What our own runs write of profiled steps, read again by `amt profile`."""

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.parallel.comm import Group
from ascend_moe_train.parallel.spans import CallLog, Spans, TimedCall
from ascend_moe_train.profile.analysis import analyse
from ascend_moe_train.profile.load import load
from ascend_moe_train.profile.metrics import figures
from ascend_moe_train.profile.tables import Rank
from ascend_moe_train.profile.write import Capture, Phase, write_capture

ZERO_NS = 1_790_932_512_395_153_069
EP, PP = (0, 1), (0, 2)


def call(rank: int, verb: str, name: str, ranks: tuple[int, ...], start_s: float, end_s: float) -> TimedCall:
    group = Group(name=name, ranks=ranks, index=ranks.index(rank), content="expert rows")
    return TimedCall(verb=verb, group=group, payload_bytes=2_000_000, start_s=start_s, end_s=end_s)


def capture(rank: int = 0, late_s: float = 0.0) -> Capture:
    """Steps 10 and 11 of 1 s. In step 10: data 0.1, a graph 0.8 that stands still for 0.2 of an exchange, and beside
    0.1 of a sum; in step 11 a graph of 0.5 without any."""
    moved = call(rank, "all_to_all_v", "ep", EP, 5.3 + late_s, 5.5)
    beside = call(rank, "all_reduce", "dp", EP, 5.6, 5.7)
    return Capture(
        rank=rank,
        zero_ns=ZERO_NS,
        steps=[(10, 5.0, 6.0), (11, 6.0, 7.0)],
        phases=[
            Phase(name="data", start_s=5.0, end_s=5.1, computes=False),
            Phase(name="forward, backward", start_s=5.1, end_s=5.9, computes=True),
            Phase(name="update", start_s=6.5, end_s=7.0, computes=True),
        ],
        calls=[beside, moved, call(rank, "barrier", "world", EP, 9.0, 9.5)],
        waits_s=[(5.3 + late_s, 5.5), (5.4, 5.5)],
        axes={"pp": (rank,), "dp": EP, "ep": EP, "world": EP},
    )


def only(folder: Path) -> Rank:
    (rank,) = load(folder).ranks
    return rank


def test_parts_of_steps_are_what_was_put_in(tmp_path: Path) -> None:
    write_capture(tmp_path, capture())
    rank = only(tmp_path)
    first, second = rank.steps
    assert (first.step, second.step, rank.writer) == ("10", "11", "amt train")
    parts = (first.computing_us, first.exposed_us, first.overlapped_us, first.free_us)
    assert parts == pytest.approx((0.6e6, 0.2e6, 0.1e6, 0.2e6), abs=0.01)
    parts = (second.computing_us, second.exposed_us, second.overlapped_us, second.free_us)
    assert parts == pytest.approx((0.5e6, 0, 0, 0.5e6), abs=0.01)
    assert [(each.type, each.core, each.count) for each in rank.kernels] == [
        ("forward, backward", "CPU", 2),
        ("update", "CPU", 1),
    ]
    assert [each.total_us for each in rank.kernels] == pytest.approx([0.6e6, 0.5e6])
    assert [(each.name, each.count) for each in rank.host_calls] == [("data", 1)]
    assert rank.host_calls[0].total_us == pytest.approx(1e5)


def test_calls_keep_step_time_group_and_payload(tmp_path: Path) -> None:
    place = write_capture(tmp_path, capture())
    rank = only(tmp_path)
    moved, beside = rank.collectives
    assert (moved.step, moved.kind) == ("10", "alltoallv")
    assert moved.elapse_ms == pytest.approx(200)
    assert moved.start_ns == pytest.approx(ZERO_NS + 5_300_000_000, abs=300)
    assert [moved.exposed_ms, beside.exposed_ms] == pytest.approx([200, 0], abs=0.01)
    assert rank.groups[moved.group].name == "ep" and rank.groups[moved.group].ranks == EP
    assert moved.links == {"Payload": (2.0, 0.0)}
    rows = (place / "ASCEND_PROFILER_OUTPUT" / "communication_calls.csv").read_text().splitlines()
    assert rows[1] == "10,all_to_all_v,ep,expert rows,2000000,1790932517695153.069,200000.0"
    assert len(rows) == 3, "what began outside of the steps is left out"


def test_who_came_late_is_seen_over_ranks(tmp_path: Path) -> None:
    write_capture(tmp_path, capture(0))
    write_capture(tmp_path, capture(1, late_s=0.15))
    analysis = analyse(load(tmp_path))
    assert {analysis.layout.kinds[each.group] for each in analysis.capture.ranks[0].collectives} == {"EP", "DP"}
    waits = analysis.matching.waits_ms()
    assert [waits[0], waits[1]] == pytest.approx([150, 0], abs=0.01)


def test_messages_of_pipelines_are_nobody_elses(tmp_path: Path) -> None:
    """Each rank sends first, to the other: these are two messages, not one."""
    for rank in PP:
        sent = [call(rank, "send", "pp forward", PP, 5.2, 5.3), call(rank, "recv", "pp forward", PP, 5.3, 5.4)]
        one = capture(0)
        mine = {"rank": rank, "axes": {"pp": PP, "dp": (rank,), "world": (0, 1, 2, 3)}, "calls": sent}
        write_capture(tmp_path, Capture(**{**vars(one), **mine}))
    analysis = analyse(load(tmp_path))
    assert analysis.layout.stages == {0: 0, 2: 1}
    assert analysis.matching.shared == () and analysis.matching.drifted == ()
    assert [each.kind for each in analysis.capture.ranks[0].collectives] == ["send", "receive"]


def test_figures_that_a_cpu_does_not_have_say_so(tmp_path: Path) -> None:
    write_capture(tmp_path, capture())
    missing = {each.name: each.missing for each in figures(only(tmp_path)) if each.value is None}
    assert missing["cube_mac"] == missing["cache_hit"] == "not there in the profile of a run on CPUs"


def test_the_trace_has_steps_phases_and_collectives(tmp_path: Path) -> None:
    place = write_capture(tmp_path, capture())
    events: list[dict[str, Any]] = json.loads((place / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text())
    names = [each["name"] for each in events if each["ph"] == "X"]
    assert names[:2] == ["ProfilerStep#10", "ProfilerStep#11"] and {"data", "update", "Computing"} < set(names)
    threads = [each["args"]["name"] for each in events if each["name"] == "thread_name"]
    assert threads == ["Group ep Communication", "Group dp Communication"]


def test_the_command_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_capture(tmp_path, capture())
    assert main(["profile", "check", str(tmp_path), "--exposed-comm", "0.15", "--no-cache"]) == 0
    assert main(["profile", "show", str(tmp_path), "--json", "--no-cache"]) == 0
    assert "amt train" in capsys.readouterr().out


def test_a_log_is_told_of_calls_and_waits_while_it_is_there() -> None:
    spans, group = Spans(), Group(name="ep", ranks=EP, index=0)
    spans.ran("barrier", group, 0, 1.0)
    spans.log = log = CallLog(clock=lambda: 7.0)
    spans.ran("all_gather", group, 32, 2.0)
    spans.waited("all_gather", group, 0.5)
    spans.log = None
    spans.ran("barrier", group, 0, 1.0)
    assert log.calls == [TimedCall(verb="all_gather", group=group, payload_bytes=32, start_s=5.0, end_s=7.0)]
    assert log.waits_s == [(6.5, 7.0)]
    assert [each.calls for each in spans.take().calls] == [2, 1]
