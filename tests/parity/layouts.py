"""Tiny models, the layouts that must train them as one process does, and what is fed to them."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.loader import Batch
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.mesh import mesh_of

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
# the same with as many layers as pipelines need, and what is needed at both of their ends
DEEP: dict[str, dict[str, Any]] = {
    f"{name} of {layers}": {**model, "num_layers": layers, **extra}
    for layers in (2, 4)
    for name, model, extra in (
        ("tied mixtral", MIXTRAL, {"tie_embeddings": True}),
        ("mtp deepseek", DEEPSEEK, {"mtp": {"depth": 1, "loss_coef": 0.3}}),
        ("untied mixtral", MIXTRAL, {}),
    )
}
MODES: dict[str, dict[str, Any]] = {
    "dropless": {},
    # under 1, so that some are dropped whatever the routing
    "capacity": {"capacity_factor": 0.9},
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"policy": "selective"},
    "full": {"policy": "full"},
    "full, inputs kept": {"policy": "full", "kept": "block_inputs"},
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
    "ep2 in 2 chunks, zero1": (2, {"ep": 2, "expert_chunks": 2, "zero_stage": 1}),
    "etp2 x ep2 in 2 chunks": (4, {"etp": 2, "ep": 2, "expert_chunks": 2}),
    "ep4, copies in nodes of 2, zero1": (
        4,
        {"ep": 4, "hierarchical_ranks": 2, "dedup_tokens": "copies", "zero_stage": 1},
    ),
    "tp2+sp x ep4, sums in nodes of 2": (
        4,
        {"tp": 2, "sequence_parallel": True, "ep": 4, "hierarchical_ranks": 2, "dedup_tokens": "sums"},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training of STEPS steps; `layout` None is one process."""

    layout: str | None
    model: str
    mode: str
    num_micro: int
    sequences: int = SEQUENCES
    recompute: str = "none"
    by_device: bool = False
    """Whether messages between stages are operators, as on a device, rather than arrays of the host."""
    overlap: bool = False

    @property
    def name(self) -> str:
        """As the tests call it."""
        words = [self.layout or "one process", self.model, self.mode, f"{self.num_micro} micro-batches", self.recompute]
        return ", ".join(
            [*words, *(["messages by operators"] if self.by_device else []), *(["overlap"] if self.overlap else [])]
        )

    @property
    def num_ranks(self) -> int:
        """As many as the layout needs."""
        return LAYOUTS[self.layout][0] if self.layout is not None else 1

    @property
    def reference(self) -> "Case":
        """The same training in one process."""
        return replace(self, layout=None, recompute="none", by_device=False, overlap=False)

    def run(self) -> RunConfig:
        """The run file that a user would write."""
        parallel = LAYOUTS[self.layout][1] if self.layout is not None else {}
        if self.overlap:  # in small buckets, so that there are some in every block
            parallel = {**parallel, "overlap": True, "bucket_bytes": 4096}
        axes = {axis: parallel.get(axis, 1) for axis in ("tp", "pp", "cp")}
        dp = self.num_ranks // (axes["tp"] * axes["pp"] * axes["cp"])
        model = (MODELS | DEEP)[self.model]
        moe = {**model["moe"], **MODES[self.mode]}
        batch = {"global_sequences": self.sequences, "micro_sequences": self.sequences // (dp * self.num_micro)}
        return run_config({**model, "moe": moe}, batch, parallel, self.recompute)


def run_config(
    model: dict[str, Any], batch: dict[str, int], parallel: dict[str, Any], recompute: str = "none"
) -> RunConfig:
    """A run of a tiny model. Raises ConfigError or ValueError for what a user may not write."""
    return RunConfig.model_validate_json(
        json.dumps(
            {
                "run": {"dir": "unused", "steps": STEPS, "seed": 5},
                "model": model,
                "data": {"train": [{"path": "unused"}], "tokenizer": "unused", "seq_len": SEQ_LEN},
                "batch": batch,
                # a large eps: with a small one the first update is the sign of the gradient, however small that is
                "optim": {"lr": 1e-2, "warmup_steps": 0, "eps": 1e-3, "clip_norm": 0.5},
                "parallel": parallel,
                "recompute": RECOMPUTE[recompute],
            }
        )
    )


def models_of(parallel: dict[str, Any]) -> list[str]:
    """Those that can be laid out so."""
    pp = parallel.get("pp", 1)
    if pp == 1:
        return list(MODELS)
    listed = parallel.get("stage_layers", ())
    layers = sum(listed) if isinstance(listed, list) else max(2, pp * parallel.get("chunks", 1))
    kinds = ["untied mixtral"] if parallel.get("zero_stage", 0) > 1 else ["tied mixtral", "mtp deepseek"]
    return [f"{kind} of {layers}" for kind in kinds]


def all_cases() -> Iterator[Case]:
    """Every layout with each model, each mode and each accumulation; their pairs are spread over the layouts. Pipelines
    have more accumulation, and recompute in turn."""
    for number, layout in enumerate(LAYOUTS):
        parallel = LAYOUTS[layout][1]
        models = models_of(parallel)
        if parallel.get("pp", 1) > 1:
            for turn, num_micro in enumerate((1, 4, 8), number):
                yield Case(
                    layout=layout,
                    model=models[turn % len(models)],
                    mode=tuple(MODES)[turn // 2 % 2],
                    num_micro=num_micro,
                    sequences=16,
                    recompute=("full", "none", "selective", "full, inputs kept")[(turn + number // 4) % 4],
                )
        else:
            for turn, model in enumerate(models):
                mode = tuple(MODES)[(turn + number) % 2]
                yield Case(layout=layout, model=model, mode=mode, num_micro=1 + (turn + number // 2) % 2)


_AXES = ("pp", "tp", "cp", "ep", "etp")

# To be mixed by `composed`: few, since each is trained in one process too.
TRAININGS = {
    1: (("mixtral", "capacity", 1), ("deepseek", "dropless", 2)),
    2: (("tied mixtral of 2", "dropless", 4), ("mtp deepseek of 2", "capacity", 2)),
    4: (("tied mixtral of 4", "capacity", 4),),
}


def composed(count: int, seed: int) -> list[Case]:
    """Random layouts up to 8 ranks, whatever a user may write, each another one; they are added to LAYOUTS."""
    generator = random.Random(seed)
    found: dict[str, Case] = {}
    while len(found) < count:
        pick = generator.choice
        num_ranks = pick((2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 8))
        parallel: dict[str, Any] = {axis: pick((1, 1, 2)) for axis in _AXES[1:]}
        parallel |= {"pp": pick((1, 2, 2, 4)), "zero_stage": pick((0, 1, 1, 2, 3)), "bucket_bytes": pick((8192, 2**20))}
        parallel |= {"sequence_parallel": pick((False, parallel["tp"] > 1))}
        parallel |= {"context": pick(("ring", "ulysses"))} if parallel["cp"] > 1 else {}
        if parallel["pp"] > 1:
            parallel |= {"schedule": pick(("gpipe", "1f1b", "zero_bubble", "interleaved"))}
            parallel |= {"chunks": 2} if parallel["schedule"] == "interleaved" else {}
        layers = parallel["pp"] * parallel.get("chunks", 1)
        model, mode, num_micro = pick(TRAININGS.get(layers, ((None, "", 0),)))
        mixed = [axis for axis in _AXES if parallel[axis] > 1]
        others = [f"{key}={value}" for key, value in parallel.items() if key not in (*_AXES, "bucket_bytes") and value]
        name = f"{num_ranks} ranks " + " ".join([*(f"{axis}{parallel[axis]}" for axis in mixed), *others])
        name = name.replace("sequence_parallel=True", "sp")
        if model is None or name in found or len(mixed) < (1 if num_ranks == 2 else 2):
            continue
        LAYOUTS[name] = (num_ranks, parallel)
        recompute = pick(("none", "full, inputs kept" if parallel["pp"] > 1 else "none", "full", "selective"))
        by_device = parallel["pp"] > 1 and len(found) % 2 == 1
        case = Case(layout=name, model=model, mode=mode, num_micro=num_micro, recompute=recompute, by_device=by_device)
        try:
            mesh_of(case.run(), num_ranks)
        except (ValueError, ConfigError, ZeroDivisionError):
            continue
        found[name] = case
    return list(found.values())


def global_batch(step: int, sequences: int = SEQUENCES) -> Batch:
    """All sequences of a step: two documents in each, and some targets that are not counted."""
    generator = np.random.default_rng(step)
    tokens = generator.integers(0, VOCAB, (sequences, SEQ_LEN + 1)).astype(np.int32)
    segment = np.zeros((sequences, SEQ_LEN), np.int32) + (np.arange(SEQ_LEN) >= 5)
    skipped = generator.random((sequences, SEQ_LEN)) < np.linspace(0.5, 0.0, sequences)[:, None]
    return Batch(
        tokens_BS=tokens[:, :-1].copy(),
        targets_BS=np.where(skipped, -1, tokens[:, 1:]).astype(np.int32),
        segment_BS=segment.astype(np.int32),
        position_BS=(np.arange(SEQ_LEN) - 5 * segment).astype(np.int32),
    )


NAMED = tuple(all_cases())
COMPOSED = composed(30, seed=1)
