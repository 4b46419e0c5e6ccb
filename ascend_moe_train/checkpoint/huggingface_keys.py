"""What a table of huggingface_families.py is made of: keys, and what several keys decide together. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ascend_moe_train.checkpoint.huggingface_rope import RopeDefaults
from ascend_moe_train.checkpoint.huggingface_values import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, refused, whole

REQUIRED = object()

Config = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Key:
    """Which of their keys sets which of ours: its names, the usual one first, and the default of their code."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    default: object = REQUIRED
    words: Mapping[object, object] | None = None
    """What each of their values is called here, where those are names."""


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


def qwen3_dense_layers(config: Config, num_layers: int) -> Mapping[str, object]:
    """Layers in `mlp_only_layers`, and all but each `decoder_sparse_step`-th."""
    step = whole("decoder_sparse_step", config.get("decoder_sparse_step", 1), MAX_LAYERS)
    listed = config.get("mlp_only_layers")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or any(type(i) is not int or not 0 <= i < num_layers for i in listed):
        raise refused("mlp_only_layers", listed, f"a list of layer numbers from 0 to {num_layers - 1}")
    return {"moe.dense_layers": tuple(i for i in range(num_layers) if i in listed or (i + 1) % step)}


def _deepseek(config: Config, num_layers: int) -> dict[str, object]:
    """Dense layers, shared experts."""
    dense = whole("first_k_dense_replace", config.get("first_k_dense_replace", 0), num_layers, least=0)
    shared, width = config.get("n_shared_experts"), config.get("moe_intermediate_size")
    num_shared = 0 if shared is None else whole("n_shared_experts", shared, MAX_EXPERTS, least=0)
    return {
        "moe.dense_layers": tuple(range(dense)),
        "moe.shared_ffn": num_shared * whole("moe_intermediate_size", width, MAX_WIDTH),
    }


def _groups(config: Config) -> dict[str, object]:
    num_groups = whole("n_group", config.get("n_group"), MAX_EXPERTS)
    top_groups = whole("topk_group", config.get("topk_group"), num_groups)
    return {"moe.num_groups": num_groups, "moe.top_groups": top_groups}


def deepseek_v2(config: Config, num_layers: int) -> Mapping[str, object]:
    """Groups of experts, if `topk_method` looks at them."""
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise refused("topk_method", method, '"greedy" or "group_limited_greedy"')
    groups = _groups(config) if method == "group_limited_greedy" else {}
    return _deepseek(config, num_layers) | groups


def deepseek_v3(config: Config, num_layers: int) -> Mapping[str, object]:
    """Groups of experts, blocks of multi-token prediction, by the defaults of DeepSeek-V3."""
    return _sigmoid_routed({"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, **config}, num_layers)


def glm4(config: Config, num_layers: int) -> Mapping[str, object]:
    """The same by those of GLM-4.5."""
    return _sigmoid_routed({"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, **config}, num_layers)


def dots1(config: Config, num_layers: int) -> Mapping[str, object]:
    """The same by those of dots.llm1, which has no blocks of multi-token prediction."""
    kinds = config.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * num_layers:
        raise refused("layer_types", kinds, f'{num_layers} times "full_attention"')
    return _sigmoid_routed({"n_group": 1, "topk_group": 1, "n_shared_experts": None, **config}, num_layers)


def _sigmoid_routed(config: Config, num_layers: int) -> Mapping[str, object]:
    values = _deepseek({"n_shared_experts": 1, **config}, num_layers) | _groups(config)
    values["moe.groups_by"] = "best" if values["moe.num_groups"] == 1 else "best_two"
    depth = config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0))
    if whole("num_nextn_predict_layers", 0 if depth is None else depth, MAX_LAYERS, least=0):
        values["mtp.depth"] = depth
    return values


def gpt_oss_windows(config: Config, num_layers: int) -> Mapping[str, object]:
    """Which layers look at the last `sliding_window` keys only: every second one, or those of `layer_types`."""
    kinds = config.get("layer_types")
    kinds = ["sliding_attention", "full_attention"] * num_layers if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) < num_layers or any(kind not in _LAYER_TYPES for kind in kinds):
        raise refused("layer_types", kinds, f"a list of {num_layers} words, {' or '.join(_LAYER_TYPES)}")
    layers = tuple(i for i in range(num_layers) if kinds[i] == _LAYER_TYPES[0])
    window = whole("sliding_window", config.get("sliding_window", 128), MAX_WIDTH) if layers else None
    return {"attention.window": window, "attention.window_layers": layers}


_LAYER_TYPES = ("sliding_attention", "full_attention")
