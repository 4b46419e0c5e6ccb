"""Damaged folders of profilers end in figures or in one line, never in a traceback, and never fill the memory."""

import io
import json
import random
import resource
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from ascend_moe_train.errors import UserError
from ascend_moe_train.profile.analysis import analyse, as_json
from ascend_moe_train.profile.compare import compare, comparison_screen
from ascend_moe_train.profile.load import load
from ascend_moe_train.profile.merged_trace import merged_trace
from ascend_moe_train.profile.page import page
from ascend_moe_train.profile.screen import screen
from tests.profile_folders import (
    EXAMPLE,
    csv_text,
    stamp,
    trace_events,
    write_database,
    write_mindspore,
    write_mindspore_1,
    write_msprof,
    write_old_msprof,
    write_torch,
    write_trace,
)
from tests.unit.test_profile_across import pipeline

MAX_BYTES = 2 * 2**30
HOSTILE = ["NaN", "-1", "1e308", "inf", "", "N/A", "-", "0x10", "٣", "9" * 400, '"', "\x00", "1,2", "null", "{}", "[]"]
HOSTILE += ['{"a": 1}', "true", "-0.0", "1e-320", "18446744073709551616", "Infinity", "\ud7ff", "<b>", "[bold]"]


def write_everything(home: Path) -> None:
    """One folder of each kind."""
    for rank, folder in enumerate(pipeline()):
        write_torch(home / "pipeline", rank, folder)
    output = write_torch(home / "torch", 0)
    write_trace(output / "trace_view.json", trace_events(EXAMPLE))
    heads = ["Component", "Timestamp(us)", "Total Allocated(MB)", "Total Reserved(MB)", "Device Type"]
    (output / "memory_record.csv").write_text(csv_text([heads, ["PTA", stamp(1), 1.5, 20, "NPU:0"]]))
    own = ["Name", "Size(KB)", "Allocation Time(us)", "Release Time(us)"]
    (output / "operator_memory.csv").write_text(csv_text([own, ["aten::empty", 2048, stamp(0), stamp(9)]]))
    (output / "l2_cache.csv").write_text("Hit Rate,Victim Rate\nN/A,0.5\n0.5,0.5\n")
    (output / "op_statistic.csv").write_text("OP Type,Core Type,Count,Total Time(us)\nMatMul,AI_CORE,2,9.5\n")
    (output / "api_statistic.csv").write_text("Level,API Name,Time(us),Count\nacl,aclnnCast,4.5,2\n")
    matrix = '{"step7": {"p2p": {}, "collective": {"allreduce-total@1": {"0-1": {"Transport Type": "HCCS", '
    (output / "communication_matrix.json").write_text(
        matrix + '"Transit Size(MB)": 9.5, "Transit Time(ms)": 0.5, "Bandwidth(GB/s)": 19.0}}}}}'
    )
    write_trace(write_torch(home / "packed", 0) / "trace_view.json.gz", trace_events(EXAMPLE))
    write_mindspore(home / "mindspore", 0)
    write_msprof(home / "msprof", 0, slices=2)
    write_old_msprof(home / "old", 0)
    write_mindspore_1(home / "older")
    database = home / "database" / "x_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    database.mkdir(parents=True)
    write_database(database / "ascend_pytorch_profiler_0.db")
    kernel = home / "kernel" / "OPPROF_20260101120000_A"
    kernel.mkdir(parents=True)
    (kernel / "OpBasicInfo.csv").write_text("Op Name,Op Type,Task Duration(us),\nmm,cube,25.5,\n")
    (kernel / "PipeUtilization.csv").write_text("block_id,aic_total_cycles,aic_mac_ratio,\n0,100,0.2,\n")
    (kernel / "L2Cache.csv").write_text("block_id,aic_write_cache_hit,aic_write_cache_miss_allocate,\n0,90,10,\n")


def cut(content: bytes, source: random.Random) -> bytes:
    return content[: source.randrange(len(content) + 1)]


def flipped(content: bytes, source: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(source.randint(1, 8)):
        if found:
            found[source.randrange(len(found))] = source.randrange(256)
    return bytes(found)


def cell_replaced(content: bytes, source: random.Random) -> bytes:
    """A number or a word becomes something hostile."""
    for separator in source.sample([b",", b": ", b"\n"], 3):
        parts = content.split(separator)
        if len(parts) > 2:
            parts[source.randrange(1, len(parts))] = source.choice(HOSTILE).encode("utf-8", "replace")
            return separator.join(parts)
    return content


def columns_swapped(content: bytes, source: random.Random) -> bytes:
    head, end, rest = content.partition(b"\n")
    names = head.split(b",")
    source.shuffle(names)
    return b",".join(names) + end + rest


def lines_mixed(content: bytes, source: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(source.choices(lines, k=source.randint(0, 2 * len(lines)))) if lines else content


def repeated(content: bytes, source: random.Random) -> bytes:
    return content * source.randint(2, 20)


def binary(content: bytes, source: random.Random) -> bytes:
    return source.randbytes(source.randint(0, 5000))


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    cut,
    flipped,
    cell_replaced,
    cell_replaced,
    columns_swapped,
    lines_mixed,
    repeated,
    binary,
)


def damage_and_read(home: Path, work: Path, source: random.Random) -> str:
    """One damaged copy of one of the folders: `figures`, or the line that says what is wrong."""
    kind = source.choice(sorted(path.name for path in home.iterdir()))
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(home / kind, work)
    files = sorted(path for path in work.rglob("*") if path.is_file())
    for path in source.sample(files, min(len(files), source.choice([1, 1, 1, 2, 3]))):
        path.write_bytes(source.choice(MUTATIONS)(path.read_bytes(), source))
    try:
        found = analyse(load(work))
        json.dumps([as_json(found), merged_trace(found), asdict(compare(found, found))], allow_nan=False)
        page(found)
        Console(file=io.StringIO(), width=120).print(screen(found), comparison_screen(compare(found, found)))
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return "figures"


def run(tmp_path: Path, count: int, seed: int) -> list[str]:
    write_everything(tmp_path / "home")
    sources = (random.Random(f"{seed} {number}") for number in range(count))
    results = [damage_and_read(tmp_path / "home", tmp_path / "work", source) for source in sources]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < MAX_BYTES
    return results


def test_damaged_folders(tmp_path: Path) -> None:
    results = run(tmp_path, 100, 1)
    assert results.count("figures") > 10
    assert len(set(results)) > 20


@pytest.mark.slow
def test_ten_thousand_damaged_folders(tmp_path: Path) -> None:
    results = run(tmp_path, 10_000, 2)
    assert results.count("figures") > 1000
