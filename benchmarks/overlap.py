"""How much of communication a step waits for, with `parallel.overlap` and without, over slow links, in one run.

    python -m benchmarks.overlap [--rounds 2] [--steps 3] [--set KEY=VALUE ...]

Two ranks train the demo model with wide shared experts (native kernels, fp32, AdamW, clipping) on the same 8 x 256
random tokens a step, in one micro-batch on each rank. Links are slow by `parallel.slow_links`: 1 ms a call, 200 MB/s,
so that most of what a collective takes is sleep, as on a network, and leaves its core to the step. All variants are
compiled first, and then take turns of some steps; the next round goes the other way round.

Communication is what all collectives of a step took, exposed how long the step stood still for them: means over ranks,
medians over a turn's steps, then over rounds. Against plain: the median of the ratios of each round to the same layout
without overlap, with the lowest and the highest. Losses of both are compared bit for bit. A machine whose cores are
busy shows less: sums and copies of a collective need one, and ranks then come to collectives at different times, which
counts as communication and cannot be hidden. Writes overlap.json and overlap.md.
"""

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ranks_orders import Reply
from benchmarks.ranks_workers import Workers, ranks_of
from benchmarks.report import machine, write_results

HERE = Path(__file__).parent
WARM_STEPS = 2
KEYS = (
    "run.kernels=native",
    "batch.micro_sequences=4",
    "model.moe.shared_ffn=2048",
    "parallel.bucket_bytes=2097152",
    "parallel.slow_links.latency_s=0.001",
    "parallel.slow_links.bytes_per_s=2e8",
)
LAYOUTS: Mapping[str, tuple[str, ...]] = {"dp2": (), "zero1": ("parallel.zero_stage=1",), "ep2": ("parallel.ep=2",)}
WAYS: Mapping[str, tuple[str, ...]] = {"plain": (), "overlap": ("parallel.overlap=true",)}
VARIANTS = [(layout, way) for layout in LAYOUTS for way in WAYS]
FIGURES = ("step_s", "total_s", "exposed_s")
Found = dict[str, list[float]]


def turn(workers: Workers, variant: tuple[str, str], keys: Sequence[str], steps: int) -> list[Reply]:
    """What the ranks say of some steps."""
    layout, way = variant
    return workers.ask({"overrides": [*KEYS, *keys, *LAYOUTS[layout], *WAYS[way]], "steps": steps})


def figure(replies: Sequence[Reply], name: str) -> float:
    """The median over steps of the mean over ranks."""
    return statistics.median(statistics.fmean(each) for each in zip(*(reply[name] for reply in replies), strict=True))


def against(one: Found, plain: Found, name: str) -> list[float]:
    """The ratios of each round."""
    return [own / base for own, base in zip(one[name], plain[name], strict=True)]


def row_of(variant: tuple[str, str], found: Mapping[tuple[str, str], Found]) -> dict[str, Any]:
    """One row of the table."""
    own, plain = found[variant], found[variant[0], "plain"]
    ratios = against(own, plain, "exposed_s")
    return {
        "layout": variant[0],
        "way": variant[1],
        **{
            f"{label}, ms a step": round(1e3 * statistics.median(own[name]), 1)
            for label, name in zip(("whole", "communication", "exposed"), FIGURES, strict=True)
        },
        "exposed against plain": round(statistics.median(ratios), 2),
        "lowest to highest": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "whole against plain": round(statistics.median(against(own, plain, "step_s")), 2),
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="of one turn")
    parser.add_argument("--set", dest="keys", action="append", default=[], metavar="KEY=VALUE", help="of the run")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="of one answer")
    given = parser.parse_args()
    found: dict[tuple[str, str], Found] = {variant: {name: [] for name in FIGURES} for variant in VARIANTS}
    losses: dict[tuple[str, str], list[float]] = {variant: [] for variant in VARIANTS}
    with ranks_of("overlap", 2, "benchmarks.overlap_rank", given.timeout) as workers:
        for variant in VARIANTS:
            print("warming up:", *variant, flush=True)
            losses[variant] += turn(workers, variant, given.keys, WARM_STEPS)[0]["losses"]
        for number in range(given.rounds):
            for variant in VARIANTS[:: 1 if number % 2 == 0 else -1]:
                replies = turn(workers, variant, given.keys, given.steps)
                losses[variant] += replies[0]["losses"]
                for name in FIGURES:
                    found[variant][name].append(figure(replies, name))
                shown = {name: round(1e3 * found[variant][name][-1]) for name in FIGURES}
                print(f"round {number + 1}: {variant}: ms {shown}", flush=True)
        facts = {key: value for key, value in workers.facts[0].items() if key != "rank"}
    wrong = [layout for layout in LAYOUTS if losses[layout, "plain"] != losses[layout, "overlap"]]
    alike = f"DIFFERENT in {', '.join(wrong)}, which must not be" if wrong else "the same bit for bit"
    rows = [row_of(variant, found) for variant in VARIANTS]
    notes = [
        f"{given.rounds} rounds of {given.steps} steps; load of the machine at the end {os.getloadavg()[0]:.1f}.",
        f"Losses with overlap and without are {alike}.",
    ]
    write_results(HERE / "overlap", "Communication beside computing", __doc__, rows, notes, {**machine(), **facts})


if __name__ == "__main__":
    main()
