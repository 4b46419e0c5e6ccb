"""Runs whose losses are kept as files, one for each of some layouts: the same model on the same data. No MindSpore."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ascend_moe_train.cluster import variables
from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.indexed import IndexedWriter, token_type
from tests.ranks import run_ranks

VOCAB, SEQ_LEN, SEQUENCES = 64, 16, 8
STEPS = 20
# Each run is saved in between, and what was saved goes on for some steps.
SAVED_AFTER, MORE = 5, 5
NUM_RANKS = 4
TOLERANCE = 1e-5
GOLDEN = Path(__file__).parents[1] / "golden"
COMMAND = "python -m scripts.golden"

# Layers for four stages, an embedding that is at both ends of them, and router states. Nothing in it depends on what is
# in one micro-batch with what.
MODEL = {
    "vocab_size": VOCAB,
    "hidden": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn": 32,
    "tie_embeddings": True,
    "moe": {
        "num_experts": 4,
        "top_k": 2,
        "ffn": 24,
        "dense_layers": [0, 3],
        "aux_loss_coef": 0.02,
        "aux_loss_scope": "sequence",
        "balance_bias_rate": 0.03,
    },
}
ONE_PROCESS = "one process"
# Section `parallel` of NUM_RANKS ranks, but of one process in ONE_PROCESS.
LAYOUTS: dict[str, dict[str, Any]] = {
    ONE_PROCESS: {},
    "tp2+sp x ep2": {"tp": 2, "sequence_parallel": True, "ep": 2},
    "cp2 x ep2 zero3": {"cp": 2, "ep": 2, "zero_stage": 3},
    "pp2 x 2 chunks x dp2 zero1": {"pp": 2, "schedule": "interleaved", "chunks": 2, "zero_stage": 1},
    "pp2 x tp2 x etp2": {"pp": 2, "tp": 2, "etp": 2},
    "pp4 zero bubble": {"pp": 4, "schedule": "zero_bubble"},
}


def num_ranks(layout: str) -> int:
    """As many as the layout needs."""
    return 1 if layout == ONE_PROCESS else NUM_RANKS


def run_of(layout: str, folder: str) -> RunConfig:
    """The run file that a user would write; runs and their corpus are in `folder`."""
    parallel = LAYOUTS[layout]
    pp = parallel.get("pp", 1)
    dp = num_ranks(layout) // (pp * parallel.get("tp", 1) * parallel.get("cp", 1))
    run = {
        "run": {"dir": f"{folder}/{slug(layout)}", "steps": STEPS, "seed": 5},
        "model": MODEL,
        "data": {
            "train": [{"path": f"{folder}/corpus"}],
            "tokenizer": "unused",
            "seq_len": SEQ_LEN,
            "reset_attention": True,
        },
        "batch": {"global_sequences": SEQUENCES, "micro_sequences": SEQUENCES // (dp * pp)},
        # a large eps: with a small one the first update is the sign of the gradient, however small that is
        "optim": {"lr": 1e-2, "warmup_steps": 4, "eps": 1e-3, "clip_norm": 0.5},
        "parallel": parallel,
    }
    return RunConfig.model_validate_json(json.dumps(run))


def write_corpus(folder: Path) -> None:
    """Documents that count on in steps of 1 or 5 from a random token, so that there is something to learn."""
    generator = np.random.default_rng(7)
    with IndexedWriter(folder / "corpus", token_type(VOCAB)) as writer:
        for _ in range(60):
            steps = generator.choice([1, 5], generator.integers(5, 50), p=[0.8, 0.2])
            writer.add((np.cumsum(steps) + generator.integers(VOCAB)) % VOCAB)


def slug(layout: str) -> str:
    """A layout's name as part of a file's."""
    return layout.replace("+", "_").replace(" x ", "_").replace(" ", "_")


def golden_path(layout: str) -> Path:
    """The file of a layout's losses."""
    return GOLDEN / f"loss_{slug(layout)}.txt"


def golden_text(layout: str, losses: Sequence[float]) -> str:
    """What such a file holds: two lines that say what it is of, then step and loss of every step."""
    head = [f"# {layout}: ranks {num_ranks(layout)}, parallel {json.dumps(LAYOUTS[layout])}", f"# made by {COMMAND}"]
    return "\n".join([*head, *(f"{step} {loss:#.6g}" for step, loss in enumerate(losses, 1))]) + "\n"


def golden_losses(layout: str) -> list[float]:
    """The losses of the file, of steps 1, 2, ..."""
    lines = [line for line in golden_path(layout).read_text().splitlines() if not line.startswith("#")]
    return [float(line.split()[1]) for line in lines]


def on_ranks(function: str, folder: Path, deadline_s: float) -> list[Any]:
    """What a function of curve_worker.py returns on each of NUM_RANKS ranks; runs and checkpoints are in `folder`."""
    write_corpus(folder)
    # the trainer takes this for the sign that it was started with other ranks
    started = {variables.RUN_ID: "curves"}
    worker = f"tests.parity.curve_worker:{function}"
    return run_ranks(NUM_RANKS, worker, str(folder), deadline_s=deadline_s, environment=started)
