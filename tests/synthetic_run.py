"""Run folders as training leaves them, made up: for tests of the report and to look at it.

python -m tests.synthetic_run FOLDER [small|large|hostile|one_step]
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ascend_moe_train.train.metrics import EvalRecord, JsonlWriter, Record, Smoother, StepMeter
from ascend_moe_train.train.report import write_report
from ascend_moe_train.train.run_info import RunInfo, versions, write_run_info

SAMPLE = '''def read_header(path):
    """Return the header of *path* as a list of strings."""
    with open(path, "rb") as stream:
        line = stream.readline()
    if not line.startswith(b"# "):
        raise ValueError("not a header: %r" % line)
    return [name.strip() for name in line[2:].decode("ascii").split(",")]
'''
CONFIG = """run:
  dir: runs/demo
  steps: 600
  seed: 1
model:
  vocab_size: 2048
  hidden: 256
  num_layers: 4
  moe:
    num_experts: 8
    top_k: 2
    aux_loss_coef: 0.01
data:
  train:
  - path: data/stdlib/train
    weight: 1.0
  tokenizer: data/stdlib/tokenizer.json
optim:
  lr: 0.001
"""
HOSTILE = (
    "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">&{{data}}\x00\x1b"
)


def records(
    *, steps: int, layers: int = 4, experts: int = 8, seed: int = 1, bad: bool = False, eval_every: int = 50
) -> Iterator[Record]:
    """Step and evaluation records of a run whose router evens out; `bad` adds skipped steps and missing values."""
    rng = np.random.default_rng(seed)
    meter = StepMeter(
        total_steps=steps, flops_per_token=2.83e7, peak_flops_per_s=None if bad else 133e9, smoother=Smoother()
    )
    taste_LE = rng.normal(0, 1.1, (layers, experts)) * np.linspace(1.2, 0.6, layers)[:, None]
    warmup = max(steps // 20, 1)
    for step in range(1, steps + 1):
        share = step / steps
        taste_LE += rng.normal(0, 0.02, taste_LE.shape)
        even = 0.15 + 0.85 * math.exp(-6 * share)
        p_LE = np.exp(taste_LE * even)
        counts_LE = np.stack([rng.multinomial(8192, row / row.sum()) for row in p_LE])
        if bad and share > 0.6:
            counts_LE[0, : max(experts // 4, 1)] = 0
        loss = 1.9 + 5.7 * math.exp(-9 * share) + 0.5 * math.exp(-2 * share) + rng.normal(0, 0.06)
        lost = bad and step % max(steps // 7, 2) == 0
        yield meter.record(
            step=step,
            loss=math.nan if lost else loss,
            aux_loss=0.01 * layers * (1 + even**2),
            z_loss=0.001 * math.exp(-share),
            lr=1e-3 * min(step / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * share))),
            grad_norm=math.inf if lost else 0.4 + 4 * math.exp(-12 * share) + abs(rng.normal(0, 0.12)),
            tokens=4096,
            step_s=12.0 if step == 1 else 1.45 + abs(rng.normal(0, 0.06)),
            counts_LE=counts_LE,
            dropped=int(800 * even * rng.uniform(0.8, 1)),
            loss_scale=65536.0 / 2 ** (step * 4 // steps) if bad else None,
            skipped=lost,
        )
        if step % eval_every == 0 or step == steps:
            yield EvalRecord.from_loss(
                step=step,
                loss=math.nan
                if bad and share < 0.3
                else 2.02 + 5.4 * math.exp(-9 * share) + 0.5 * math.exp(-2 * share),
                tokens=16384,
                bytes_per_token=None if bad else 2.9,
            )


def write_run(
    folder: Path, *, steps: int, layers: int = 4, experts: int = 8, bad: bool = False, eval_every: int = 50
) -> Path:
    """A whole run folder; `bad` also puts markup into every string."""
    with JsonlWriter(folder / "metrics.jsonl", first_step=1) as writer:
        for record in records(steps=steps, layers=layers, experts=experts, bad=bad, eval_every=eval_every):
            writer.write(record)
    (folder / "config.yaml").write_text(CONFIG + (f"  note: {HOSTILE}\n" if bad else ""))
    (folder / "sample.txt").write_text(SAMPLE + (HOSTILE if bad else ""))
    write_run_info(
        folder,
        RunInfo(
            total_steps=steps + 100 * bad,
            parameters=8_132_864,
            active_parameters=3_414_272,
            flops_per_token=2.83e7,
            peak_flops_per_s=None if bad else 133e9,
            peak_source=HOSTILE if bad else "sgemm measured on all cores",
            versions=versions() | ({HOSTILE: HOSTILE} if bad else {}),
        ),
    )
    return folder


KINDS = {
    "small": lambda folder: write_run(folder, steps=600),
    "large": lambda folder: write_run(folder, steps=4000, layers=64, experts=256, eval_every=500),
    "hostile": lambda folder: write_run(folder, steps=300, bad=True),
    "one_step": lambda folder: write_run(folder, steps=1),
}

if __name__ == "__main__":
    print(write_report(KINDS[sys.argv[2] if len(sys.argv) > 2 else "small"](Path(sys.argv[1]))))
