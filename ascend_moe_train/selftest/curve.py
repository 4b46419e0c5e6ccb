"""A small run whose losses are kept as a file: the model, the data, and the losses of one process in fp32. Pure."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.indexed import IndexedWriter, token_type
from ascend_moe_train.errors import DataError

VOCAB, SEQ_LEN, SEQUENCES = 64, 16, 8
STEPS = 20
# The run is saved in between, and what was saved goes on for some steps.
SAVED_AFTER, MORE = 5, 5
TOLERANCE = 1e-5
COMMAND = "python -m scripts.golden"
ONE_PROCESS = "one process"
GOLDEN = Path(__file__).with_name("golden_losses.txt")

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


def run_of(name: str, parallel: Mapping[str, Any], num_ranks: int, folder: Path, **run: Any) -> RunConfig:
    """The run file that a user would write; its corpus is in `folder`, and so are its checkpoints, by `name`."""
    pp = parallel.get("pp", 1)
    dp = num_ranks // (pp * parallel.get("tp", 1) * parallel.get("cp", 1))
    whole = {
        "run": {"dir": f"{folder}/{name}", "steps": STEPS, "seed": 5, **run},
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
    return RunConfig.model_validate_json(json.dumps(whole))


def write_corpus(folder: Path) -> None:
    """Documents that count on in steps of 1 or 5 from a random token, so that there is something to learn."""
    generator = np.random.default_rng(7)
    with IndexedWriter(folder / "corpus", token_type(VOCAB)) as writer:
        for _ in range(60):
            steps = generator.choice([1, 5], generator.integers(5, 50), p=[0.8, 0.2])
            writer.add((np.cumsum(steps) + generator.integers(VOCAB)) % VOCAB)


def golden_text(head: str, losses: Sequence[float]) -> str:
    """What a file of losses holds: two lines that say what it is of, then step and loss of every step."""
    lines = [f"# {head}", f"# made by {COMMAND}"]
    return "\n".join([*lines, *(f"{step} {loss:#.6g}" for step, loss in enumerate(losses, 1))]) + "\n"


def golden_losses(path: Path = GOLDEN) -> list[float]:
    """The losses of a file, of steps 1, 2, ... Raises DataError: it is none."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        numbered = [(int(step), float(loss)) for step, loss in (line.split() for line in lines)]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: no losses can be read: {error}") from None
    if [step for step, _ in numbered] != list(range(1, STEPS + 1)):
        raise DataError(f"{path}: has not the steps 1 to {STEPS}, one a line; {COMMAND} makes it anew")
    return [loss for _, loss in numbered]
