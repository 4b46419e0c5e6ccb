"""The shape of every weight by the package's parameter names, and random weights of those shapes."""

import numpy as np

from ascend_moe_train.model.config import ModelConfig
from tests.oracle.arrays import F64


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of a model."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, config.hidden)}
    for layer in range(config.num_layers):
        below = _attention_shapes(config) | _feed_forward_shapes(config, layer)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in below.items()}
    shapes["norm.weight"] = (config.hidden,)
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocab_size, config.hidden)
    return shapes


def random_params(config: ModelConfig, seed: int) -> dict[str, F64]:
    """Weights with activations near 1; norm weights scatter around 1 so that leaving one out shows."""
    rng = np.random.default_rng(seed)
    params: dict[str, F64] = {}
    for name, shape in parameter_shapes(config).items():
        noise = rng.standard_normal(shape)
        params[name] = 1.0 + 0.2 * noise if len(shape) == 1 else noise / np.sqrt(config.hidden)
    return params


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, size = config.hidden, config.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn.qkv.weight": ((config.num_heads + 2 * config.num_kv_heads) * size, hidden),
        "attn.out.weight": (hidden, config.num_heads * size),
        "ffn_norm.weight": (hidden,),
    }
    if config.qk_norm == "head":
        shapes |= {"attn.q_norm.weight": (size,), "attn.k_norm.weight": (size,)}
    return shapes


def _feed_forward_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, moe = config.hidden, config.moe
    if moe is None or not config.is_moe(layer):
        return {"ffn.w13.weight": (2 * config.ffn, hidden), "ffn.w2.weight": (hidden, config.ffn)}
    shapes: dict[str, tuple[int, ...]] = {
        "moe.router.weight": (moe.num_experts, hidden),
        "moe.experts.w13": (moe.num_experts, hidden, 2 * moe.ffn),
        "moe.experts.w2": (moe.num_experts, moe.ffn, hidden),
    }
    if moe.shared_ffn:
        shapes |= {
            "moe.shared.w13.weight": (2 * moe.shared_ffn, hidden),
            "moe.shared.w2.weight": (hidden, moe.shared_ffn),
        }
    return shapes
