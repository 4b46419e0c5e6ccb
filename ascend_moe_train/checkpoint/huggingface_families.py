"""How the config.json of each Hugging Face model family is read: one table per model_type. Pure.

To add a family, add its table; keys that are not in the table do not bear on the model's arithmetic. Where transformers
and the published code differ, this follows transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ascend_moe_train.checkpoint.huggingface_rope import RopeDefaults
from ascend_moe_train.checkpoint.huggingface_values import MAX_LAYERS, refused, whole

REQUIRED = object()

Config = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Key:
    """Which of their keys sets which of ours: its names, the usual one first, and the default of their code."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    default: object = REQUIRED


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """A key that must have the one value that this package computes, which is also its default."""

    theirs: str
    value: object


def nothing_more(config: Config, num_layers: int) -> Mapping[str, object]:
    """What a family sets whose keys map one to one."""
    return {}


_ROPE = RopeDefaults()


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one model_type is read.

    `constants` are what its code does without a key, `derived` what several keys decide together. `layout` is the table
    of huggingface_names.py that it is published in.
    """

    keys: tuple[Key, ...]
    layout: str
    fixed: tuple[Fixed, ...] = ()
    constants: Mapping[str, object] = field(default_factory=dict)
    rope: RopeDefaults = _ROPE
    derived: Callable[[Config, int], Mapping[str, object]] = nothing_more

    @property
    def has_experts(self) -> bool:
        """Whether its models are Mixtures of Experts."""
        return any(ours.startswith("moe.") for key in self.keys for ours in key.ours)


def _qwen3_dense_layers(config: Config, num_layers: int) -> Mapping[str, object]:
    """Layers in `mlp_only_layers`, and all but each `decoder_sparse_step`-th."""
    step = whole("decoder_sparse_step", config.get("decoder_sparse_step", 1), MAX_LAYERS)
    listed = config.get("mlp_only_layers")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or any(type(i) is not int or not 0 <= i < num_layers for i in listed):
        raise refused("mlp_only_layers", listed, f"a list of layer numbers from 0 to {num_layers - 1}")
    return {"moe.dense_layers": tuple(i for i in range(num_layers) if i in listed or (i + 1) % step)}


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


_FIXED = (Fixed(theirs="hidden_act", value="silu"), Fixed(theirs="attention_dropout", value=0.0))
_NO_BIAS = Fixed(theirs="attention_bias", value=False)
_NO_WINDOW = Fixed(theirs="use_sliding_window", value=False)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            keys=(*_DECODER, _HEAD_DIM, _norm_eps(1e-6), _DENSE_FFN),
            layout="split",
            fixed=(*_FIXED, _NO_BIAS, Fixed(theirs="mlp_bias", value=False)),
            constants={"qk_norm": "none"},
        ),
        "qwen3": Family(
            keys=(*_DECODER, _HEAD_DIM, _norm_eps(1e-6), _DENSE_FFN),
            layout="split",
            fixed=(*_FIXED, _NO_BIAS, _NO_WINDOW),
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
                _DENSE_FFN,
                _EXPERT_FFN,
                Key(theirs=_NUM_EXPERTS, ours=("moe.num_experts",)),
                _TOP_K,
                Key(theirs=("norm_topk_prob",), ours=("moe.normalize_topk",), default=False),
                _balance(0.001),
            ),
            layout="split",
            fixed=(*_FIXED, _NO_BIAS, _NO_WINDOW),
            constants={**_POOLED, "qk_norm": "head"},
            derived=_qwen3_dense_layers,
        ),
        "olmoe": Family(
            keys=(
                *_DECODER,
                _norm_eps(1e-5),
                Key(theirs=("intermediate_size",), ours=("ffn", "moe.ffn")),
                Key(theirs=_NUM_EXPERTS, ours=("moe.num_experts",)),
                _TOP_K,
                Key(theirs=("norm_topk_prob",), ours=("moe.normalize_topk",), default=False),
                _balance(0.01),
            ),
            layout="split",
            fixed=(*_FIXED, _NO_BIAS, Fixed(theirs="clip_qkv", value=None)),
            constants={**_POOLED, "qk_norm": "full"},
        ),
    }
)
