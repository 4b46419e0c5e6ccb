"""Every benchmark, or those that are named, one after another: `python -m benchmarks [NAME ...]`, or `make bench`.

Each runs in a process of its own and writes its own page. If one fails the others still run, and the exit code is 1.
"""

import argparse
import subprocess
import sys

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
)


def main() -> None:
    """Runs them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all if none is named")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"{', '.join(unknown)}: must be of {', '.join(NAMES)}")
    failed = [
        name
        for name in names or NAMES
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode
    ]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
