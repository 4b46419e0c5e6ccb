"""The ladder of techniques on a small Mixture-of-Experts model: `amt bench ablate`, plain and over slow links.

    python -m benchmarks.ablate [--steps 8] [--repeat 1] [--set KEY=VALUE ...]

The demo's model at half its width, with two layers and shorter sequences, on two ranks, on the demo's corpus
(`make corpora/stdlib/manifest.json`). Slow links are 1 ms a call and 200 MB/s. What is measured is kept in
build/ablate, from where an interrupted ladder goes on; over slow links only some of what communicates is. Writes
ablate.md, .json and .html, and the same as ablate_slow.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUN = Path("examples") / "demo.yaml"
BUILD = Path("build") / "ablate"
KEYS = ("model.num_layers=2", "model.hidden=128", "model.ffn=256", "model.moe.ffn=256", "data.seq_len=64")
SLOW = ("parallel.slow_links.latency_s=0.001", "parallel.slow_links.bytes_per_s=2e8")
OVER_SLOW_LINKS = "kernels,buckets,expert_parallel,overlap,reduce_bf16,onebit_adam,expert_wire"
SUFFIXES = (".md", ".json", ".html")


def main() -> None:
    """Runs both, and puts what they write beside the other benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablate")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--set", dest="keys", action="append", default=[], metavar="KEY=VALUE", help="of the run")
    given = parser.parse_args()
    slow = [*(word for key in SLOW for word in ("--set", key)), "--rungs", OVER_SLOW_LINKS]
    for name, more in (("ablate", []), ("ablate_slow", slow)):
        settings = [word for key in (*KEYS, *given.keys) for word in ("--set", key)] + more
        words = ["bench", "ablate", str(RUN), "--steps", str(given.steps), "--repeat", str(given.repeat)]
        words += ["--out", str(BUILD / name), *settings]
        amt = "from ascend_moe_train.cli.main import run; run()"
        subprocess.run([sys.executable, "-c", amt, *words], cwd=HERE.parent, check=True)
        for suffix in SUFFIXES:
            shutil.copyfile(HERE.parent / BUILD / name / f"ablate{suffix}", HERE / f"{name}{suffix}")


if __name__ == "__main__":
    main()
