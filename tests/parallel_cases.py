"""Random models with meshes that can cut them, and what each rank then holds, written from the meaning of the dims."""

from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ascend_moe_train.model.config import (
    AttentionConfig,
    LoraConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
)
from ascend_moe_train.parallel.mesh import Coordinates, Mesh

Array = NDArray[Any]
MOST_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model on a mesh."""

    model: ModelConfig
    mesh: Mesh
    sequence_parallel: bool
    lora: LoraConfig | None


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Every kind of tensor, sizes that divide barely or often, fewer key and value heads than tp ranks too."""
    cp, ep, etp = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    tp = draw(st.sampled_from([1, 2, 3, 4, 6]))
    least = lcm(cp * tp, ep * etp)
    ranks = least * draw(st.integers(1, max(1, MOST_RANKS // least)))
    mesh = Mesh.make(ranks, cp=cp, tp=tp, ep=ep, etp=etp)
    moe = _moe(draw, tp, ep, etp) if ep * etp > 1 or draw(st.booleans()) else None
    model = ModelConfig(
        vocab_size=tp * draw(st.integers(1, 4)),
        hidden=draw(st.integers(2, 5)),
        num_layers=2,
        ffn=tp * draw(st.integers(1, 3)),
        tie_embeddings=draw(st.booleans()),
        moe=moe,
        mtp=MTPConfig() if draw(st.booleans()) else None,
        **_attention(draw, tp),
    )
    lora = LoraConfig(r=2) if mesh.tp * mesh.ep * mesh.etp == 1 and model.attention.mla is None else None
    return Layout(model=model, mesh=mesh, sequence_parallel=tp > 1 and draw(st.booleans()), lora=lora)


def _attention(draw: st.DrawFn, tp: int) -> dict[str, Any]:
    heads = tp * draw(st.integers(1, 3))
    if draw(st.booleans()):
        mla = MLAConfig(
            kv_latent=draw(st.integers(1, 3)),
            q_latent=draw(st.sampled_from([None, 2])),
            nope_dim=draw(st.integers(1, 3)),
            rope_dim=2,
            value_dim=draw(st.integers(1, 3)),
        )
        return {"num_heads": heads, "num_kv_heads": heads, "attention": AttentionConfig(mla=mla)}
    groups = [n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
    return {
        "num_heads": heads,
        "num_kv_heads": draw(st.sampled_from(groups)),
        "head_dim": 2,
        "qk_norm": draw(st.sampled_from(["none", "head"] + ["full"] * (tp == 1))),
        "attention": AttentionConfig(bias=draw(st.sampled_from(["none", "qkv", "all"])), sinks=draw(st.booleans())),
    }


def _moe(draw: st.DrawFn, tp: int, ep: int, etp: int) -> MoEConfig:
    return MoEConfig(
        num_experts=ep * draw(st.integers(1, 2)),
        top_k=1,
        ffn=etp * draw(st.integers(1, 3)),
        shared_ffn=tp * draw(st.integers(0, 2)),
        dense_layers=(0,) if draw(st.booleans()) else (),
        balance_bias_rate=draw(st.sampled_from([None, 0.1])),
        router_bias=draw(st.booleans()),
        expert_bias=draw(st.booleans()),
    )


def local_value(name: str, value: Array, model: ModelConfig, mesh: Mesh, at: Coordinates) -> Array:
    """What the rank at these coordinates holds of a tensor."""
    words = name.split(".")
    place = ".".join(words[-2:]) if words[-1] in ("weight", "bias") else words[-1]
    if place in ("embed.weight", "head.weight", "sinks", "q.weight", "q_up.weight", "kv_up.weight"):
        return np.split(value, mesh.tp)[at.tp]
    if place in ("qkv.weight", "qkv.bias"):
        return _heads(value, model, mesh.tp, at.tp)
    if place in ("out.weight", "w2.weight"):
        return np.split(value, mesh.tp, axis=1)[at.tp]
    if place == "w13.weight":
        return np.concatenate([np.split(half, mesh.tp)[at.tp] for half in np.split(value, 2)])
    if place == "out.bias":
        return value if at.tp == 0 else value[:0]
    if "experts" in words:
        mine = np.split(value, mesh.ep)[at.ep]
        if place.startswith("w13"):
            halves = np.split(mine, 2, axis=-1)
            return np.concatenate([np.split(half, mesh.etp, axis=-1)[at.etp] for half in halves], axis=-1)
        if place == "w2":
            return np.split(mine, mesh.etp, axis=1)[at.etp]
        return mine if at.etp == 0 else mine[:0]
    return value


def _heads(value: Array, model: ModelConfig, tp: int, place: int) -> Array:
    """Rows of this rank's query heads, then of the key and the value heads that those attend to."""
    per = model.num_heads // tp
    queries = list(range(place * per, (place + 1) * per))
    of_query = model.num_heads // model.num_kv_heads
    keys = sorted({head // of_query for head in queries})
    heads = value.reshape(-1, model.head_size, *value.shape[1:])
    k, v = model.num_heads, model.num_heads + model.num_kv_heads
    chosen = heads[[*queries, *(k + head for head in keys), *(v + head for head in keys)]]
    return chosen.reshape(-1, *value.shape[1:])
