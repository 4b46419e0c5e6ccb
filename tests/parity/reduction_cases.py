"""Gradients of a model on meshes with every axis, for test_reduction.py. N tensors; j places in a reduction group."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.config import AttentionConfig, ModelConfig, MoEConfig
from ascend_moe_train.parallel.mesh import Mesh
from ascend_moe_train.parallel.shards import Placement, placements, take

RANKS = 4
ROWS = 3
QKV = "layers.0.attn.qkv.weight"

MODEL = ModelConfig(
    vocab_size=12,
    hidden=6,
    num_layers=1,
    num_heads=4,
    num_kv_heads=1,
    head_dim=2,
    ffn=8,
    attention=AttentionConfig(bias="all", sinks=True),
    moe=MoEConfig(num_experts=4, top_k=2, ffn=6, shared_ffn=4, router_bias=True, expert_bias=True),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """`options` are those of section `parallel`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return Mesh.make(RANKS, **{axis: self.options.get(axis, 1) for axis in ("tp", "ep", "etp")})

    @property
    def stage(self) -> int:
        return int(self.options["zero_stage"])

    @property
    def run(self) -> RunConfig:
        micro = {"global_sequences": 12, "micro_sequences": 12 // self.mesh.dp}
        return RunConfig.model_validate(
            {
                "run": {"dir": "unused", "steps": 200},
                "model": MODEL.model_dump(),
                "data": {"train": ({"path": "unused"},), "tokenizer": "unused", "seq_len": 8},
                "batch": micro,
                "parallel": {"bucket_bytes": 500, **self.options},
            }
        )

    def placed(self, rank: int) -> dict[str, Placement]:
        by_tokens = bool(self.options.get("sequence_parallel", False))
        return placements(MODEL, self.mesh, rank, sequence_parallel=by_tokens)


def _case(**options: Any) -> Case:
    return Case(name=", ".join(f"{key} {value}" for key, value in options.items()), options=options)


CASES = {
    case.name: case
    for case in (
        _case(tp=4, zero_stage=0),
        _case(tp=2, zero_stage=0),
        _case(tp=2, sequence_parallel=True, zero_stage=1),
        _case(tp=2, ep=2, etp=2, zero_stage=2),
        _case(ep=2, zero_stage=1),
        _case(tp=2, zero_stage=3),
    )
}


def random(name: str, number: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.random.default_rng([zlib.crc32(name.encode()), number]).standard_normal(shape, np.float32)


def total(name: str, placement: Placement) -> NDArray[np.float64]:
    """The gradient of a whole tensor."""
    return sum(
        (random(name, j, placement.shape).astype(np.float64) for j in range(len(placement.group))),
        np.zeros(placement.shape),
    )


def brought(name: str, placement: Placement, rank: int) -> NDArray[np.float32]:
    """What a rank has of it before the reduction: alike on ranks that differ neither in their place in the group nor in
    what they hold, but for repeated rows, of which each neighbour has a part."""
    local = take(random(name, placement.index, placement.shape), placement).copy()
    if placement.repeated is not None:
        parts = np.arange(1, len(placement.repeated.ranks) + 1, dtype=np.float32)
        local[placement.repeated.start :] *= (parts / parts.sum())[placement.repeated.ranks.index(rank)]
    return local


def figures(case: Case, rank: int) -> NDArray[np.float32]:
    """Of a rank: two that are sums over data parallel ranks, two that are equal everywhere, one that is its own."""
    dp = case.mesh.coordinates(rank).dp
    return np.array([1.5 + dp, 0.25 * dp, 0.7, 0.3, rank], np.float32)
