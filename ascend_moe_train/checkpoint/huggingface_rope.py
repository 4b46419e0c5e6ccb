"""The rotary embedding of a Hugging Face config.json. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ascend_moe_train.checkpoint.huggingface_values import refused
from ascend_moe_train.model.config import RopeConfig

# What each rope_type is called here, and which of its keys set which of ours.
_POSITIONS = ("original_max_position_embeddings", "original_positions")
_KINDS: Mapping[str, tuple[str, tuple[tuple[str, str], ...]]] = MappingProxyType(
    {
        "default": ("none", ()),
        "linear": ("linear", (("factor", "factor"),)),
        "llama3": (
            "llama3",
            (
                ("factor", "factor"),
                _POSITIONS,
                ("low_freq_factor", "low_freq_factor"),
                ("high_freq_factor", "high_freq_factor"),
            ),
        ),
        "yarn": (
            "yarn",
            (
                ("factor", "factor"),
                _POSITIONS,
                ("beta_fast", "beta_fast"),
                ("beta_slow", "beta_slow"),
                ("truncate", "truncate"),
                ("mscale", "mscale"),
                ("mscale_all_dim", "mscale_all_dim"),
            ),
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class RopeDefaults:
    """What a family's code takes where its config says nothing, and what it knows at all: a part of the head left
    unturned (`fraction` None: no such thing), and whether mscale_all_dim sharpens attention. `section` is all of
    rope_scaling."""

    theta: float = 1e4
    fraction: float | None = None
    scales_scores: bool = False
    section: Mapping[str, object] | None = None


def read_rope(config: Mapping[str, object], defaults: RopeDefaults) -> dict[str, object]:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before), as keys of RopeConfig.

    Raises ConfigError naming the key that is not supported.
    """
    name = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    section = config.get(name)
    section = defaults.section or {} if section is None else section
    if not isinstance(section, Mapping):
        raise refused(name, section, "a mapping")
    theta = section.get("rope_theta", config.get("rope_theta", defaults.theta))
    kind = section.get("rope_type", section.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise refused(f"{name}.rope_type", kind, f"one of {', '.join(_KINDS)}")
    scaling, keys = _KINDS[kind]
    values: dict[str, object] = {"theta": theta, "scaling": scaling, "fraction": _fraction(config, section, defaults)}
    values |= {ours: section[theirs] for theirs, ours in keys if section.get(theirs) is not None}
    if kind == "yarn":
        _check_mscale(name, section, defaults.scales_scores)
        if not section.get("mscale_all_dim"):
            values |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    if kind != "default" and "factor" not in values:
        raise refused(f"{name}.factor", None, "a number of at least 1")
    return values


def _fraction(config: Mapping[str, object], section: Mapping[str, object], defaults: RopeDefaults) -> object:
    name = "partial_rotary_factor"
    value = section.get(name, config.get(name, defaults.fraction or 1.0))
    if defaults.fraction is None and value != 1.0:
        raise refused(name, value, "1.0")
    return value


def _check_mscale(name: str, section: Mapping[str, object], scales_scores: bool) -> None:
    """Without both of them, transformers takes 0.1 ln(factor) + 1 for cos and sin, whatever `mscale` is."""
    if section.get("attention_factor") is not None:
        raise refused(f"{name}.attention_factor", section["attention_factor"], "absent: it follows from factor")
    all_dim = section.get("mscale_all_dim")
    if not all_dim:
        return
    if not scales_scores:
        raise refused(f"{name}.mscale_all_dim", all_dim, "absent: this family does not scale its scores")
    if not section.get("mscale"):
        raise refused(f"{name}.mscale", section.get("mscale"), "a number above 0 where mscale_all_dim is one")


def write_rope(rope: RopeConfig) -> dict[str, object]:
    """The keys that `read_rope` reads as `rope`, in the form that every version of transformers knows."""
    kind, keys = next((kind, keys) for kind, (scaling, keys) in _KINDS.items() if scaling == rope.scaling)
    section = {"rope_type": kind, **{theirs: getattr(rope, ours) for theirs, ours in keys}}
    if not section.get("mscale_all_dim"):
        section = {name: value for name, value in section.items() if name not in ("mscale", "mscale_all_dim")}
    written: dict[str, object] = {"rope_theta": rope.theta, "rope_scaling": section if keys else None}
    return written if rope.fraction == 1.0 else {**written, "partial_rotary_factor": rope.fraction}
