"""Conversion of a 2 GB checkpoint both ways, against a plain copy and transformers' load and save, in one run.

    python -m benchmarks.convert [--rounds 2] [--folder /tmp] [--layers 6]

The folder is synthetic: Qwen3-MoE's shape, bfloat16, 6 layers of 32 experts as large as those of Qwen3-30B-A3B. Runs
alternate, and all start with the source in the page cache. `copy` is shutil.copyfile of every file, then fsync, as ours
ends durable; `copy, not durable` leaves out the fsync. Ours is the command with everything that it always verifies. The
peer loads and saves the same folder (AutoModelForCausalLM, save_pretrained) in the environment of PEER_PYTHON.
Peak memory is the largest resident size of the process. Times are medians over rounds; the speed against a copy is the
median of the ratios of each round, so that drift of the machine meets both. Writes convert.json and convert.md.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
from safetensors import safe_open

from benchmarks.report import machine, write_results

HERE = Path(__file__).parent
Figures = dict[str, float]

CONVERT = [sys.executable, "-c", "from ascend_moe_train.cli.main import run; run()", "convert"]
PEER = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained(sys.argv[2], max_shard_size="500MB")
"""


def run(command: list[str]) -> Figures:
    """Wall time and peak resident bytes of a command."""
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=HERE.parent) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: {said.decode(errors='replace').strip()}")
    return {"seconds": time.perf_counter() - start_s, "peak_bytes": usage.ru_maxrss * 1024}


def copy(source: Path, target: Path, *, durable: bool) -> Figures:
    """A plain copy of every file of a folder, in this process."""
    start_s = time.perf_counter()
    target.mkdir()
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            (target / path.relative_to(source)).mkdir()
            continue
        shutil.copyfile(path, target / path.relative_to(source))
        if durable:
            descriptor = os.open(target / path.relative_to(source), os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return {"seconds": time.perf_counter() - start_s, "peak_bytes": 0.0}


def warm(folder: Path) -> None:
    """Reads everything once, and lets earlier writes reach the disk."""
    os.sync()
    for path in folder.rglob("*.safetensors"):
        with path.open("rb", buffering=0) as stream:
            while stream.read(2**24):
                pass


def variants(folder: Path) -> Iterator[tuple[str, Path, Callable[[Path], Figures]]]:
    """(name, source that is to be in the page cache, what makes the given target)."""
    theirs, ours = folder / "hf", folder / "amt"
    peer = os.environ.get("PEER_PYTHON", ".venv-peer/bin/python")
    yield "copy", theirs, lambda target: copy(theirs, target, durable=True)
    yield "copy, not durable", theirs, lambda target: copy(theirs, target, durable=False)
    yield "import", theirs, lambda target: run([*CONVERT, "import", str(theirs), str(target)])
    yield "export", ours, lambda target: run([*CONVERT, "export", str(ours), str(target), "--shard-gb", "0.5"])
    yield "transformers", theirs, lambda target: run([peer, "-c", PEER, str(theirs), str(target)])


@contextmanager
def working_folder(where: Path) -> Iterator[Path]:
    """A folder that goes away."""
    folder = Path(tempfile.mkdtemp(prefix="convert-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, rounds: int) -> dict[str, list[Figures]]:
    """Every variant in every round; each target is removed before the next."""
    runs: dict[str, list[Figures]] = {}
    for number in range(rounds):
        for name, source, make_target in variants(folder):
            target = folder / "target"
            warm(source)
            figures = make_target(target)
            shutil.rmtree(target)
            runs.setdefault(name, []).append(figures)
            print(f"round {number + 1}: {name} {figures['seconds']:.2f} s", flush=True)
    return runs


def rows_of(runs: dict[str, list[Figures]], size_bytes: int) -> list[dict[str, Any]]:
    """One row per variant."""
    rows = []
    for name, found in runs.items():
        seconds = statistics.median(one["seconds"] for one in found)
        against = [
            [base["seconds"] / one["seconds"] for base, one in zip(runs[kind], found, strict=True)]
            for kind in ("copy", "copy, not durable")
        ]
        peak_bytes = max(one["peak_bytes"] for one in found)
        rows.append(
            {
                "variant": name,
                "seconds": round(seconds, 2),
                "GB/s": round(size_bytes / seconds / 1e9, 2),
                "speed of a copy": round(statistics.median(against[0]), 2),
                "speed of a copy that is not durable": round(statistics.median(against[1]), 2),
                "peak memory, MB": round(peak_bytes / 1e6) if peak_bytes else "",
            }
        )
    return rows


def main() -> None:
    """Makes the folder, measures, prints and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--layers", type=int, default=6, help="0.33 GB each")
    given = parser.parse_args()
    with working_folder(given.folder) as folder:
        # In a process of its own: what this one holds would count as held by its children, too.
        run([sys.executable, "-m", "scripts.make_synthetic_hf", str(folder / "hf"), "--layers", str(given.layers)])
        size_bytes = sum(path.stat().st_size for path in (folder / "hf").iterdir())
        run([*CONVERT, "import", str(folder / "hf"), str(folder / "amt")])
        runs = measure(folder, given.rounds)
        run([*CONVERT, "export", str(folder / "amt"), str(folder / "back")])
        identical = same_tensors(folder / "hf", folder / "back")
    notes = [
        f"{size_bytes / 1e9:.2f} GB in {given.layers} layers; {given.rounds} rounds.",
        f"Exported tensors are {'byte for byte' if identical else 'NOT'} those that were imported.",
    ]
    write_results(HERE / "convert", "Conversion of a checkpoint", __doc__, rows_of(runs, size_bytes), notes, machine())


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tensors, read by the safetensors library."""
    digests: list[dict[str, object]] = []
    for folder in (one, other):
        digests.append({})
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="np") as file:
                for name in file.offset_keys():
                    value = file.get_tensor(name)
                    digests[-1][name] = (
                        value.dtype == ml_dtypes.bfloat16,
                        value.shape,
                        hashlib.sha256(value.tobytes()).hexdigest(),
                    )
    return digests[0] == digests[1]


if __name__ == "__main__":
    main()
