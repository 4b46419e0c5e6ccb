"""Every benchmark, or those that are named, one after another: `python -m benchmarks [NAME ...]`, or `make bench`.

Each runs in a process of its own and writes its own page. If one fails the others still run, and the exit code is 1.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType

NAMES = (
    "step_speed",
    "convert",
    "collectives",
    "ranks",
    "pipeline",
    "recompute",
    "overlap",
    "ablate",
    "plan_speed",
    "profile",
    "onebit",
    "preflight",
    "preflight_faults",
    "predicted",
)
# Seconds that each may take by default on two idle cores; all of them together half an hour at the most.
MOST_S = 1800
BUDGET_S: Mapping[str, int] = MappingProxyType(
    {
        "step_speed": 240,
        "convert": 60,
        "collectives": 60,
        "ranks": 140,
        "pipeline": 180,
        "recompute": 85,
        "overlap": 140,
        "ablate": 270,
        "plan_speed": 65,
        "profile": 20,
        "onebit": 75,
        "preflight": 65,
        "preflight_faults": 70,
        "predicted": 320,
    }
)


def main() -> None:
    """Runs them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all if none is named")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"{', '.join(unknown)}: must be of {', '.join(NAMES)}")
    failed, start_s = [], time.monotonic()
    for name in names or NAMES:
        began_s = time.monotonic()
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
        now_s = time.monotonic()
        print(
            f"{name}: {now_s - began_s:.0f} s of {BUDGET_S[name]}, {now_s - start_s:.0f} of {MOST_S} in all", flush=True
        )
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
