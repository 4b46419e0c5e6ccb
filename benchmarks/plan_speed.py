"""How long the planner takes: whole searches for DeepSeek-V3, one evaluation, and the command itself, on one core.

    python -m benchmarks.plan_speed [--rounds 1]

Each search is a process of its own that is bound to one core; seconds are of the search alone, without imports (the
median over rounds). `plans` are possible whatever the memory, `evaluated` those whose step was predicted; what a bound
leaves out is no better than what is kept (tests/unit/test_plan_search.py). The peer is what a search without bounds
takes: `plans` times what one evaluation of this run takes. The last rows are whole commands, from start to end. Writes
plan_speed.json and plan_speed.md.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ascend_moe_train.planner.hardware import parse_cluster
from ascend_moe_train.planner.plan import ENGINES, Job, Plan
from ascend_moe_train.planner.search import search
from ascend_moe_train.planner.step_time import time_of
from ascend_moe_train.presets import PRESETS
from benchmarks.report import Row, machine, write_results

SEQ_LEN = 4096
SEARCHES = (
    ("2048x910B", 15360, "ours"),
    ("2048xH800", 15360, "ours"),
    ("2048xH800", 15360, "megatron"),
    ("10000x910B", 20000, "ours"),
)
AMT = [sys.executable, "-c", "from ascend_moe_train.cli.main import run; run()"]
COMMANDS = (
    ["--help"],
    ["plan", "--model", "deepseek_v3", "--cluster", "2048x910B"],
    ["plan", "--model", "qwen3_30b_a3b", "--cluster", "16x910B"],
)
EVALUATIONS = 50


def job_of(global_sequences: int, engine: str) -> Job:
    """DeepSeek-V3 with so many sequences a step."""
    return Job(
        model=PRESETS["deepseek_v3"](), seq_len=SEQ_LEN, global_sequences=global_sequences, engine=ENGINES[engine]
    )


def searched(cluster: str, global_sequences: int, engine: str) -> tuple[float, int, int]:
    """Seconds of a search, plans that are possible, plans that were evaluated."""
    job, devices = job_of(global_sequences, engine), parse_cluster(cluster)
    start_s = time.perf_counter()
    found = search(job, devices)
    return time.perf_counter() - start_s, found.num_plans, found.num_evaluated


def evaluation_s() -> tuple[float]:
    """Seconds of one plan, by itself: 16 stages of three chunks each."""
    job, cluster = job_of(15360, "ours"), parse_cluster("2048x910B")
    plan = Plan.even(job, 2048, pp=16, chunks=3, schedule="interleaved", ep=64, zero_stage=1)
    time_of(job, cluster, plan)
    start_s = time.perf_counter()
    for _ in range(EVALUATIONS):
        time_of(job, cluster, plan)
    return ((time.perf_counter() - start_s) / EVALUATIONS,)


def alone(call: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """What a call returns in a process of its own, bound to one core."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        os.write(writer, " ".join(map(str, call())).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    if os.waitpid(child, 0)[1] or not text:
        raise SystemExit("a search failed")
    return tuple(map(float, text.split()))


def command_s(arguments: list[str]) -> float:
    """Of `amt`, from start to end, on one core."""
    start_s = time.perf_counter()
    core = max(os.sched_getaffinity(0))
    subprocess.run(
        [*AMT, *arguments],
        stdout=subprocess.DEVNULL,
        check=True,
        preexec_fn=partial(os.sched_setaffinity, 0, {core}),
    )
    return time.perf_counter() - start_s


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    rounds = parser.parse_args().rounds
    one_s = statistics.median(alone(evaluation_s)[0] for _ in range(rounds))
    rows: list[Row] = []
    for each in SEARCHES:
        found = [alone(partial(searched, *each)) for _ in range(rounds)]
        seconds, plans, evaluated = statistics.median(one[0] for one in found), found[0][1], found[0][2]
        rows.append(
            {
                "what": f"search: deepseek_v3 on {each[0]}, numbers kept as by {each[2]}",
                "seconds": f"{seconds:.2f}",
                "plans": f"{plans:,.0f}",
                "evaluated": f"{evaluated:,.0f}",
                "all of them, through this": f"{plans * one_s / seconds:,.0f}",
            }
        )
    rows.append({**dict.fromkeys(rows[0], ""), "what": "one evaluation, interleaved", "seconds": f"{one_s:.5f}"})
    for arguments in COMMANDS:
        seconds = statistics.median(command_s(arguments) for _ in range(rounds))
        rows.append({**dict.fromkeys(rows[0], ""), "what": f"amt {' '.join(arguments)}", "seconds": f"{seconds:.2f}"})
    notes = [f"Medians of {rounds} rounds."]
    path = Path(__file__).with_suffix("")
    write_results(path, "Speed of the planner", __doc__.partition("\n\n")[2], rows, notes, machine())


if __name__ == "__main__":
    main()
