"""`amt profile show` against msprof-analyze (`cluster -m all`, `advisor all`) on the same folders, in one run.

    python -m benchmarks.profile [--rounds 1] [--folder CAPTURE ...] [--large FOLDER] [--temporary /tmp]

Without --folder, a synthetic capture of 4 ranks and 6 MB (benchmarks/profile_capture.py). With --large, a capture that
only ours reads, such as one of 64 ranks and 2 GB by the same writer. msprof-analyze is that of the environment of
PEER_PYTHON; each of its runs gets a copy of the capture, since it writes into it. Runs alternate. CPU seconds and the
resident bytes of the largest process are those of each command with its children. Writes profile.json and profile.md.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.profile_capture import write_capture
from benchmarks.report import Row, machine, write_results

HERE = Path(__file__).parent
OURS = [sys.executable, "-c", "from ascend_moe_train.cli.main import run; run()", "profile", "show", "--no-cache"]
PEERS = {"cluster -m all": ["cluster", "-m", "all", "-d"], "advisor all": ["advisor", "all", "-d"]}
RANKS, MEGABYTES = 4, 6.0


class Taken(NamedTuple):
    """What one run of a command took."""

    wall_s: float
    cpu_s: float
    peak_bytes: float


def run(command: list[str], folder: Path) -> Taken:
    """Raises SystemExit for a command that fails."""
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=folder) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: {said.decode(errors='replace').strip()[-500:]}")
    return Taken(time.perf_counter() - start_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def peer_run(words: list[str], capture: Path, temporary: Path) -> Taken:
    """One run of msprof-analyze on a fresh copy."""
    program = Path(os.environ["PEER_PYTHON"]).parent / "msprof-analyze"
    with tempfile.TemporaryDirectory(dir=temporary) as name:
        copy = Path(name) / "capture"
        shutil.copytree(capture, copy)
        return run([str(program), *words, str(copy), "-o", name], Path(name))


def row(what: str, capture: str, taken: list[Taken], ours: Taken | None) -> Row:
    """Medians, and how many times ours."""
    middle = Taken(*(statistics.median(values) for values in zip(*taken, strict=True)))
    times = "" if ours is None else f"{middle.cpu_s / ours.cpu_s:.0f} x CPU, {middle.wall_s / ours.wall_s:.0f} x wall"
    return {
        "command": what,
        "capture": capture,
        "wall, s": f"{middle.wall_s:.2f}",
        "CPU, s": f"{middle.cpu_s:.2f}",
        "largest process, MiB": f"{middle.peak_bytes / 2**20:.0f}",
        "against ours": times,
    }


def size_words(folder: Path) -> str:
    """The capture's name, ranks and bytes."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    ranks = len(list(folder.rglob("profiler_info*.json")))
    return f"{folder.resolve().name}: {ranks} ranks, {size / 1e6:.1f} MB"


def measured(capture: Path, rounds: int, temporary: Path) -> list[Row]:
    """Ours and, where PEER_PYTHON names it, the peer's commands."""
    words = PEERS if "PEER_PYTHON" in os.environ else {}
    ours: list[Taken] = []
    peers: dict[str, list[Taken]] = {name: [] for name in words}
    for _ in range(rounds):
        ours.append(run([*OURS, str(capture)], HERE.parent))
        for name, arguments in words.items():
            peers[name].append(peer_run(arguments, capture, temporary))
    middle = Taken(*(statistics.median(values) for values in zip(*ours, strict=True)))
    size = size_words(capture)
    return [
        row("amt profile show", size, ours, None),
        *(row(f"msprof-analyze {name}", size, taken, middle) for name, taken in peers.items()),
    ]


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, nargs="*", default=[])
    parser.add_argument("--large", type=Path)
    parser.add_argument("--temporary", type=Path, default=Path(tempfile.gettempdir()))
    asked = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=asked.temporary) as name:
        captures = [each.resolve() for each in asked.folder]
        if not captures:
            captures = [Path(name) / "small"]
            write_capture(captures[0], RANKS, MEGABYTES)
        for capture in captures:
            rows += measured(capture, asked.rounds, asked.temporary)
    if asked.large is not None:
        taken = [run([*OURS, str(asked.large.resolve())], HERE.parent) for _ in range(asked.rounds)]
        rows.append(row("amt profile show", size_words(asked.large), taken, None))
    load = f"Load average {os.getloadavg()[0]:.0f} at the end: wall times hold less than CPU seconds where it is high."
    notes = [f"Medians of {asked.rounds} rounds. {load}"]
    path = Path(__file__).with_suffix("")
    write_results(path, "Reading profiler folders", __doc__.partition("\n\n")[2], rows, notes, machine())


if __name__ == "__main__":
    main()
