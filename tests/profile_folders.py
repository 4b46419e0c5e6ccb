"""Small profiler folders as torch_npu, MindSpore, msprof and MindSpore 1.x write them, with figures that are known."""

import csv
import gzip
import io
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

START_US = 1_790_932_512_395_153.069  # of the size that real time stamps have
GROUP = "group_name_7"
GROUP_ID = "5862276123280252691"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compute kernel; times in microseconds from the start of the step."""

    start: float
    duration: float
    type: str = "MatMulV3"
    core: str = "AI_CORE"
    shapes: str = "128,64;64,32"
    mac: float = 0.5
    mte2: float = 0.75
    cube: float = 90.0


@dataclass(frozen=True, kw_only=True)
class Message:
    """A collective; `transit` and `wait` are milliseconds as communication.json has them."""

    start: float
    duration: float
    name: str = "hcom_allReduce__473_0_1"
    group: str = GROUP_ID
    transit: float = 0.0
    wait: float = 0.0
    size_mb: float = 8.0


@dataclass(frozen=True, kw_only=True)
class Folder:
    """One rank's capture. `parts` are computing, exposed, overlapped and free as step_trace_time.csv says."""

    kernels: Sequence[Kernel] = ()
    messages: Sequence[Message] = ()
    parts: Sequence[float] = (50.0, 30.0, 10.0, 20.0)
    bubble: float = 0.0
    preparing: str = "5.0"
    step: str = "7"
    level: str = "Level1"
    pp: int = 1
    stage: int = 0
    extra: Mapping[str, str] = field(default_factory=dict)


# two kernels on two streams that overlap, one alone; an all-reduce half hidden by the last
EXAMPLE = Folder(
    kernels=[
        Kernel(start=0.0, duration=20.0),
        Kernel(start=10.0, duration=20.0, type="Cast", core="AI_VECTOR_CORE", shapes="128,64"),
        Kernel(start=40.0, duration=20.0, type="FlashAttentionScore", core="MIX_AIC", cube=80.0),
    ],
    messages=[Message(start=50.0, duration=40.0, transit=0.01, wait=0.02)],
    parts=(50.0, 30.0, 10.0, 10.0),
)


def stamp(offset_us: float) -> str:
    """As profilers write time stamps: microseconds since 1970 with nanoseconds, and a tab behind them."""
    nanoseconds = round(START_US * 1000) + round(offset_us * 1000)
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03}\t"


def csv_text(rows: Iterable[Any], *, end: str = "\r\n") -> str:
    """Rows as csv.writer puts them, with CR LF."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator=end).writerows(rows)
    return stream.getvalue()


def kernel_rows(folder: Folder, names: Mapping[str, str]) -> list[list[object]]:
    """Header and rows of kernel_details.csv or op_summary; `names` renames columns, one renamed to nothing is left
    out."""
    ratios = [f"{prefix}_{pipe}_ratio" for prefix in ("aic", "aiv") for pipe in ("mac", "vec", "mte2")]
    heads = ["Step Id", "Name", "Type", "Accelerator Core", "Start Time(us)", "Duration(us)", "Wait Time(us)"]
    heads += ["Block Dim", "Input Shapes", "Input Data Types", *ratios, "cube_utilization(%)"]
    rows: list[list[object]] = []
    for place, each in enumerate(folder.kernels):
        of_cube = each.core in ("AI_CORE", "MIX_AIC")
        own = [each.mac, 0.0, each.mte2] if of_cube else [0.0, each.mac, each.mte2]
        values = [*(own if of_cube else [0, 0, 0]), *([0, 0, 0] if of_cube else own)]
        cells = [folder.step, f"op{place}", each.type, each.core, stamp(each.start), each.duration, 0.5, 24]
        rows.append([*cells, f'"{each.shapes}"', "FLOAT;FLOAT", *values, each.cube if of_cube else 0])
    for message in folder.messages:
        cells = [folder.step, message.name, message.name, "HCCL", stamp(message.start), message.duration, 0, "N/A"]
        rows.append([*cells, "N/A", "N/A", *["N/A"] * 7])
    kept = [place for place, head in enumerate(heads) if names.get(head, head)]
    renamed = [names.get(head, head) for head in heads]
    return [[renamed[place] for place in kept], *([row[place] for place in kept] for row in rows)]


def communication(folder: Folder, bucket: str = "collective") -> dict[str, Any]:
    """communication.json of torch_npu and MindSpore."""
    ops = {f"{each.name}@{each.group}": _info(each) for each in folder.messages}
    buckets: dict[str, Any] = {"p2p": {}, "collective": {}}
    buckets[bucket] = {**ops, "Total Op Info": {"Communication Time Info": {"Elapse Time(ms)": 1e3}}}
    return {f"step{folder.step}": buckets}


def _info(each: Message) -> dict[str, Any]:
    width = {"Transit Size(MB)": each.size_mb, "Transit Time(ms)": each.duration / 1e3}
    nothing = {"Transit Size(MB)": 0, "Transit Time(ms)": 0}
    return {
        "Communication Time Info": {
            "Start Timestamp(us)": START_US + each.start,
            "Elapse Time(ms)": each.duration / 1e3,
            "Transit Time(ms)": each.transit,
            "Wait Time(ms)": each.wait,
            "Synchronization Time(ms)": 0.0,
            "Idle Time(ms)": -1e-9,
        },
        "Communication Bandwidth Info": {"HCCS": width, "SDMA": width, "RDMA": nothing},
    }


def step_rows(folder: Folder) -> list[list[object]]:
    """Header and row of step_trace_time.csv."""
    heads = ["Step", "Computing", "Communication(Not Overlapped)", "Overlapped", "Communication", "Free", "Stage"]
    heads += ["Bubble", "Communication(Not Overlapped and Exclude Receive)", "Preparing"]
    computing, exposed, overlapped, free = folder.parts
    total = computing + exposed + free - folder.bubble
    row = [folder.step, computing, exposed, overlapped, exposed + overlapped, free, total, folder.bubble, exposed]
    return [list(heads), [*row, folder.preparing]]


def write_torch(home: Path, rank: int, folder: Folder = EXAMPLE, *, stamp: str = "20260101120000000") -> Path:
    """A folder of torch_npu. Returns that of its output."""
    place = home / f"host_{1000 + rank}_{stamp}_ascend_pt"
    output = place / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    info = {"config": {"experimental_config": {"_profiler_level": folder.level, "_aic_metrics": METRICS}}}
    (place / f"profiler_info_{rank}.json").write_text(json.dumps(info))
    (place / "profiler_metadata.json").write_text(json.dumps(_metadata(folder, rank)))
    (output / "step_trace_time.csv").write_text(csv_text(step_rows(folder)), newline="")
    (output / "kernel_details.csv").write_text(csv_text(kernel_rows(folder, {})), newline="")
    (output / "communication.json").write_text(json.dumps(communication(folder)))
    for name, text in folder.extra.items():
        (output / name).write_text(text, newline="")
    return output


METRICS = "ACL_AICORE_PIPE_UTILIZATION"


def _metadata(folder: Folder, rank: int) -> dict[str, Any]:
    groups: dict[str, Any] = {GROUP: {"group_name": "dp_cp", "group_rank": 0, "global_ranks": [0, 1]}}
    if folder.pp > 1:
        pair = [rank - folder.stage, rank - folder.stage + 1]
        groups[f"pp_{pair[0]}"] = {"group_name": "pp", "group_rank": folder.stage, "global_ranks": pair}
    return {"parallel_group_info": groups, "distributed_args": {"pipeline_model_parallel_size": folder.pp}}


def write_mindspore(home: Path, rank: int, folder: Folder = EXAMPLE) -> Path:
    """A folder of MindSpore 2.10: Step ID, no Device_id, messages between stages in the bucket `collective`."""
    place = home / f"host_{1000 + rank}_20260101120000000_ascend_ms"
    output = place / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    info = {
        "profiler_parameters": {"profiler_level": f"ProfilerLevel.{folder.level}", "aic_metrics": "PipeUtilization"}
    }
    (place / f"profiler_info_{rank}.json").write_text(json.dumps({**info, "ms_version": "2.10.0"}))
    (output / "step_trace_time.csv").write_text(csv_text(step_rows(replace(folder, step="0"))), newline="")
    rows = kernel_rows(folder, {"Step Id": "Step ID", "Block Dim": "Block Num"})
    (output / "kernel_details.csv").write_text(csv_text(rows), newline="")
    (output / "communication.json").write_text(json.dumps(communication(folder)))
    return output


OP_SUMMARY = {
    "Step Id": "",
    "Name": "Op Name",
    "Type": "OP Type",
    "Accelerator Core": "Task Type",
    "Start Time(us)": "Task Start Time(us)",
    "Duration(us)": "Task Duration(us)",
    "Wait Time(us)": "Task Wait Time(us)",
}


def write_msprof(home: Path, rank: int, folder: Folder = EXAMPLE, *, slices: int = 1) -> Path:
    """A folder of the msprof CLI, with an older export beside the newest, which is in slices. Returns its output."""
    place = home / f"PROF_00000{rank}_20260101120000000_ABCDEFGHIJKLMNOP"
    output = place / "mindstudio_profiler_output"
    output.mkdir(parents=True)
    (place / f"device_{rank}").mkdir()
    (place / f"device_{rank}" / f"info.json.{rank}").write_text(json.dumps({"rank_id": rank}))
    (place / "analyze").mkdir()
    flat = communication(folder)[f"step{folder.step}"]["collective"]
    (place / "analyze" / "communication.json").write_text(json.dumps(flat))
    head, *rows = kernel_rows(folder, OP_SUMMARY)
    old = replace(folder, kernels=[replace(each, duration=1e6) for each in folder.kernels])
    (output / "op_summary_20250101120000.csv").write_text(csv_text(kernel_rows(old, OP_SUMMARY), end="\n"))
    for number in range(slices):
        name = f"op_summary{f'_slice_{number}' if slices > 1 else ''}_20260101120000.csv"
        (output / name).write_text(csv_text([head, *rows[number::slices]], end="\n"))
    return output


def trace_events(folder: Folder, *, as_text: bool = True, process: str = "HCCL") -> list[dict[str, Any]]:
    """The events of a trace: overlap track, collectives, kernels with their launches, counters of the last-level
    cache."""

    def at(offset_us: float) -> Any:
        return stamp(offset_us).strip() if as_text else START_US + offset_us

    names = {1: "Overlap Analysis", 2: process, 3: "Ascend Hardware", 4: "LLC", 5: "CANN"}
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}} for pid, name in names.items()
    ]
    thread = {"ph": "M", "name": "thread_name", "pid": 2, "tid": 9, "args": {"name": "Group 0 Communication"}}
    found += [thread, {**thread, "tid": 1, "args": {"name": "Plane 0"}}]
    computing, exposed, overlapped, free = folder.parts
    parts = {"Computing": computing, "Communication(Not Overlapped)": exposed, "Free": free}
    for name, duration in {**parts, "Communication": exposed + overlapped}.items():
        found.append({"ph": "X", "name": name, "pid": 1, "tid": 0, "ts": at(0), "dur": duration})
    for each in folder.messages:
        event = {"ph": "X", "name": each.name, "pid": 2, "tid": 9, "ts": at(each.start), "dur": each.duration}
        found += [event, {**event, "name": "Notify_Wait", "tid": 1}]
    for place, kernel in enumerate(folder.kernels):
        flow = {"name": "HostToDevice", "cat": "HostToDevice", "id": str(place)}
        found.append({**flow, "ph": "s", "pid": 5, "tid": 0, "ts": at(kernel.start - 2)})
        found.append({**flow, "ph": "f", "bp": "e", "pid": 3, "tid": 0, "ts": at(kernel.start)})
        event = {"ph": "X", "pid": 3, "tid": 0, "ts": at(kernel.start), "dur": kernel.duration}
        found.append({**event, "name": f"net/{kernel.type}-op{place}", "args": {"text": '}, {"a": ['}})
    for place, rate in enumerate((0.875, 0.625)):
        counter = {"ph": "C", "pid": 4, "tid": 0, "ts": at(place)}
        found.append({**counter, "name": "LLC 0 Read/Throughput", "args": {"Throughput(MB/s)": 300.0 - 200 * place}})
        found.append({**counter, "name": "LLC 0 Read/Hit Rate", "args": {"Hit Rate(%)": rate}})
    return found


def write_trace(path: Path, events: Sequence[Mapping[str, Any]]) -> None:
    """A list of events, gzipped if the name ends in .gz."""
    content = json.dumps(list(events)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_old_msprof(home: Path, rank: int, folder: Folder = EXAMPLE, *, iterations: int = 2) -> Path:
    """msprof's files of 2023, one for each iteration."""
    place = home / f"PROF_00000{rank}_20230818142704322_ABCDEFGHIJKLMNOP" / f"device_{rank}"
    (place / "timeline").mkdir(parents=True)
    (place / f"info.json.{rank}").write_text(json.dumps({"rank_id": -1}))
    for number in range(1, iterations + 1):
        events = trace_events(folder, as_text=False)
        write_trace(place / "timeline" / f"msprof_{rank}_2_{number}.json", events)
        times = {"Iteration ID": number, "Iteration Time(ns)": 1e5 * number}
        step = {"ph": "X", "name": f"Iteration {number}", "pid": 1, "tid": 1, "ts": 1.0, "dur": 100.0, "args": times}
        heads = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "Step Trace"}}]
        heads += [{"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "Model ID:2"}}]
        write_trace(place / "timeline" / f"step_trace_{rank}_2_{number}.json", [*heads, step])
    return place


def write_database(path: Path, folder: Folder = EXAMPLE) -> None:
    """ascend_pytorch_profiler_<rank>.db with kernels, collectives, ratios and the last-level cache."""
    ids: dict[str, int] = {}

    def name_id(text: str) -> int:
        return ids.setdefault(text, len(ids))

    start_ns = round(START_US * 1000)
    with closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE TASK (startNs INTEGER, endNs INTEGER, globalTaskId INTEGER)")
        columns = "name, globalTaskId, taskType, opType, inputShapes, inputDataTypes"
        base.execute(f"CREATE TABLE COMPUTE_TASK_INFO ({columns})")
        base.execute("CREATE TABLE COMMUNICATION_OP (opName, startNs, endNs, groupName)")
        base.execute("CREATE TABLE TASK_PMU_INFO (globalTaskId, name, value)")
        base.execute("CREATE TABLE STRING_IDS (id INTEGER, value TEXT)")
        base.execute("CREATE TABLE LLC (deviceId, llcId, timestampNs, hitRate, throughput, mode)")
        rates = [(1, 87.5, 300, "read"), (2, 62.5, 100, "read"), (1, 10.0, 5, "write")]
        for at, rate, load, mode in rates:
            base.execute("INSERT INTO LLC VALUES (0, 0, ?, ?, ?, ?)", (at, rate, load, name_id(mode)))
        for place, each in enumerate(folder.kernels):
            begin = start_ns + round(each.start * 1000)
            base.execute("INSERT INTO TASK VALUES (?, ?, ?)", (begin, begin + round(each.duration * 1000), place))
            texts = (each.core, each.type, f'"{each.shapes}"', "FLOAT")
            row = (name_id(f"op{place}"), place, *map(name_id, texts))
            base.execute("INSERT INTO COMPUTE_TASK_INFO VALUES (?, ?, ?, ?, ?, ?)", row)
            prefix = "aic" if each.core in ("AI_CORE", "MIX_AIC") else "aiv"
            for pipe, value in (("mac" if prefix == "aic" else "vec", each.mac), ("mte2", each.mte2)):
                ratio = (place, name_id(f"{prefix}_{pipe}_ratio"), value)
                base.execute("INSERT INTO TASK_PMU_INFO VALUES (?, ?, ?)", ratio)
        for message in folder.messages:
            begin = start_ns + round(message.start * 1000)
            ends = (begin, begin + round(message.duration * 1000))
            row = (name_id(message.name), *ends, name_id(message.group))
            base.execute("INSERT INTO COMMUNICATION_OP VALUES (?, ?, ?, ?)", row)
        base.executemany("INSERT INTO STRING_IDS VALUES (?, ?)", [(number, text) for text, number in ids.items()])
        base.commit()


def write_mindspore_1(home: Path) -> None:
    """Two ranks, two pipeline stages, of MindSpore 1.x: milliseconds, and ticks of 10 ns."""
    home.mkdir(parents=True, exist_ok=True)
    for rank in (0, 1):
        heads = ["computation_time", "communication_alone_time", "stage_time", "receive_alone_time"]
        rows = [heads, [10.0 * (rank + 1), 5.0, 12.0, 3.0], [10.0 * (rank + 1), 5.0, 12.0, 3.0]]
        (home / f"ascend_cluster_analyse_pipeline-parallel_2_2_{rank}.csv").write_text(csv_text(rows, end="\n"))
        ticks = 2_000_000 * (rank + 1)
        steps = [["step_num", "total"], [1, ticks], [2, ticks], ["-", ticks]]
        (home / f"step_trace_raw_{rank}_detail_time.csv").write_text(csv_text(steps, end="\n"))
        links = {"1-0": {"SDMA": [2.0, 4096.0, 2e9]}}
        ops = json.dumps({"stream_1_0_AllReduce-op7": ["1", 2.0, 1.0, links]})
        cost = ["step_num", "communication_cost", "wait_cost", "link_info", "communication_operator_cost"]
        raw = [cost, [1, 2.0, 1.0, "{}", ops], ["-", 2.0, 1.0, "{}", ops]]
        (home / f"hccl_raw_{rank}.csv").write_text(csv_text(raw, end="\n"))
