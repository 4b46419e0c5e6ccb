"""Bandwidth of our collectives inside a compiled graph, against raw mpi4py calls and torch's gloo, in one run.

    python -m benchmarks.collectives [--rounds 3] [--ranks 2 --ranks 4]

A graph of several collectives, each of the same fp32 input and after the one before, is timed as a whole (`in a
graph`); so are as many calls of our verbs on NumPy arrays (`on arrays`), and of mpi4py's own (`raw`), both into buffers
made before, in the same processes. They take turns in every round, the first of one being the last of the next. Between
rounds gloo has its turn (all_reduce in place, all_to_all_single) in processes of its own, in the environment of
PEER_PYTHON. Nobody else runs meanwhile: processes whose turn it is not sleep. Results of all ways are compared before
anything is timed.

The size is what one rank puts in, and bandwidth is size / time of the slowest rank. Figures are medians over rounds; of
a ratio the 10th and 90th percentiles of the rounds stand behind it. Writes collectives.json and collectives.md.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.ranks_orders import Order, Reply
from benchmarks.ranks_workers import Workers, peers_of, ranks_of
from benchmarks.report import machine, write_results

HERE = Path(__file__).parent
VERBS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
GLOO_VERBS = ("all_reduce", "all_to_all")
CALLS = {64 * 2**10: 16, 2**20: 16, 4 * 2**20: 16, 16 * 2**20: 8}  # of one turn, by size in bytes
GOAL, GOAL_BYTES = 0.7, 4 * 2**20
MOST_RANKS = 2  # rows beyond are for information: they share cores, and MPI's processes spin
Times = dict[str, list[float]]


def slowest(replies: Sequence[Reply]) -> Reply:
    """Seconds of the slowest rank, by way."""
    return {way: max(reply[way] for reply in replies) for way in replies[0]}


def measure(ours: Workers, gloo: Workers, rounds: int) -> Iterator[tuple[Order, Times]]:
    """Every verb at every size: seconds of each round by way. The first turn of each is not counted."""
    for verb in VERBS:
        for size_bytes, calls in CALLS.items():
            order: Order = {"verb": verb, "size_bytes": size_bytes, "calls": calls}
            times: Times = {}
            for number in range(rounds + 1):
                found = slowest(ours.ask({**order, "forward": number % 2 == 0}))
                if verb in GLOO_VERBS:
                    found |= slowest(gloo.ask(order))
                for way, seconds in found.items():
                    times.setdefault(way, []).extend([seconds] if number else [])
            yield order, times


def row_of(ranks: int, order: Order, times: Times) -> dict[str, Any]:
    """One row of the table."""
    moved = order["size_bytes"] * order["calls"]

    def bandwidth(way: str) -> str:
        return f"{moved / statistics.median(times[way]) / 1e9:.2f}" if way in times else ""

    def ratios(peer: str, way: str) -> list[float]:
        return [raw / ours for raw, ours in zip(times[peer], times[way], strict=True)]

    low, *_, high = statistics.quantiles(ratios("apart", "graph"), n=10, method="inclusive")
    size_kb = order["size_bytes"] // 1024
    return {
        "ranks": ranks,
        "verb": order["verb"],
        "size": f"{size_kb} KB" if size_kb < 1024 else f"{size_kb // 1024} MB",
        "raw, GB/s": bandwidth("raw"),
        "raw apart, GB/s": bandwidth("apart"),
        "in a graph, GB/s": bandwidth("graph"),
        "in a graph / raw": round(statistics.median(ratios("raw", "graph")), 2),
        "in a graph / raw apart": round(statistics.median(ratios("apart", "graph")), 2),
        "10 to 90 %": f"{low:.2f} to {high:.2f}",
        "on arrays / raw": round(statistics.median(ratios("raw", "host")), 2),
        "gloo, GB/s": bandwidth("gloo"),
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, action="append", help="may be given several times; default 2 and 4")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="of one answer")
    given = parser.parse_args()
    rows, below, versions = [], [], {}
    for ranks in given.ranks or (2, 4):
        with ExitStack() as stack:
            gloo = stack.enter_context(
                peers_of(f"gloo, {ranks} ranks", ranks, "benchmarks.collectives_gloo", given.timeout)
            )
            ours = stack.enter_context(ranks_of(f"{ranks} ranks", ranks, "benchmarks.collectives_rank", given.timeout))
            versions = {key: value for key, value in (ours.facts[0] | gloo.facts[0]).items() if key != "rank"}
            for order, times in measure(ours, gloo, given.rounds):
                row = row_of(ranks, order, times)
                rows.append(row)
                print(*row.values(), sep=", ", flush=True)
                if ranks <= MOST_RANKS and order["size_bytes"] >= GOAL_BYTES and row["in a graph / raw apart"] < GOAL:
                    below.append(f"{row['verb']} of {row['size']}")
    notes = [
        f"The goal is {GOAL} of raw with a buffer for each call from 4 MB on, with {MOST_RANKS} ranks. "
        + (f"Not met by {', '.join(below)}." if below else "All rows meet it."),
        f"{given.rounds} rounds; more than {MOST_RANKS} ranks are for information: they wait for each other's core.",
    ]
    write_results(HERE / "collectives", "Collectives inside a graph", __doc__, rows, notes, {**machine(), **versions})


if __name__ == "__main__":
    main()
