"""What a model is: shapes, router, position embedding. Pure: no framework is imported."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ascend_moe_train.part import Part

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


# What each kind of scaling reads, besides theta and fraction.
_SCALING_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "none": (),
        "linear": ("factor",),
        "llama3": ("factor", "original_positions", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "original_positions", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    }
)


class RopeConfig(Part):
    """Rotary position embedding (Su et al., 2021) of the first `fraction` of each head.

    `scaling` makes a model that was trained on `original_positions` reach `factor` times as far. `linear` divides
    positions by `factor` (Chen et al., 2023). `llama3` divides the frequencies that turn fewer than `low_freq_factor`
    times within the original positions, keeps those that turn more than `high_freq_factor` times, and blends between
    (Llama 3.1). `yarn` blends likewise between the dimensions whose frequencies turn `beta_fast` and `beta_slow` times,
    rounded outwards with `truncate`, and sharpens attention: with m(x) = 0.1 x ln(factor) + 1, cos and sin are
    multiplied by m(mscale) / m(mscale_all_dim) and the softmax scale by m(mscale_all_dim)^2 (Peng et al., 2023, and
    DeepSeek-V2, section 3.1.4).
    """

    theta: PositiveFloat = 10000.0
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: Annotated[float, Field(ge=1)] = 1.0
    original_positions: PositiveInt | None = None
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True
    mscale: NonNegativeFloat = 1.0
    mscale_all_dim: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            fitting = [kind for kind, names in _SCALING_KEYS.items() if name in names]
            if fitting and self.scaling not in fitting and value != field.default:
                kinds = " or ".join(f"'{kind}'" for kind in fitting)
                raise ValueError(f"{name} {value} has no effect with scaling '{self.scaling}': set scaling to {kinds}")
        if "original_positions" in _SCALING_KEYS[self.scaling] and self.original_positions is None:
            raise ValueError(f"original_positions is missing: scaling '{self.scaling}' needs it")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor {self.high_freq_factor}"
            )
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow {self.beta_slow} is not below beta_fast {self.beta_fast}")
        return self


class MoEConfig(Part):
    """A Mixture-of-Experts layer: router, dispatcher, experts.

    `aux_loss_coef` multiplies E * sum_e f_e * P_e, where f_e is the share of the T*K assignments that went to
    expert e and P_e the mean router probability (Switch Transformer, section 2.2; 1.0 when balanced). `aux_loss_scope`
    is the set of tokens over which f and P are taken: each `sequence`, the `batch` of one layer, or the batch of all
    layers pooled (`model`, as in transformers, whose coefficient is ours divided by K).
    """

    num_experts: PositiveInt
    top_k: PositiveInt
    ffn: PositiveInt
    shared_ffn: Annotated[int, Field(ge=0)] = 0
    dense_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    score: Literal["softmax", "sigmoid"] = "softmax"
    score_order: Literal["before_topk", "after_topk"] = "before_topk"
    normalize_topk: bool = True
    routed_scale: Annotated[float, Field(gt=0)] = 1.0
    capacity_factor: Annotated[float, Field(gt=0)] | None = None
    drop_policy: Literal["position", "probability"] = "position"
    aux_loss_coef: NonNegativeFloat = 0.01
    aux_loss_scope: Literal["sequence", "batch", "model"] = "batch"
    z_loss_coef: NonNegativeFloat = 0.0
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    force_balance: bool = False

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is more than num_experts {self.num_experts}")
        if self.score == "sigmoid" and self.score_order == "after_topk":
            raise ValueError("score_order 'after_topk' exists for score 'softmax' only: a sigmoid is taken per expert")
        if self.score_order == "after_topk" and not self.normalize_topk:
            raise ValueError("normalize_topk false is impossible with score_order 'after_topk': that softmax sums to 1")
        if self.capacity_factor is None and self.drop_policy != "position":
            raise ValueError(f"drop_policy '{self.drop_policy}' has no effect without capacity_factor: set one")
        return self


class ModelConfig(Part):
    """A decoder-only transformer. `ffn` is the width of dense layers, `moe.ffn` that of one expert.

    `moe` None is a dense model. `head_dim` None means hidden / num_heads. `qk_norm` normalises queries and keys before
    they are rotated: each `head` by itself, or the `full` width at once.
    """

    vocab_size: PositiveInt
    hidden: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt | None = None
    ffn: PositiveInt
    qk_norm: Literal["none", "head", "full"] = "none"
    norm_eps: PositiveFloat = 1e-5
    tie_embeddings: bool = False
    init_std: PositiveFloat = 0.02
    rope: RopeConfig = RopeConfig()
    moe: MoEConfig | None = None

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim if self.head_dim is not None else self.hidden // self.num_heads

    @property
    def rotary_size(self) -> int:
        """How much of each head is rotated."""
        return int(self.head_size * self.rope.fraction)

    def is_moe(self, layer: int) -> bool:
        """Whether decoder block `layer` (from 0) holds experts rather than one dense feed-forward."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.head_dim is None and self.hidden % self.num_heads:
            raise ValueError(f"hidden {self.hidden} does not divide by num_heads {self.num_heads}: set head_dim")
        if self.rotary_size % 2 or not self.rotary_size:
            raise ValueError(
                f"head size {self.head_size} times rope.fraction {self.rope.fraction} is {self.rotary_size}, which is "
                "not a positive even number: rotary embedding turns pairs"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} does not divide by num_kv_heads {self.num_kv_heads}")
        if self.moe is not None:
            beyond = [i for i in self.moe.dense_layers if i >= self.num_layers]
            if beyond:
                raise ValueError(f"moe.dense_layers {beyond} beyond the last layer {self.num_layers - 1}")
        return self
