"""What our tensors are called in Hugging Face models: one table of rows per layout of names. Pure.

To add a family, add the rows that no family before it has; nothing outside this table knows one name from another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ascend_moe_train.model.config import MLAConfig, ModelConfig


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Neighbours that are halves for us: in every block of `block` outputs, those from `start` on are ordered
    (0, 1), (2, 3), ... there, and 0, 2, ..., then 1, 3, ... here."""

    block: int
    start: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """Where one of our tensors is kept in a Hugging Face model.

    Ours joins the parts `theirs` along their outputs: `axis`, the last but one of [out, in]. `shares` are the config
    fields that the sizes of the parts go by; empty, they are equal. A part whose name holds {expert} is one tensor per
    expert. `transposed`: theirs are [out, in], ours [in, out]. `pairs`, if given, reorders the outputs.
    """

    ours: str
    theirs: tuple[str, ...]
    shares: tuple[str, ...] = ()
    axis: int = -2
    transposed: bool = False
    pairs: Callable[[ModelConfig], Pairs] | None = None


_LAYER, _MTP, _THEIRS = "layers.{layer}.", "mtp.{layer}.", "model.layers.{layer}."
_ATTENTION, _MLP, _MIXTRAL = f"{_THEIRS}self_attn.", f"{_THEIRS}mlp.", f"{_THEIRS}block_sparse_moe."

_COMMON = (
    Row(ours="embed.weight", theirs=("model.embed_tokens.weight",)),
    Row(ours=f"{_LAYER}attn_norm.weight", theirs=(f"{_THEIRS}input_layernorm.weight",)),
    Row(
        ours=f"{_LAYER}attn.qkv.weight",
        theirs=tuple(f"{_ATTENTION}{part}_proj.weight" for part in "qkv"),
        shares=("num_heads", "num_kv_heads", "num_kv_heads"),
    ),
    Row(ours=f"{_LAYER}attn.out.weight", theirs=(f"{_ATTENTION}o_proj.weight",)),
    Row(ours=f"{_LAYER}ffn_norm.weight", theirs=(f"{_THEIRS}post_attention_layernorm.weight",)),
    Row(ours="norm.weight", theirs=("model.norm.weight",)),
    Row(ours="head.weight", theirs=("lm_head.weight",)),
)
_BIASES = (
    Row(
        ours=f"{_LAYER}attn.qkv.bias",
        theirs=tuple(f"{_ATTENTION}{part}_proj.bias" for part in "qkv"),
        shares=("num_heads", "num_kv_heads", "num_kv_heads"),
        axis=-1,
    ),
    Row(ours=f"{_LAYER}attn.out.bias", theirs=(f"{_ATTENTION}o_proj.bias",)),
)
_QK_NORM = (
    Row(ours=f"{_LAYER}attn.q_norm.weight", theirs=(f"{_ATTENTION}q_norm.weight",)),
    Row(ours=f"{_LAYER}attn.k_norm.weight", theirs=(f"{_ATTENTION}k_norm.weight",)),
)
_DENSE = (
    Row(ours=f"{_LAYER}ffn.w13.weight", theirs=(f"{_MLP}gate_proj.weight", f"{_MLP}up_proj.weight")),
    Row(ours=f"{_LAYER}ffn.w2.weight", theirs=(f"{_MLP}down_proj.weight",)),
)


def _experts(router: str, w13: tuple[str, ...], w2: str) -> tuple[Row, ...]:
    return (
        Row(ours=f"{_LAYER}moe.router.weight", theirs=(router,)),
        Row(ours=f"{_LAYER}moe.experts.w13", theirs=w13, transposed=True),
        Row(ours=f"{_LAYER}moe.experts.w2", theirs=(w2,), transposed=True),
    )


def _query_pairs(cfg: ModelConfig) -> Pairs:
    mla = _mla(cfg)
    return Pairs(block=mla.nope_dim + mla.rope_dim, start=mla.nope_dim)


def _key_pairs(cfg: ModelConfig) -> Pairs:
    mla = _mla(cfg)
    return Pairs(block=mla.kv_latent + mla.rope_dim, start=mla.kv_latent)


def _mla(cfg: ModelConfig) -> MLAConfig:
    if cfg.attention.mla is None:
        raise ValueError("rows of latent attention for a model without it")
    return cfg.attention.mla


_DEEPSEEK = (
    Row(ours=f"{_LAYER}attn.q.weight", theirs=(f"{_ATTENTION}q_proj.weight",), pairs=_query_pairs),
    Row(ours=f"{_LAYER}attn.q_down.weight", theirs=(f"{_ATTENTION}q_a_proj.weight",)),
    Row(ours=f"{_LAYER}attn.q_latent_norm.weight", theirs=(f"{_ATTENTION}q_a_layernorm.weight",)),
    Row(ours=f"{_LAYER}attn.q_up.weight", theirs=(f"{_ATTENTION}q_b_proj.weight",), pairs=_query_pairs),
    Row(ours=f"{_LAYER}attn.kv_down.weight", theirs=(f"{_ATTENTION}kv_a_proj_with_mqa.weight",), pairs=_key_pairs),
    Row(ours=f"{_LAYER}attn.kv_latent_norm.weight", theirs=(f"{_ATTENTION}kv_a_layernorm.weight",)),
    Row(ours=f"{_LAYER}attn.kv_up.weight", theirs=(f"{_ATTENTION}kv_b_proj.weight",)),
    Row(ours=f"{_LAYER}moe.router.balance_bias", theirs=(f"{_MLP}gate.e_score_correction_bias",)),
    Row(
        ours=f"{_LAYER}moe.shared.w13.weight",
        theirs=(f"{_MLP}shared_experts.gate_proj.weight", f"{_MLP}shared_experts.up_proj.weight"),
    ),
    Row(ours=f"{_LAYER}moe.shared.w2.weight", theirs=(f"{_MLP}shared_experts.down_proj.weight",)),
    # Blocks of multi-token prediction are numbered on from the last layer.
    Row(ours=f"{_MTP}embed_norm.weight", theirs=(f"{_THEIRS}enorm.weight",)),
    Row(ours=f"{_MTP}hidden_norm.weight", theirs=(f"{_THEIRS}hnorm.weight",)),
    Row(ours=f"{_MTP}merge.weight", theirs=(f"{_THEIRS}eh_proj.weight",)),
    Row(ours=f"{_MTP}norm.weight", theirs=(f"{_THEIRS}shared_head.norm.weight",)),
)

_OF_MOST = _COMMON + _BIASES + _QK_NORM + _DENSE + _DEEPSEEK


def _gate_and_up_pairs(cfg: ModelConfig) -> Pairs:
    if cfg.moe is None:
        raise ValueError("rows of experts for a model without them")
    return Pairs(block=2 * cfg.moe.ffn)


_GPT_OSS = (
    Row(ours=f"{_LAYER}attn.sinks", theirs=(f"{_ATTENTION}sinks",)),
    Row(ours=f"{_LAYER}moe.router.weight", theirs=(f"{_MLP}router.weight",)),
    Row(ours=f"{_LAYER}moe.router.bias", theirs=(f"{_MLP}router.bias",)),
    Row(ours=f"{_LAYER}moe.experts.w13", theirs=(f"{_MLP}experts.gate_up_proj",), axis=-1, pairs=_gate_and_up_pairs),
    Row(
        ours=f"{_LAYER}moe.experts.w13_bias",
        theirs=(f"{_MLP}experts.gate_up_proj_bias",),
        axis=-1,
        pairs=_gate_and_up_pairs,
    ),
    Row(ours=f"{_LAYER}moe.experts.w2", theirs=(f"{_MLP}experts.down_proj",)),
    Row(ours=f"{_LAYER}moe.experts.w2_bias", theirs=(f"{_MLP}experts.down_proj_bias",)),
)


def repeated(cfg: ModelConfig) -> dict[str, str]:
    """Tensors that some files hold although they repeat another one, and which: heads that are tied, and what blocks of
    multi-token prediction share with the model."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    copies = {head: embedding} if cfg.tie_embeddings else {}
    for layer in range(cfg.num_layers, cfg.num_layers + (cfg.mtp.depth if cfg.mtp is not None else 0)):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = embedding
        copies[f"model.layers.{layer}.shared_head.head.weight"] = embedding if cfg.tie_embeddings else head
    return copies


LAYOUTS: Mapping[str, tuple[Row, ...]] = MappingProxyType(
    {
        # As published, and as transformers' save_pretrained writes: Mixtral,
        "mixtral": _COMMON
        + _experts(
            f"{_MIXTRAL}gate.weight",
            (f"{_MIXTRAL}experts.{{expert}}.w1.weight", f"{_MIXTRAL}experts.{{expert}}.w3.weight"),
            f"{_MIXTRAL}experts.{{expert}}.w2.weight",
        ),
        # most others, and gpt-oss.
        "split": _OF_MOST
        + _experts(
            f"{_MLP}gate.weight",
            (f"{_MLP}experts.{{expert}}.gate_proj.weight", f"{_MLP}experts.{{expert}}.up_proj.weight"),
            f"{_MLP}experts.{{expert}}.down_proj.weight",
        ),
        "gpt_oss": _COMMON + _BIASES + _GPT_OSS,
        # As transformers 5 keeps the first two in memory.
        "fused": _OF_MOST
        + _experts(f"{_MLP}gate.weight", (f"{_MLP}experts.gate_up_proj",), f"{_MLP}experts.down_proj"),
    }
)
