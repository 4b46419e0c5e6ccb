"""What a model config amounts to: parameter shapes, parameters, FLOPs. Pure.

Shape letters: D hidden, F ffn, E experts, K top-k, S sequence, H heads, G kv heads, V vocabulary.
Not counted here: activation bytes, optimizer state.
"""

from collections.abc import Iterator
from math import ceil, prod

from ascend_moe_train.model.config import MLAConfig, ModelConfig, MoEConfig

Shapes = dict[str, tuple[int, ...]]

# The last words of a parameter's name, and the part of the model that it belongs to; the first match counts.
_PARTS = (
    ("embed.weight", "embedding"),
    ("head.weight", "head"),
    ("norm.weight", "norms"),
    ("attn.qkv.weight", "attention"),
    ("attn.q.weight", "attention"),
    ("attn.q_down.weight", "attention"),
    ("attn.q_up.weight", "attention"),
    ("attn.kv_down.weight", "attention"),
    ("attn.kv_up.weight", "attention"),
    ("attn.out.weight", "attention"),
    ("attn.qkv.bias", "attention"),
    ("attn.out.bias", "attention"),
    ("attn.sinks", "attention"),
    ("moe.router.weight", "routers"),
    ("moe.router.bias", "routers"),
    ("moe.experts.w13", "experts"),
    ("moe.experts.w2", "experts"),
    ("moe.experts.w13_bias", "experts"),
    ("moe.experts.w2_bias", "experts"),
    ("moe.shared.w13.weight", "shared_experts"),
    ("moe.shared.w2.weight", "shared_experts"),
    ("ffn.w13.weight", "dense_ffn"),
    ("ffn.w2.weight", "dense_ffn"),
    ("merge.weight", "mtp_merges"),
)


def parameter_shapes(cfg: ModelConfig) -> Shapes:
    """Name and shape of every trained tensor, in the order of the forward pass.

    `qkv` rows are the query heads, then the key heads, then the value heads; `w13` holds gate (w1), then up (w3). With
    latent attention, the rows of `q` and of `kv_up` go by heads, those without position first in each, and the last
    rows of `kv_down` are the rotated key. Dense weights are [out, in]; those of the experts are [E, in, out], one block
    for all of a layer. `merge` takes the token's embedding, then the hidden state.
    """
    shapes: Shapes = {"embed.weight": (cfg.vocab_size, cfg.hidden)}
    for layer in range(cfg.num_layers):
        shapes |= _below(f"layers.{layer}.", _block_shapes(cfg, layer))
    shapes["norm.weight"] = (cfg.hidden,)
    if not cfg.tie_embeddings:
        shapes["head.weight"] = (cfg.vocab_size, cfg.hidden)
    for depth in range(cfg.mtp.depth if cfg.mtp is not None else 0):
        extra: Shapes = {
            "embed_norm.weight": (cfg.hidden,),
            "hidden_norm.weight": (cfg.hidden,),
            "merge.weight": (cfg.hidden, 2 * cfg.hidden),
            **_below("block.", _block_shapes(cfg, cfg.num_layers + depth)),
            "norm.weight": (cfg.hidden,),
        }
        shapes |= _below(f"mtp.{depth}.", extra)
    return shapes


def buffer_shapes(cfg: ModelConfig) -> Shapes:
    """Name and shape of every tensor that is part of the model and has no gradient."""
    if cfg.moe is None or cfg.moe.balance_bias_rate is None:
        return {}
    return {f"{prefix}moe.router.balance_bias": (cfg.moe.num_experts,) for prefix in moe_layers(cfg)}


def moe_layers(cfg: ModelConfig) -> list[str]:
    """Names of the blocks that hold experts, in the order of the forward pass, each with its dot."""
    return [prefix for prefix, layer in _blocks(cfg) if cfg.is_moe(layer)]


def _blocks(cfg: ModelConfig) -> Iterator[tuple[str, int]]:
    """Prefix and number of every decoder block; those of multi-token prediction are numbered after the others."""
    for layer in range(cfg.num_layers):
        yield f"layers.{layer}.", layer
    for depth in range(cfg.mtp.depth if cfg.mtp is not None else 0):
        yield f"mtp.{depth}.block.", cfg.num_layers + depth


def _below(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _block_shapes(cfg: ModelConfig, layer: int) -> Shapes:
    shapes: Shapes = {
        "attn_norm.weight": (cfg.hidden,),
        **_below("attn.", _attention_shapes(cfg)),
        "ffn_norm.weight": (cfg.hidden,),
    }
    if cfg.moe is not None and cfg.is_moe(layer):
        return shapes | _moe_shapes(cfg.hidden, cfg.moe)
    return shapes | {"ffn.w13.weight": (2 * cfg.ffn, cfg.hidden), "ffn.w2.weight": (cfg.hidden, cfg.ffn)}


def _attention_shapes(cfg: ModelConfig) -> Shapes:
    if cfg.attention.mla is not None:
        return _latent_shapes(cfg, cfg.attention.mla)
    head = cfg.head_size
    rows = (cfg.num_heads + 2 * cfg.num_kv_heads) * head
    shapes: Shapes = {"sinks": (cfg.num_heads,)} if cfg.attention.sinks else {}
    shapes["qkv.weight"] = (rows, cfg.hidden)
    if cfg.attention.bias != "none":
        shapes["qkv.bias"] = (rows,)
    if cfg.qk_norm != "none":
        q, k = (head, head) if cfg.qk_norm == "head" else (cfg.num_heads * head, cfg.num_kv_heads * head)
        shapes |= {"q_norm.weight": (q,), "k_norm.weight": (k,)}
    shapes["out.weight"] = (cfg.hidden, cfg.num_heads * head)
    if cfg.attention.bias == "all":
        shapes["out.bias"] = (cfg.hidden,)
    return shapes


def _latent_shapes(cfg: ModelConfig, mla: MLAConfig) -> Shapes:
    q_size = cfg.num_heads * cfg.head_size
    shapes: Shapes = {"q.weight": (q_size, cfg.hidden)}
    if mla.q_latent is not None:
        shapes = {
            "q_down.weight": (mla.q_latent, cfg.hidden),
            "q_latent_norm.weight": (mla.q_latent,),
            "q_up.weight": (q_size, mla.q_latent),
        }
    return shapes | {
        "kv_down.weight": (mla.kv_latent + mla.rope_dim, cfg.hidden),
        "kv_latent_norm.weight": (mla.kv_latent,),
        "kv_up.weight": (cfg.num_heads * (mla.nope_dim + mla.value_dim), mla.kv_latent),
        "out.weight": (cfg.hidden, cfg.num_heads * mla.value_dim),
    }


def _moe_shapes(hidden: int, moe: MoEConfig) -> Shapes:
    shapes: Shapes = {"moe.router.weight": (moe.num_experts, hidden)}
    if moe.router_bias:
        shapes["moe.router.bias"] = (moe.num_experts,)
    shapes["moe.experts.w13"] = (moe.num_experts, hidden, 2 * moe.ffn)
    shapes["moe.experts.w2"] = (moe.num_experts, moe.ffn, hidden)
    if moe.expert_bias:
        shapes["moe.experts.w13_bias"] = (moe.num_experts, 2 * moe.ffn)
        shapes["moe.experts.w2_bias"] = (moe.num_experts, hidden)
    if moe.shared_ffn:
        shapes |= {
            "moe.shared.w13.weight": (2 * moe.shared_ffn, hidden),
            "moe.shared.w2.weight": (hidden, moe.shared_ffn),
        }
    return shapes


def parameters_by_part(cfg: ModelConfig) -> dict[str, int]:
    """Parameters of each part of the model (embedding, attention, experts, ...), 0 for one it lacks."""
    totals = dict.fromkeys((part for _, part in _PARTS), 0)
    for name, shape in parameter_shapes(cfg).items():
        totals[next(part for ending, part in _PARTS if name.endswith(ending))] += prod(shape)
    return totals


def num_parameters(cfg: ModelConfig) -> int:
    """All trained numbers of the model; a tied embedding counts once."""
    return sum(parameters_by_part(cfg).values())


def num_active_parameters(cfg: ModelConfig) -> int:
    """Parameters that one token meets: all but the E - K experts of each MoE layer that it is not sent to.

    Embedding, head and router count in full, which is how Mixtral's 12.9 and Qwen3's 3.3 billion are counted.
    """
    total = num_parameters(cfg)
    if cfg.moe is None:
        return total
    experts = parameters_by_part(cfg)["experts"]
    return total - experts + experts // cfg.moe.num_experts * cfg.moe.top_k


def expert_capacity(capacity_factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Assignments that one expert takes of so many tokens: ceil(capacity_factor * T * K / E) (GShard: Lepikhin et al.,
    2020, section 3.1)."""
    return ceil(capacity_factor * num_tokens * top_k / num_experts)


def forward_flops_per_token(cfg: ModelConfig, seq_len: int, *, causal: bool = True) -> int:
    """Model FLOPs of the forward pass over one token of a sequence of `seq_len`.

    An m x k by k x n matrix product is 2 m n k FLOPs. Counted: all matrix products, router and head included, K experts
    per token whatever is dropped or padded. Not counted: the embedding's gather, norms, rotary embedding, softmax,
    activations, the weighted sum of experts. The attention products (scores, and scores times values) are 2 S H (Z + Y)
    per token, for heads of width Z in queries and keys and Y in values, when each query meets all S keys (`causal`
    False: Megatron-LM's and PaLM's convention, Chowdhery et al., 2022, appendix B), and half of that when the mask's
    empty half is left out (`causal` True, the default: what has to be computed); where there is a window of W keys, S
    becomes W, and the half W - W^2 / 2S.
    """
    depth = cfg.mtp.depth if cfg.mtp is not None else 0
    flops = 2 * cfg.hidden * cfg.vocab_size * (1 + depth) + 4 * cfg.hidden * cfg.hidden * depth
    return flops + sum(block_flops_per_token(cfg, layer, seq_len, causal=causal) for _, layer in _blocks(cfg))


def block_flops_per_token(cfg: ModelConfig, layer: int, seq_len: int, *, causal: bool = True) -> int:
    """What one decoder block has of `forward_flops_per_token`."""
    projections = sum(2 * prod(shape) for shape in _attention_shapes(cfg).values() if len(shape) == 2)
    products = cfg.num_heads * (cfg.head_size + cfg.value_size) * _twice_the_keys(cfg, layer, seq_len, causal)
    return projections + products + _feed_forward_flops(cfg, layer)


def _twice_the_keys(cfg: ModelConfig, layer: int, seq_len: int, causal: bool) -> int:
    """Twice the number of keys that a query meets, on average over the sequence."""
    is_windowed = cfg.attention.window is not None and layer in cfg.attention.window_layers
    most = min(seq_len, cfg.attention.window) if is_windowed and cfg.attention.window is not None else seq_len
    return (2 * most * seq_len - most * most) // seq_len if causal else 2 * most


def _feed_forward_flops(cfg: ModelConfig, layer: int) -> int:
    if cfg.moe is None or not cfg.is_moe(layer):
        return 6 * cfg.hidden * cfg.ffn
    moe = cfg.moe
    return 2 * cfg.hidden * moe.num_experts + 6 * cfg.hidden * (moe.top_k * moe.ffn + moe.shared_ffn)


def training_flops_per_token(cfg: ModelConfig, seq_len: int, *, causal: bool = True) -> int:
    """Model FLOPs of forward and backward: three times the forward pass (Kaplan et al., 2020, section 2.1).

    Each matrix product has two of its size in the backward pass. Recomputation and the optimizer are not counted: these
    are model FLOPs as in MFU, not hardware FLOPs.
    """
    return 3 * forward_flops_per_token(cfg, seq_len, causal=causal)
