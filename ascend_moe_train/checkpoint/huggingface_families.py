"""How the config.json of each Hugging Face model family is read: one table per model_type. Pure.

To add a family, add its table; keys that are not in the table do not bear on the model's arithmetic. Where transformers
and the published code differ, this follows transformers.
"""

from collections.abc import Mapping
from types import MappingProxyType

from ascend_moe_train.checkpoint.huggingface_keys import (
    Family,
    Fixed,
    Key,
    deepseek_v2,
    deepseek_v3,
    dots1,
    glm4,
    gpt_oss_windows,
    qwen3_dense_layers,
)
from ascend_moe_train.checkpoint.huggingface_rope import RopeDefaults

_GPT_OSS_ROPE = MappingProxyType(
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
)

_DECODER = (
    Key(theirs=("vocab_size",), ours=("vocab_size",)),
    Key(theirs=("hidden_size",), ours=("hidden",)),
    Key(theirs=("num_hidden_layers",), ours=("num_layers",)),
    Key(theirs=("num_attention_heads",), ours=("num_heads",)),
    Key(theirs=("num_key_value_heads",), ours=("num_kv_heads",), default=None),
    Key(theirs=("tie_word_embeddings",), ours=("tie_embeddings",), default=False),
    Key(theirs=("initializer_range",), ours=("init_std",), default=0.02),
)
_HEAD_DIM = Key(theirs=("head_dim",), ours=("head_dim",), default=None)
_DENSE_FFN = Key(theirs=("intermediate_size",), ours=("ffn",))
_EXPERT_FFN = Key(theirs=("moe_intermediate_size",), ours=("moe.ffn",))
_NUM_EXPERTS = ("num_experts", "num_local_experts")
_TOP_K = Key(theirs=("num_experts_per_tok",), ours=("moe.top_k",))
_POOLED = MappingProxyType({"moe.score": "softmax", "moe.aux_loss_scope": "model"})


def _norm_eps(default: float) -> Key:
    return Key(theirs=("rms_norm_eps",), ours=("norm_eps",), default=default)


def _balance(default: float) -> Key:
    return Key(theirs=("router_aux_loss_coef",), ours=("moe.aux_loss_coef",), default=default)


def _latent(q_latent: int) -> tuple[Key, ...]:
    return (
        Key(theirs=("kv_lora_rank",), ours=("attention.mla.kv_latent",), default=512),
        Key(theirs=("q_lora_rank",), ours=("attention.mla.q_latent",), default=q_latent),
        Key(theirs=("qk_nope_head_dim",), ours=("attention.mla.nope_dim",), default=128),
        Key(theirs=("qk_rope_head_dim",), ours=("attention.mla.rope_dim",), default=64),
        Key(theirs=("v_head_dim",), ours=("attention.mla.value_dim",), default=128),
    )


_FIXED = (Fixed(theirs="hidden_act", value="silu"), Fixed(theirs="attention_dropout", value=0.0))
_NO_BIAS = Fixed(theirs="attention_bias", value=False)


def _bias(which: str, default: bool = False) -> Key:
    words: Mapping[object, object] = MappingProxyType({True: which, False: "none"})
    return Key(theirs=("attention_bias",), ours=("attention.bias",), default=default, words=words)


_NO_WINDOW = Fixed(theirs="use_sliding_window", value=False)
_EVERY_LAYER = Fixed(theirs="moe_layer_freq", value=1)

# A key of the published code alone: transformers has no balance loss for these, as with the default 0.
_SEQUENCE_BALANCE = Key(theirs=("aux_loss_alpha",), ours=("moe.aux_loss_coef",), default=0.0)
_DEEPSEEK_EXPERTS = (
    _DENSE_FFN,
    _EXPERT_FFN,
    Key(theirs=("n_routed_experts", *_NUM_EXPERTS), ours=("moe.num_experts",)),
    _TOP_K,
    _SEQUENCE_BALANCE,
)
# How fast the biases of the published models moved (DeepSeek-V3, section 4.2); no key says it.
_BIAS_RATE = 0.001

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            keys=(*_DECODER, _HEAD_DIM, _norm_eps(1e-6), _bias("all"), _DENSE_FFN),
            layout="split",
            fixed=(*_FIXED, Fixed(theirs="mlp_bias", value=False)),
            constants={"qk_norm": "none"},
        ),
        "qwen3": Family(
            keys=(*_DECODER, _HEAD_DIM, _norm_eps(1e-6), _bias("all"), _DENSE_FFN),
            layout="split",
            fixed=(*_FIXED, _NO_WINDOW),
            constants={"qk_norm": "head"},
        ),
        "mixtral": Family(
            keys=(
                *_DECODER,
                _HEAD_DIM,
                _norm_eps(1e-5),
                Key(theirs=("intermediate_size",), ours=("ffn", "moe.ffn")),
                Key(theirs=_NUM_EXPERTS[::-1], ours=("moe.num_experts",)),
                _TOP_K,
                _balance(0.001),
            ),
            layout="mixtral",
            fixed=(
                *_FIXED,
                Fixed(theirs="sliding_window", value=None),
                Fixed(theirs="router_jitter_noise", value=0.0),
            ),
            constants={**_POOLED, "qk_norm": "none", "moe.normalize_topk": True},
            rope=RopeDefaults(theta=1e6),
        ),
        "qwen3_moe": Family(
            keys=(
                *_DECODER,
                _HEAD_DIM,
                _norm_eps(1e-6),
                _bias("all"),
                _DENSE_FFN,
                _EXPERT_FFN,
                Key(theirs=_NUM_EXPERTS, ours=("moe.num_experts",)),
                _TOP_K,
                Key(theirs=("norm_topk_prob",), ours=("moe.normalize_topk",), default=False),
                _balance(0.001),
            ),
            layout="split",
            fixed=(*_FIXED, _NO_WINDOW),
            constants={**_POOLED, "qk_norm": "head"},
            derived=qwen3_dense_layers,
        ),
        "olmoe": Family(
            keys=(
                *_DECODER,
                _norm_eps(1e-5),
                _bias("all"),
                Key(theirs=("intermediate_size",), ours=("ffn", "moe.ffn")),
                Key(theirs=_NUM_EXPERTS, ours=("moe.num_experts",)),
                _TOP_K,
                Key(theirs=("norm_topk_prob",), ours=("moe.normalize_topk",), default=False),
                _balance(0.01),
            ),
            layout="split",
            fixed=(*_FIXED, Fixed(theirs="clip_qkv", value=None)),
            constants={**_POOLED, "qk_norm": "full"},
        ),
        "deepseek_v2": Family(
            keys=(
                *_DECODER,
                _norm_eps(1e-6),
                *_latent(1536),
                *_DEEPSEEK_EXPERTS,
                Key(theirs=("routed_scaling_factor",), ours=("moe.routed_scale",), default=1.0),
                Key(
                    theirs=("seq_aux",),
                    ours=("moe.aux_loss_scope",),
                    default=True,
                    words=MappingProxyType({True: "sequence", False: "batch"}),
                ),
            ),
            layout="split",
            fixed=(
                *_FIXED,
                _NO_BIAS,
                _EVERY_LAYER,
                Fixed(theirs="scoring_func", value="softmax"),
                Fixed(theirs="norm_topk_prob", value=False),
            ),
            constants={"moe.score": "softmax", "moe.normalize_topk": False},
            rope=RopeDefaults(scales_scores=True),
            derived=deepseek_v2,
        ),
        "deepseek_v3": Family(
            keys=(
                *_DECODER,
                _norm_eps(1e-6),
                *_latent(1536),
                *_DEEPSEEK_EXPERTS,
                Key(theirs=("routed_scaling_factor",), ours=("moe.routed_scale",), default=2.5),
                Key(theirs=("norm_topk_prob",), ours=("moe.normalize_topk",), default=True),
            ),
            layout="split",
            fixed=(
                *_FIXED,
                _NO_BIAS,
                _EVERY_LAYER,
                Fixed(theirs="scoring_func", value="sigmoid"),
                Fixed(theirs="topk_method", value="noaux_tc"),
                Fixed(theirs="rope_interleave", value=True),
            ),
            constants={
                "moe.score": "sigmoid",
                "moe.aux_loss_scope": "sequence",
                "moe.balance_bias_rate": _BIAS_RATE,
            },
            rope=RopeDefaults(scales_scores=True),
            derived=deepseek_v3,
        ),
        "glm4_moe": Family(
            keys=(
                *_DECODER,
                _HEAD_DIM,
                _norm_eps(1e-5),
                _bias("qkv"),
                Key(
                    theirs=("use_qk_norm",),
                    ours=("qk_norm",),
                    default=False,
                    words=MappingProxyType({True: "head", False: "none"}),
                ),
                *_DEEPSEEK_EXPERTS,
                Key(theirs=("routed_scaling_factor",), ours=("moe.routed_scale",), default=1.0),
                Key(theirs=("norm_topk_prob",), ours=("moe.normalize_topk",), default=True),
            ),
            layout="split",
            fixed=_FIXED,
            constants={
                "moe.score": "sigmoid",
                "moe.aux_loss_scope": "sequence",
                "moe.balance_bias_rate": _BIAS_RATE,
            },
            rope=RopeDefaults(fraction=0.5),
            derived=glm4,
        ),
        "dots1": Family(
            keys=(
                *_DECODER,
                _HEAD_DIM,
                _norm_eps(1e-6),
                _bias("all"),
                *_DEEPSEEK_EXPERTS,
                Key(theirs=("routed_scaling_factor",), ours=("moe.routed_scale",), default=1.0),
                Key(theirs=("norm_topk_prob",), ours=("moe.normalize_topk",), default=False),
            ),
            layout="split",
            fixed=_FIXED,
            constants={
                "qk_norm": "head",
                "moe.score": "sigmoid",
                "moe.aux_loss_scope": "sequence",
                "moe.balance_bias_rate": _BIAS_RATE,
            },
            derived=dots1,
        ),
        "gpt_oss": Family(
            keys=(
                *_DECODER,
                Key(theirs=("head_dim",), ours=("head_dim",), default=64),
                _norm_eps(1e-5),
                _bias("all", default=True),
                Key(theirs=("intermediate_size",), ours=("ffn", "moe.ffn")),
                Key(theirs=_NUM_EXPERTS[::-1], ours=("moe.num_experts",)),
                _TOP_K,
                Key(theirs=("swiglu_alpha",), ours=("moe.clamped_swiglu.alpha",), default=1.702),
                Key(theirs=("swiglu_limit",), ours=("moe.clamped_swiglu.limit",), default=7.0),
                _balance(0.001),
            ),
            layout="gpt_oss",
            fixed=_FIXED,
            constants={
                **_POOLED,
                "qk_norm": "none",
                "attention.sinks": True,
                "moe.score_order": "after_topk",
                "moe.router_bias": True,
                "moe.expert_bias": True,
            },
            rope=RopeDefaults(theta=150000.0, section=_GPT_OSS_ROPE),
            derived=gpt_oss_windows,
        ),
    }
)
