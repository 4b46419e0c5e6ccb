"""Tiny models, the layouts that must train them as one process does, and what is fed to them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.loader import Batch

VOCAB, SEQ_LEN, SEQUENCES, STEPS = 64, 8, 8, 5

MIXTRAL = {
    "vocab_size": VOCAB,
    "hidden": 32,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn": 32,
    "moe": {"num_experts": 4, "top_k": 2, "ffn": 24, "aux_loss_coef": 0.05, "z_loss_coef": 0.01},
}
# latent attention, a dense layer before one with experts, sigmoid scores in groups, shared experts, balance biases
DEEPSEEK = {
    "vocab_size": VOCAB,
    "hidden": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn": 40,
    "attention": {"mla": {"kv_latent": 12, "q_latent": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}},
    "moe": {
        "num_experts": 8,
        "top_k": 2,
        "ffn": 16,
        "shared_ffn": 16,
        "dense_layers": [0],
        "score": "sigmoid",
        "normalize_topk": True,
        "routed_scale": 1.5,
        "num_groups": 4,
        "top_groups": 2,
        "groups_by": "best_two",
        "balance_bias_rate": 0.01,
        "aux_loss_coef": 0.05,
        "aux_loss_scope": "sequence",
        "jitter": 0.1,
    },
}
MODELS: dict[str, dict[str, Any]] = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK}
# the same with as many layers as pipelines need, the second with multi-token prediction
DEEP: dict[str, dict[str, Any]] = {
    "deep mixtral": {**MIXTRAL, "num_layers": 4, "tie_embeddings": True},
    "deep deepseek": {**DEEPSEEK, "num_layers": 4, "mtp": {"depth": 1, "loss_coef": 0.3}},
}
# of which no tensor is at both ends of a pipeline
UNTIED: dict[str, dict[str, Any]] = {"untied mixtral": {**MIXTRAL, "num_layers": 4}}
MODES: dict[str, dict[str, Any]] = {
    "dropless": {},
    # under 1, so that some are dropped whatever the routing
    "capacity": {"capacity_factor": 0.9},
}
# Ranks, and section `parallel`.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp4": (4, {}),
    "zero1 dp2": (2, {"zero_stage": 1}),
    "zero2 dp2": (2, {"zero_stage": 2}),
    "zero3 dp2": (2, {"zero_stage": 3}),
    "zero1 dp4": (4, {"zero_stage": 1, "bucket_bytes": 8192}),
    "zero2 dp4": (4, {"zero_stage": 2}),
    "zero3 dp4": (4, {"zero_stage": 3}),
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "tp2+sp": (2, {"tp": 2, "sequence_parallel": True}),
    "ep2": (2, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "ep2 x edp2": (4, {"ep": 2}),
    "tp2 x ep2": (2, {"tp": 2, "ep": 2}),
    "etp2 x ep2": (4, {"etp": 2, "ep": 2}),
    "dp2 x tp2 x ep2": (8, {"tp": 2, "ep": 2}),
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "pp2 x 2 chunks": (2, {"pp": 2, "schedule": "interleaved", "chunks": 2}),
    "pp2 zero bubble": (2, {"pp": 2, "schedule": "zero_bubble"}),
    "pp4 zero bubble": (4, {"pp": 4, "schedule": "zero_bubble"}),
    "pp2 gpipe": (2, {"pp": 2, "schedule": "gpipe", "stage_layers": "cost"}),
    "pp2 x ep2": (4, {"pp": 2, "ep": 2, "zero_stage": 1}),
    "pp2 x tp2 x ep2": (4, {"pp": 2, "tp": 2, "ep": 2, "sequence_parallel": True}),
    "pp2 x tp2 x dp2": (8, {"pp": 2, "tp": 2, "stage_layers": [1, 3]}),
    "cp2 ring": (2, {"cp": 2}),
    "cp4 ring": (4, {"cp": 4}),
    "cp2 ulysses": (2, {"cp": 2, "context": "ulysses"}),
    "cp4 ulysses": (4, {"cp": 4, "context": "ulysses"}),
    "pp2 x dp2 x cp2": (8, {"pp": 2, "cp": 2, "zero_stage": 1}),
    "pp2 zero bubble, zero3": (4, {"pp": 2, "schedule": "zero_bubble", "zero_stage": 3}),
    # beyond what was asked for: everything at once
    "tp2+sp x ep2 x etp2 zero3": (4, {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 2, "zero_stage": 3}),
    "tp4 x ep4 in nodes of 2, zero2": (4, {"tp": 4, "ep": 4, "hierarchical_ranks": 2, "zero_stage": 2}),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training of STEPS steps; `layout` None is one process."""

    layout: str | None
    model: str
    mode: str
    num_micro: int

    @property
    def name(self) -> str:
        """As the tests call it."""
        return f"{self.layout or 'one process'}, {self.model}, {self.mode}, {self.num_micro} micro-batches"

    @property
    def num_ranks(self) -> int:
        """As many as the layout needs."""
        return LAYOUTS[self.layout][0] if self.layout is not None else 1

    @property
    def reference(self) -> "Case":
        """The same training in one process."""
        return Case(layout=None, model=self.model, mode=self.mode, num_micro=self.num_micro)

    def run(self) -> RunConfig:
        """The run file that a user would write."""
        model = (MODELS | DEEP | UNTIED)[self.model]
        parallel = LAYOUTS[self.layout][1] if self.layout is not None else {}
        axes = {axis: parallel.get(axis, 1) for axis in ("tp", "pp", "cp")}
        dp = self.num_ranks // (axes["tp"] * axes["pp"] * axes["cp"])
        moe: Any = model["moe"]
        return RunConfig.model_validate_json(
            json.dumps(
                {
                    "run": {"dir": "unused", "steps": STEPS, "seed": 5},
                    "model": {**model, "moe": {**moe, **MODES[self.mode]}},
                    "data": {"train": [{"path": "unused"}], "tokenizer": "unused", "seq_len": SEQ_LEN},
                    "batch": {
                        "global_sequences": SEQUENCES,
                        "micro_sequences": SEQUENCES // (dp * self.num_micro),
                    },
                    # a large eps: with a small one the first update is the sign of the gradient, however small that is
                    "optim": {"lr": 1e-2, "warmup_steps": 0, "eps": 1e-3, "clip_norm": 0.5},
                    "parallel": parallel,
                }
            )
        )


def models_of(layout: str) -> dict[str, dict[str, Any]]:
    """Those that can be laid out so."""
    parallel = LAYOUTS[layout][1]
    if parallel.get("pp", 1) == 1:
        return MODELS
    return UNTIED if parallel.get("zero_stage", 0) > 1 else DEEP


def some_cases() -> list[Case]:
    """Every layout once, models, modes and accumulation in turn."""
    found = []
    for number, layout in enumerate(LAYOUTS):
        models = tuple(models_of(layout))
        model, mode = models[number % len(models)], tuple(MODES)[number // 2 % 2]
        found.append(Case(layout=layout, model=model, mode=mode, num_micro=1 + number // 4 % 2))
    return found


def all_cases() -> Iterator[Case]:
    """Every layout with each model and mode, with and without accumulation."""
    for layout in LAYOUTS:
        for model, mode, num_micro in product(models_of(layout), MODES, (1, 2)):
            yield Case(layout=layout, model=model, mode=mode, num_micro=num_micro)


def global_batch(step: int) -> Batch:
    """All sequences of a step: two documents in each, and some targets that are not counted."""
    generator = np.random.default_rng(step)
    tokens = generator.integers(0, VOCAB, (SEQUENCES, SEQ_LEN + 1)).astype(np.int32)
    segment = np.zeros((SEQUENCES, SEQ_LEN), np.int32) + (np.arange(SEQ_LEN) >= 5)
    skipped = generator.random((SEQUENCES, SEQ_LEN)) < np.linspace(0.5, 0.0, SEQUENCES)[:, None]
    return Batch(
        tokens_BS=tokens[:, :-1].copy(),
        targets_BS=np.where(skipped, -1, tokens[:, 1:]).astype(np.int32),
        segment_BS=segment.astype(np.int32),
        position_BS=(np.arange(SEQ_LEN) - 5 * segment).astype(np.int32),
    )
