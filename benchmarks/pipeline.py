"""Training step of the demo model through pipeline stages, schedule by schedule, against one rank, in one run.

    python -m benchmarks.pipeline [--rounds 1] [--steps 3] [--set KEY=VALUE ...]

Every variant trains examples/demo.yaml (native kernels, fp32, AdamW, clipping) on the same 8 x 256 random tokens a
step, in micro-batches of one sequence. One rank has all cores, several share them. Each variant has processes of its
own, so that the memory of each is its own; all are started and compiled first, and then take turns of some steps, the
next round the other way round. Those whose turn it is not sleep.

Step time is that of the slowest rank, a median over rounds of a turn's median step; against one is the median of the
ratios of each round to one rank, with the lowest and the highest. A stage goes forward twice, but for the last, so that
stages have more to do than one rank has. Memory is the most that a process has had, of the stages the first's and the
last's, above what a process has before its model is built; against one is of the largest of all stages. More ranks than
cores are for information. Writes pipeline.json and pipeline.md.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ascend_moe_train.config import load_run
from benchmarks.ranks import RUN, SAME_LOSS, WARM_STEPS
from benchmarks.ranks_orders import Reply
from benchmarks.ranks_workers import Workers, ranks_of
from benchmarks.report import machine, write_results

HERE = Path(__file__).parent
ONE = "1 rank"
# Ranks, and keys of the run.
VARIANTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    ONE: (1, ()),
    "pp2, gpipe": (2, ("parallel.pp=2", "parallel.schedule=gpipe")),
    "pp2, 1f1b": (2, ("parallel.pp=2",)),
    "pp2, interleaved, 2 chunks": (2, ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.chunks=2")),
    "pp2, zero_bubble": (2, ("parallel.pp=2", "parallel.schedule=zero_bubble")),
    "pp2, 1f1b, full": (2, ("parallel.pp=2", "recompute.policy=full")),
    "pp2, 1f1b, full, block inputs kept": (
        2,
        ("parallel.pp=2", "recompute.policy=full", "recompute.kept=block_inputs"),
    ),
    "pp4, 1f1b": (4, ("parallel.pp=4",)),
    "pp4, zero_bubble": (4, ("parallel.pp=4", "parallel.schedule=zero_bubble")),
}


def turn(workers: Workers, keys: Sequence[str], steps: int) -> list[Reply]:
    """What the ranks say of some steps."""
    overrides = ["run.kernels=native", "batch.micro_sequences=1", *keys]
    return workers.ask({"overrides": overrides, "steps": steps})


def step_s_of(replies: Sequence[Reply]) -> float:
    """The median of the slowest rank's steps."""
    slowest_s: list[float] = [max(each) for each in zip(*(reply["step_s"] for reply in replies), strict=True)]
    return statistics.median(slowest_s)


def row_of(
    name: str, times_s: Mapping[str, list[float]], memory: Mapping[str, list[int]], tokens: int
) -> dict[str, Any]:
    """One row of the table."""
    ratios = [one / own for one, own in zip(times_s[ONE], times_s[name], strict=True)]
    return {
        "variant": name,
        "tokens/s": round(tokens / statistics.median(times_s[name])),
        "against one": round(statistics.median(ratios), 2),
        "lowest to highest": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "memory of the first, MB": round(memory[name][0] / 1e6),
        "of the last, MB": round(memory[name][-1] / 1e6),
        "memory against one": round(max(memory[name]) / max(memory[ONE]), 2),
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="of one turn")
    parser.add_argument("--set", dest="keys", action="append", default=[], metavar="KEY=VALUE", help="of the run")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of one answer")
    given = parser.parse_args()
    times_s: dict[str, list[float]] = {name: [] for name in VARIANTS}
    last: dict[str, list[Reply]] = {}
    with ExitStack() as stack:
        workers = {}
        for name, (count, keys) in VARIANTS.items():
            workers[name] = stack.enter_context(ranks_of(name, count, "benchmarks.ranks_train", given.timeout))
            print("warming up:", name, flush=True)
            turn(workers[name], (*given.keys, *keys), WARM_STEPS)
        for number in range(given.rounds):
            for name in list(VARIANTS)[:: 1 if number % 2 == 0 else -1]:
                last[name] = turn(workers[name], (*given.keys, *VARIANTS[name][1]), given.steps)
                times_s[name].append(step_s_of(last[name]))
                print(f"round {number + 1}: {name} {times_s[name][-1] * 1e3:.0f} ms", flush=True)
        facts = {key: value for key, value in workers[ONE].facts[0].items() if key not in ("rank", "bytes")}
        before = {name: [each["bytes"] for each in workers[name].facts] for name in VARIANTS}
    memory = {
        name: [reply["peak_bytes"] - start for reply, start in zip(replies, before[name], strict=True)]
        for name, replies in last.items()
    }
    tokens = load_run(RUN, given.keys).tokens_per_step
    rows = [row_of(name, times_s, memory, tokens) for name in VARIANTS]
    apart = max(abs(replies[0]["loss"] / last[ONE][0]["loss"] - 1) for replies in last.values())
    alike = "" if apart < SAME_LOSS else ", which is NOT the same training"
    notes = [
        f"{given.rounds} rounds of {given.steps} steps of {tokens} tokens.",
        f"After the last step the losses are at most {apart:.1e} (relative) from that of one rank{alike}.",
    ]
    title = "Training step through pipeline stages"
    write_results(HERE / "pipeline", title, __doc__, rows, notes, {**machine(), **facts})


if __name__ == "__main__":
    main()
