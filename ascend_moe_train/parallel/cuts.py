"""How each tensor of a model is cut along the axes of the mesh: the table. Pure.

An axis is added by naming it in the rows of what it cuts, and in `GROUP_AXES` if gradients are summed over it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.parallel.mesh import STAGE_AXES, Mesh

Gradient = Literal["dense", "partial", "expert", "ends", "none"]

# Over what a gradient is summed; buffers have none, and are the same on every rank of a stage. `ends` are tensors that
# the first and the last pipeline stage hold: of their groups, see `gradient_groups`.
GROUP_AXES: Mapping[Gradient, tuple[str, ...]] = MappingProxyType(
    {
        "dense": ("dp", "cp"),
        "partial": STAGE_AXES,
        "expert": ("edp",),
        "ends": ("pp", "dp", "cp"),
        "none": STAGE_AXES,
    }
)
# Along what ranks outside that group hold other parts of a tensor, or the same if it is not cut there.
OTHER_AXES: Mapping[Gradient, tuple[str, ...]] = MappingProxyType(
    {"dense": ("tp",), "partial": (), "expert": ("ep", "etp"), "ends": ("tp",), "none": ()}
)


@dataclass(frozen=True)
class Cut:
    """One dim is cut along an axis: each of the sections that `of` names by itself."""

    axis: str
    of: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a dim: units that stay whole (heads, single rows) are shared out equally. If fewer units than ranks
    `may_repeat`, several ranks hold the same one."""

    length: int
    units: int
    may_repeat: bool = False


@dataclass(frozen=True)
class Row:
    """How tensors with this ending of their names are cut: a Cut or None for each dim, nothing if they are whole.

    `gradient` `between` is that of weights between the tp regions: complete on every tp rank, unless sequence
    parallelism splits the tokens there. `only_first` is an axis whose ranks but the first have no such tensor, as it is
    added to a sum over them.
    """

    ending: str
    gradient: Literal["dense", "partial", "expert", "none", "between"]
    cuts: tuple[Cut | None, ...] = ()
    only_first: str | None = None


_WHOLE = None
_VOCABULARY, _HEADS, _QKV = Cut("tp", "tokens"), Cut("tp", "heads"), Cut("tp", "q | k | v")
_WIDTH, _GATE_UP = Cut("tp", "width"), Cut("tp", "gate | up")
_EXPERTS, _EXPERT_WIDTH, _EXPERT_GATE_UP = Cut("ep", "experts"), Cut("etp", "width"), Cut("etp", "gate | up")

# The first ending that fits counts.
ROWS = (
    Row("embed.weight", "dense", (_VOCABULARY, _WHOLE)),
    Row("head.weight", "dense", (_VOCABULARY, _WHOLE)),
    Row("attn.sinks", "dense", (_HEADS,)),
    Row("attn.qkv.weight", "dense", (_QKV, _WHOLE)),
    Row("attn.qkv.bias", "dense", (_QKV,)),
    Row("attn.q.weight", "dense", (_HEADS, _WHOLE)),
    Row("attn.q_up.weight", "dense", (_HEADS, _WHOLE)),
    Row("attn.kv_up.weight", "dense", (_HEADS, _WHOLE)),
    Row("attn.out.weight", "dense", (_WHOLE, _HEADS)),
    Row("attn.out.bias", "dense", only_first="tp"),
    # whole on every tp rank, but each sees the gradient of its own heads only
    Row("attn.q_norm.weight", "partial"),
    Row("attn.k_norm.weight", "partial"),
    Row("attn.q_down.weight", "partial"),
    Row("attn.kv_down.weight", "partial"),
    Row("attn.q_latent_norm.weight", "partial"),
    Row("attn.kv_latent_norm.weight", "partial"),
    Row("ffn.w13.weight", "dense", (_GATE_UP, _WHOLE)),
    Row("ffn.w2.weight", "dense", (_WHOLE, _WIDTH)),
    Row("moe.shared.w13.weight", "dense", (_GATE_UP, _WHOLE)),
    Row("moe.shared.w2.weight", "dense", (_WHOLE, _WIDTH)),
    # of its own tokens only: the MoE region splits them over tp
    Row("moe.router.weight", "partial"),
    Row("moe.router.bias", "partial"),
    Row("moe.router.balance_bias", "none"),
    Row("moe.experts.w13", "expert", (_EXPERTS, _WHOLE, _EXPERT_GATE_UP)),
    Row("moe.experts.w2", "expert", (_EXPERTS, _EXPERT_WIDTH, _WHOLE)),
    Row("moe.experts.w13_bias", "expert", (_EXPERTS, _EXPERT_GATE_UP)),
    Row("moe.experts.w2_bias", "expert", (_EXPERTS, _WHOLE), only_first="etp"),
    Row("norm.weight", "between"),
    Row("merge.weight", "between"),
    # adapters exist where no axis cuts what they adapt
    Row("lora_a", "dense"),
    Row("lora_b", "dense"),
)


def gradient_group(gradient: Gradient, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The ranks, ascending, over which a rank's gradients of a kind are summed: those along `GROUP_AXES`, of `ends`
    only those of the same or the other end (of a stage between them, those of that stage)."""
    group = mesh.group(GROUP_AXES[gradient], rank)
    if gradient != "ends":
        return group
    ends = (0, mesh.pp - 1)
    here = mesh.coordinates(rank).pp
    wanted = ends if here in ends else (here,)
    return tuple(member for member in group if mesh.coordinates(member).pp in wanted)


def gradient_groups(gradient: Gradient, mesh: Mesh) -> list[tuple[int, ...]]:
    """Every rank is in one of them; ascending by first rank."""
    return sorted({gradient_group(gradient, mesh, rank) for rank in range(mesh.world_size)})


def row_of(name: str) -> Row:
    """How a tensor is cut. Raises ValueError for a name that no row of the table fits."""
    for row in ROWS:
        if name.endswith(row.ending):
            return row
    raise ValueError(f"{name}: no row of parallel/cuts.py says how it is cut")


def sections(of: str, size: int, model: ModelConfig) -> tuple[Section, ...]:
    """The sections of a dim, each of which is cut by itself."""
    if of == "q | k | v":
        H, G, head = model.num_heads, model.num_kv_heads, model.head_size
        keys = Section(length=G * head, units=G, may_repeat=True)
        return Section(length=H * head, units=H), keys, keys
    if of == "gate | up":
        half = Section(length=size // 2, units=size // 2)
        return half, half
    return (Section(length=size, units=model.num_heads if of == "heads" else size),)
