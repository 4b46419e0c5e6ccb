"""What a model is: shapes, router, position embedding. Pure: no framework is imported."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ascend_moe_train.part import Part

PositiveInt = Annotated[int, Field(gt=0)]
Layers = Annotated[int, Field(gt=0, le=10_000)]  # each is gone through by name, so that more would take for ever
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


class MLAConfig(Part):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values are unfolded from one small vector.

    Widths: `kv_latent` of what keys and values come from, `q_latent` of what queries come from (None: straight from the
    hidden state), and of each head's parts: `nope_dim` of the part of q and k without position, `rope_dim` of the part
    that is rotated (in k it is the same for all heads), `value_dim` of v. `norm_eps` is that of the latents' norms.
    """

    kv_latent: PositiveInt
    q_latent: PositiveInt | None = None
    nope_dim: PositiveInt
    rope_dim: PositiveInt
    value_dim: PositiveInt
    norm_eps: PositiveFloat = 1e-6


class AttentionConfig(Part):
    """What attention is beyond heads and their norms. `mla` None is grouped-query attention.

    `bias` is added to queries, keys and values (`qkv`), and to the output too (`all`). With `sinks`, each head has one
    more score, learned, that takes its part of the softmax and has no value (gpt-oss). In `window_layers`, a query sees
    the last `window` keys, itself included.
    """

    bias: Literal["none", "qkv", "all"] = "none"
    sinks: bool = False
    window: PositiveInt | None = None
    window_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    mla: MLAConfig | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.window is None and self.window_layers:
            raise ValueError(f"window_layers {list(self.window_layers)} have no effect without window: set it")
        if self.window is not None and not self.window_layers:
            raise ValueError(f"window {self.window} has no effect without window_layers: name some")
        if self.mla is not None:
            for name in ("bias", "sinks", "window"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} {getattr(self, name)} is impossible with mla: leave it out")
        return self


class ClampedSwiGLUConfig(Part):
    """The experts' activation of gpt-oss: (u + 1) * g * sigmoid(alpha * g), with g = min(gate, limit) and u the other
    half, clamped to [-limit, limit] (the model card, arXiv 2508.10925, section 2.1)."""

    alpha: PositiveFloat = 1.702
    limit: PositiveFloat = 7.0


class MoEConfig(Part):
    """A Mixture-of-Experts layer: router, dispatcher, experts.

    `aux_loss_coef` multiplies E * sum_e f_e * P_e, where f_e is the share of the T*K assignments that went to
    expert e and P_e the mean router probability (Switch Transformer, section 2.2; 1.0 when balanced). `aux_loss_scope`
    is the set of tokens over which f and P are taken: each `sequence`, the `batch` of one layer, or the batch of all
    layers pooled (`model`, as in transformers, whose coefficient is ours divided by K).

    `num_groups` equal groups of experts compete first: a token's experts come from the `top_groups` whose best expert
    (`groups_by: best`, DeepSeek-V2, section 2.1.2) or whose two best together (`best_two`, DeepSeek-V3) score highest.

    `balance_bias_rate` balances without a loss (Wang et al., 2024; DeepSeek-V3, section 2.1.2): a bias per expert is
    added to its score where experts are chosen, not where they are weighed, and after each step falls by this much if
    the expert had more than its share of tokens, and rises if less. 0 keeps the biases as they are, None has none.

    `router_bias` and `expert_bias` are weights like any other: of the logits, and of both products of each expert.
    `clamped_swiglu` replaces the activation of the experts, not of shared ones and dense layers.
    """

    num_experts: PositiveInt
    top_k: PositiveInt
    ffn: PositiveInt
    shared_ffn: Annotated[int, Field(ge=0)] = 0
    dense_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    score: Literal["softmax", "sigmoid"] = "softmax"
    score_order: Literal["before_topk", "after_topk"] = "before_topk"
    normalize_topk: bool = True
    num_groups: PositiveInt = 1
    top_groups: PositiveInt = 1
    groups_by: Literal["best", "best_two"] = "best"
    balance_bias_rate: NonNegativeFloat | None = None
    router_bias: bool = False
    expert_bias: bool = False
    clamped_swiglu: ClampedSwiGLUConfig | None = None
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
        if self.score_order == "after_topk" and self.balance_bias_rate is not None:
            raise ValueError("balance_bias_rate is impossible with score_order 'after_topk': set it to null")
        self._check_groups()
        return self

    def _check_groups(self) -> None:
        if self.num_groups == 1 and (self.top_groups != 1 or self.groups_by != "best"):
            raise ValueError(
                f"top_groups {self.top_groups}, groups_by '{self.groups_by}' have no effect with num_groups 1: set it"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_experts {self.num_experts} does not divide by num_groups {self.num_groups}")
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups {self.top_groups} is more than num_groups {self.num_groups}")
        per = self.num_experts // self.num_groups
        if self.top_k > self.top_groups * per:
            raise ValueError(f"top_k {self.top_k} is more than top_groups {self.top_groups} of {per} experts each hold")
        if self.groups_by == "best_two" and per < 2:
            raise ValueError(
                f"groups_by 'best_two' needs groups of two experts: num_groups {self.num_groups} has {per}"
            )


class MTPConfig(Part):
    """Multi-token prediction in training (DeepSeek-V3, section 2.2): `depth` more blocks in a row, of which the k-th
    predicts the token k places after the next; `loss_coef` weighs the mean of their losses (lambda in the paper)."""

    depth: Layers = 1
    loss_coef: NonNegativeFloat = 0.3


class ModelConfig(Part):
    """A decoder-only transformer. `ffn` is the width of dense layers, `moe.ffn` that of one expert.

    `moe` None is a dense model. `head_dim` None means hidden / num_heads. `qk_norm` normalises queries and keys before
    they are rotated: each `head` by itself, or the `full` width at once.
    """

    vocab_size: PositiveInt
    hidden: PositiveInt
    num_layers: Layers
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt | None = None
    ffn: PositiveInt
    qk_norm: Literal["none", "head", "full"] = "none"
    norm_eps: PositiveFloat = 1e-5
    tie_embeddings: bool = False
    init_std: PositiveFloat = 0.02
    rope: RopeConfig = RopeConfig()
    attention: AttentionConfig = AttentionConfig()
    moe: MoEConfig | None = None
    mtp: MTPConfig | None = None

    @property
    def head_size(self) -> int:
        """Width of one head of queries and keys."""
        if self.attention.mla is not None:
            return self.attention.mla.nope_dim + self.attention.mla.rope_dim
        return self.head_dim if self.head_dim is not None else self.hidden // self.num_heads

    @property
    def value_size(self) -> int:
        """Width of one head of values."""
        return self.attention.mla.value_dim if self.attention.mla is not None else self.head_size

    @property
    def rotary_size(self) -> int:
        """How much of each head is rotated."""
        if self.attention.mla is not None:
            return self.attention.mla.rope_dim
        return int(self.head_size * self.rope.fraction)

    def is_moe(self, layer: int) -> bool:
        """Whether decoder block `layer` (from 0) holds experts rather than one dense feed-forward."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.attention.mla is not None:
            self._check_mla(self.attention.mla)
        elif self.head_dim is None and self.hidden % self.num_heads:
            raise ValueError(f"hidden {self.hidden} does not divide by num_heads {self.num_heads}: set head_dim")
        elif self.rotary_size % 2 or not self.rotary_size:
            raise ValueError(
                f"head size {self.head_size} times rope.fraction {self.rope.fraction} is {self.rotary_size}, which is "
                "not a positive even number: rotary embedding turns pairs"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} does not divide by num_kv_heads {self.num_kv_heads}")
        lists = {"attention.window_layers": self.attention.window_layers}
        if self.moe is not None:
            lists["moe.dense_layers"] = self.moe.dense_layers
        for name, layers in lists.items():
            beyond = [i for i in layers if i >= self.num_layers]
            if beyond:
                raise ValueError(f"{name} {beyond} beyond the last layer {self.num_layers - 1}")
        return self

    def _check_mla(self, mla: MLAConfig) -> None:
        if mla.rope_dim % 2:
            raise ValueError(f"attention.mla.rope_dim {mla.rope_dim} is odd: rotary embedding turns pairs")
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} is impossible with attention.mla, where each of num_heads "
                f"{self.num_heads} has keys of its own: set it to that"
            )
        without_effect = {"head_dim": None, "qk_norm": "none"}
        for name, value in without_effect.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name} {getattr(self, name)} has no effect with attention.mla: leave it out")
        if self.rope.fraction != 1.0:
            raise ValueError(f"rope.fraction {self.rope.fraction} has no effect with attention.mla: it has rope_dim")


class LoraConfig(Part):
    """Low-rank adapters (Hu et al., 2021): W x becomes W x + alpha / r * B A x for every weight W that `targets` name
    by the end of its place in a layer (`attn.qkv`, `experts.w13`), for each expert its own; only A and B are trained.
    """

    r: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    targets: tuple[str, ...] = ("attn.qkv", "attn.out")
