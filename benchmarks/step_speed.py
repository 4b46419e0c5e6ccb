"""Training step of the demo model against Hugging Face Mixtral on torch, on the same cores, in one run.

    python -m benchmarks.step_speed [--rounds 3] [--steps 12]

Ours runs in this environment, the peer in the one of PEER_PYTHON (`make bench` makes it). Runs alternate, so that drift
of the machine meets both; each figure is the median over rounds of a run's median step. Writes step_speed.json and .md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from ascend_moe_train.model.counts import training_flops_per_token
from ascend_moe_train.presets import demo
from benchmarks.report import machine, write_results

HERE = Path(__file__).parent
Figures = dict[str, Any]


def run_json(command: list[str]) -> Figures:
    """Runs a command whose last line of output is JSON."""
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE.parent)
    figures: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def commands(steps: int) -> list[list[str]]:
    """Every variant, ours first."""
    ours = [[sys.executable, "-m", "benchmarks.step_ours", kernels, str(steps)] for kernels in ("native", "portable")]
    peer, flops = os.environ.get("PEER_PYTHON", ".venv-peer/bin/python"), training_flops_per_token(demo(), 256)
    cores = len(os.sched_getaffinity(0))
    script = str(HERE / "step_transformers.py")
    theirs = [
        [peer, script, implementation, str(threads), str(steps), str(flops)]
        for implementation in ("eager", "grouped_mm")
        for threads in sorted({1, cores})
    ]
    return ours + theirs


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    runs: dict[str, list[Figures]] = {}
    for _ in range(arguments.rounds):
        for command in [[sys.executable, "-m", "benchmarks.sgemm"], *commands(arguments.steps)]:
            figures = run_json(command)
            runs.setdefault(figures["name"], []).append(figures)
            print(figures["name"], f"{figures['flops_per_s'] / 1e9:.1f} GFLOP/s", flush=True)
    sgemm = statistics.median(figures["flops_per_s"] for figures in runs.pop("NumPy sgemm"))
    middle = {
        name: {key: statistics.median(f[key] for f in found) for key in found[0] if key != "name"}
        for name, found in runs.items()
    }
    best_peer = max(f["tokens_per_s"] for name, f in middle.items() if not name.startswith("ours"))
    rows = [
        {
            "variant": name,
            "tokens/s": round(f["tokens_per_s"]),
            "against the best peer": round(f["tokens_per_s"] / best_peer, 2),
            "GFLOP/s": round(f["flops_per_s"] / 1e9, 1),
            "share of NumPy sgemm": round(f["flops_per_s"] / sgemm, 2),
            "peak memory, MB": round(f["peak_bytes"] / 1e6),
        }
        for name, f in middle.items()
    ]
    notes = [
        f"NumPy sgemm, all cores: {sgemm / 1e9:.0f} GFLOP/s.",
        "Batch 8 x 256 random tokens, fp32, AdamW, clipping.",
    ]
    write_results(HERE / "step_speed", "Training step of the demo model", __doc__, rows, notes, machine())


if __name__ == "__main__":
    main()
