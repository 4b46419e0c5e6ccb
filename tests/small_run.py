"""Small runs of the real trainer: a made-up corpus, a run file, a view that remembers, and what a run leaves behind."""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")

from ascend_moe_train.checkpoint import store
from ascend_moe_train.config import RunConfig, load_run
from ascend_moe_train.data.prepare import prepare
from ascend_moe_train.train.metrics import EvalRecord, Record, StepRecord
from ascend_moe_train.train.start import start
from ascend_moe_train.train.stop import StopRequest

VOCAB_SIZE = 300
WORDS = ("the", "router", "sends", "each", "token", "to", "some", "experts", "and", "weighs", "what", "they", "return")
OF_SPEED = ("step_s", "tokens_per_s", "model_flops_per_s", "mfu", "memory_bytes", "eta_s")
TIMING = (*OF_SPEED, "comm_s", "comm_exposed_s", "comm")
# One layer with everything that could break an exact resume: jitter, capacity, balance biases, accumulation, a blend of
# one corpus.
RUN = """\
run: {{dir: {folder}/run, steps: 40, seed: 3, log_every: 5, eval_every: 20, eval_sequences: 4, tensorboard: false,
  peak_flops_per_s: 1e+11}}
model: {{preset: tiny, vocab_size: {vocab_size}, num_layers: 1,
  moe: {{capacity_factor: 1.0, jitter: 0.1, aux_loss_scope: sequence, z_loss_coef: 0.001, balance_bias_rate: 0.01}}}}
data:
  train: [{{path: {corpus}/train}}]
  valid: [{{path: {corpus}/valid}}]
  tokenizer: {corpus}/tokenizer.json
  seq_len: 16
  reset_attention: true
batch: {{global_sequences: 4, micro_sequences: 2}}
optim: {{lr: 1e-2, warmup_steps: 5}}
checkpoint: {{every: 10, keep: 3}}
"""


def make_corpus(folder: Path) -> Path:
    """A prepared corpus of 13 short documents of words."""
    generator = random.Random(11)
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for number in range(13):
        length = generator.randrange(20, 90)
        (texts / f"{number}.txt").write_text(" ".join(generator.choices(WORDS, k=length)) + " – é.\n")
    corpus = folder / "corpus"
    prepare(sources=[str(texts)], out=corpus, vocab_size=VOCAB_SIZE, valid_fraction=0.2)
    return corpus


def write_run(folder: Path, corpus: Path) -> Path:
    """A run file whose run.dir is `folder`/run."""
    path = folder / "run.yaml"
    path.write_text(RUN.format(folder=folder, corpus=corpus, vocab_size=VOCAB_SIZE))
    return path


def small_run(folder: Path, corpus: Path, *overrides: str) -> RunConfig:
    """The configuration of `write_run` with overrides of the form section.key=value."""
    folder.mkdir(parents=True, exist_ok=True)
    return load_run(write_run(folder, corpus), overrides)


class MemoryView:
    """Keeps what a run says. `on_step` is called with every step's record."""

    def __init__(self, on_step: Callable[[StepRecord], None] | None = None) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvalRecord] = []
        self.notes: list[str] = []
        self._on_step = on_step

    def show(self, record: Record) -> None:
        if isinstance(record, EvalRecord):
            self.evaluations.append(record)
            return
        self.steps.append(record)
        if self._on_step is not None:
            self._on_step(record)

    def note(self, message: str) -> None:
        self.notes.append(message)

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.steps]


def stop_at(step: int, number: int = signal.SIGTERM) -> MemoryView:
    """A view that sends a signal after a step."""

    def on_step(record: StepRecord) -> None:
        if record.step == step:
            signal.raise_signal(number)

    return MemoryView(on_step)


def run(config: RunConfig, view: MemoryView) -> int:
    """Trains in this process; the exit code."""
    with StopRequest() as stop:
        return start(config, view, stop)


def run_to_end(config: RunConfig) -> MemoryView:
    """Trains in this process to the last step."""
    view = MemoryView()
    assert run(config, view) == 0
    return view


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMING} for line in lines]


def newest_state(run_dir: Path) -> tuple[int, dict[str, bytes], dict[str, Any]]:
    """Step, every tensor's bytes, and the state beside them, of the newest checkpoint; all have to be sound."""
    loaded = store.load_newest(run_dir / "checkpoints", _refuse)
    assert loaded is not None
    checkpoint, tensors = loaded
    return checkpoint.step, {name: value.tobytes() for name, value in tensors.items()}, checkpoint.meta["state"]


def _refuse(message: str) -> None:
    raise AssertionError(message)
