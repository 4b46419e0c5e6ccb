"""Writes captures as torch_npu leaves them, of as many ranks and bytes as are asked for: for benchmarks.

    python -m benchmarks.profile_capture FOLDER [--ranks 64] [--megabytes 2000]

Two pipeline stages of data-parallel ranks, MoE-like kernels with counters, messages and gradients that wait for each
other across ranks, and a trace with host calls, launches, device tasks and counters. A third of the bytes are
kernel_details.csv, the rest trace_view.json. The same seed writes the same bytes.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_US = 1_790_932_512_395_153
STEPS = 3
KERNEL_ROW_BYTES = 330
TRACE_EVENT_BYTES = 160
EVENTS_PER_KERNEL = 5
HEADER = (
    "Step Id,Device_id,Model ID,Task ID,Stream ID,Name,Type,OP State,Accelerator Core,Start Time(us),Duration(us),"
    "Wait Time(us),Block Dim,Mix Block Dim,HF32 Eligible,Input Shapes,Input Data Types,Input Formats,Output Shapes,"
    "Output Data Types,Output Formats,Context ID,aicore_time(us),aic_total_cycles,aic_mac_time(us),aic_mac_ratio,"
    "aic_scalar_time(us),aic_scalar_ratio,aic_mte1_time(us),aic_mte1_ratio,aic_mte2_time(us),aic_mte2_ratio,"
    "aic_fixpipe_time(us),aic_fixpipe_ratio,aic_icache_miss_rate,aiv_time(us),aiv_total_cycles,aiv_vec_time(us),"
    "aiv_vec_ratio,aiv_scalar_time(us),aiv_scalar_ratio,aiv_mte2_time(us),aiv_mte2_ratio,aiv_mte3_time(us),"
    "aiv_mte3_ratio,aiv_icache_miss_rate,cube_utilization(%)"
)
KINDS = (
    ("MatMulV3", "AI_CORE", "4096,4096;4096,1024"),
    ("GroupedMatmul", "AI_CORE", "8192,2048;8,2048,1024;8"),
    ("FlashAttentionScore", "MIX_AIC", "4096,1,2048;4096,1,2048"),
    ("Cast", "AI_VECTOR_CORE", "4096,4096"),
    ("Mul", "AI_VECTOR_CORE", "4096,4096;4096,4096"),
    ("RmsNorm", "MIX_AIV", "4096,4096;4096"),
)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One task of a rank."""

    step: int
    number: int
    kind: int
    start_us: float
    duration_us: float


def write_capture(folder: Path, ranks: int, megabytes: float, seed: int = 1) -> int:
    """Returns the bytes written."""
    kernel_bytes = KERNEL_ROW_BYTES + EVENTS_PER_KERNEL * TRACE_EVENT_BYTES
    count = max(60, int(megabytes * 1e6 / ranks / kernel_bytes))
    for rank in range(ranks):
        _write_rank(folder, rank, ranks, count // STEPS, random.Random(f"{seed} {rank}"))
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write_rank(folder: Path, rank: int, ranks: int, per_step: int, source: random.Random) -> None:
    place = folder / f"host_{rank}_20260101120000000_ascend_pt"
    output = place / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    stage = rank * 2 // ranks
    half = max(1, ranks // 2)
    first = stage * half
    groups = {
        "group_dp": {
            "group_name": "dp_cp",
            "group_rank": rank - first,
            "global_ranks": list(range(first, first + half)),
        },
        f"group_pp_{rank % half}": {
            "group_name": "pp",
            "group_rank": stage,
            "global_ranks": [rank % half, rank % half + half],
        },
    }
    level = {"_profiler_level": "Level1", "_aic_metrics": "ACL_AICORE_PIPE_UTILIZATION"}
    (place / f"profiler_info_{rank}.json").write_text(json.dumps({"config": {"experimental_config": level}}))
    (place / "profiler_metadata.json").write_text(json.dumps({"parallel_group_info": groups}))
    kernels = list(_kernels(stage, per_step, source))
    with (output / "kernel_details.csv").open("w", newline="") as stream:
        stream.write(HEADER + "\r\n")
        stream.writelines(map(_row, kernels))
    with (output / "trace_view.json").open("w") as stream:
        stream.write(", ".join(_events(kernels)).join("[]"))
    _write_steps(output, kernels, rank, stage, half)


def _kernels(stage: int, per_step: int, source: random.Random) -> Iterator[Kernel]:
    at_us = 0.0
    for step in range(STEPS):
        for number in range(per_step):
            duration_us = source.uniform(5, 40) * (1 + stage)
            at_us += source.choice((0.1, 0.1, 0.2, 6.0))
            kind = source.randrange(len(KINDS))
            yield Kernel(step=step, number=number, kind=kind, start_us=at_us, duration_us=round(duration_us, 3))
            at_us += duration_us


def _row(each: Kernel) -> str:
    name, core, shapes = KINDS[each.kind]
    cube = core in ("AI_CORE", "MIX_AIC")
    ratios = "1.5,0.5,1.0,0.1,2.0,0.2,3.0,0.7,0.5,0.1,0.01" if cube else "0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0"
    vector = "0,0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0" if cube else "9.9,123456,1.5,0.3,0.5,0.1,6.0,0.7,3.0,0.3,0.02"
    return (
        f"{each.step},0,4294967295,{each.number},2,aclnn{name}_{name}AiCore_{name},{name},dynamic,{core},{_stamp(each)}\t,"
        f'{each.duration_us},0.1,24,0,NO,"""{shapes}""",DT_BF16;DT_BF16,ND;ND,"""4096,1024""",DT_BF16,ND,N/A,9.9,123456,'
        f"{ratios},{vector},{90.0 if cube else 0}\r\n"
    )


def _stamp(each: Kernel, earlier_us: float = 0.0) -> str:
    nanoseconds = START_US * 1000 + round((each.start_us - earlier_us) * 1000)
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03}"


def _events(kernels: list[Kernel]) -> Iterator[str]:
    names = {1: "Python", 2: "CANN", 3: "Ascend Hardware", 4: "Overlap Analysis", 5: "LLC"}
    for pid, name in names.items():
        yield json.dumps({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
    for number, each in enumerate(kernels):
        name = f"aclnn{KINDS[each.kind][0]}_{KINDS[each.kind][0]}AiCore"
        stack = "/train/model.py(120): forward;\\r\\n/train/layers.py(64): __call__, [x], {y}"
        call = {"Sequence number": number, "Input Dims": "4096,4096;\r\n4096,1024", "Call stack": stack}
        common = {"ph": "X", "name": name, "tid": 1}
        yield json.dumps({**common, "pid": 1, "ts": _stamp(each, 40), "dur": 20.5, "cat": "cpu_op", "args": call})
        flow = {"name": "HostToDevice", "cat": "HostToDevice", "id": str(number), "tid": 1}
        yield json.dumps({**flow, "ph": "s", "pid": 2, "ts": _stamp(each, 30)})
        yield json.dumps({**flow, "ph": "f", "pid": 3, "ts": _stamp(each), "bp": "e"})
        task = {"Model Id": 4294967295, "Task Type": KINDS[each.kind][1], "Stream Id": 2, "Task Id": number}
        yield json.dumps({**common, "pid": 3, "ts": _stamp(each), "dur": each.duration_us, "args": task})
        yield json.dumps({**common, "name": "Computing", "pid": 4, "ts": _stamp(each), "dur": each.duration_us})


def _write_steps(output: Path, kernels: list[Kernel], rank: int, stage: int, half: int) -> None:
    """Messages and gradients at the end of each step; the first stage waits for the second."""
    heads = "Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Stage,Bubble,"
    lines = [heads + "Communication(Not Overlapped and Exclude Receive),Preparing"]
    content = {}
    for step in range(STEPS):
        own = [each for each in kernels if each.step == step]
        computing = sum(each.duration_us for each in own)
        window = own[-1].start_us + own[-1].duration_us - own[0].start_us
        end_us = START_US + (step + 1) * 1e6
        wait = 5000.0 * (1 - stage) + 500.0
        collectives = {f"hcom_allReduce__1{stage}_{step}_1@{10 + stage}": (end_us, 900.0 + rank % half, 64.0)}
        messages = {f"hcom_batchSendRecv__{rank % half}_{step}_1@{100 + rank % half}": (end_us - wait, wait, 8.0)}
        communication = 900.0 + rank % half + wait
        free = window - computing
        total = f"{communication},0.0,{communication},{free},{computing + communication + free},0,{communication},20.5"
        lines.append(f"0,{step},{computing},{total}")
        content[f"step{step}"] = {"p2p": _infos(messages), "collective": _infos(collectives)}
    (output / "step_trace_time.csv").write_text("\r\n".join(lines) + "\r\n", newline="")
    (output / "communication.json").write_text(json.dumps(content))


def _infos(ops: dict[str, tuple[float, float, float]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, (start_us, duration_us, size_mb) in ops.items():
        times = {"Start Timestamp(us)": start_us, "Elapse Time(ms)": duration_us / 1e3, "Transit Time(ms)": 0}
        width = {"Transit Size(MB)": size_mb, "Transit Time(ms)": size_mb / 20, "Bandwidth(GB/s)": 20.0}
        found[name] = {
            "Communication Time Info": {**times, "Wait Time(ms)": 0, "Synchronization Time(ms)": 0, "Idle Time(ms)": 0},
            "Communication Bandwidth Info": {"HCCS": width, "SDMA": width},
        }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--megabytes", type=float, default=2000)
    asked = parser.parse_args()
    size = write_capture(asked.folder, asked.ranks, asked.megabytes)
    print(f"{asked.folder}: {size / 1e6:.0f} MB")  # a script's own output
