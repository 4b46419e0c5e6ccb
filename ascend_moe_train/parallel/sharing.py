"""How a rank shares its tensors with others, from the configuration and the table of cuts alone. Pure."""

from collections.abc import Mapping
from types import MappingProxyType

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.adapters import adapter_shapes
from ascend_moe_train.parallel.buckets import Form, Share, share_of
from ascend_moe_train.parallel.comm import Group, Wire
from ascend_moe_train.parallel.cuts import GROUP_AXES, Gradient, gradient_group
from ascend_moe_train.parallel.mesh import Mesh
from ascend_moe_train.parallel.recomputed import passes, runs_again
from ascend_moe_train.parallel.shards import Placement, placements
from ascend_moe_train.parallel.stages import stages_of
from ascend_moe_train.parallel.zero_costs import Uses, ZeroPlan

WIRES: Mapping[str, Wire | None] = MappingProxyType({"fp32": None, "bf16": "bf16", "fp16": "fp16"})
NEIGHBOURS = "kv_heads"
_FORMS: tuple[Form, ...] = ("whole", "parts", "parts", "on_use")  # of a matrix, by stage


def shares_of(
    placed: Mapping[str, Placement],
    trained: Mapping[str, bool],
    stage: int,
    groups: Mapping[Gradient, Group],
    neighbours: Group | None,
) -> dict[str, Share]:
    """Of every weight that is here, which `trained` names in the order of their first use, in a stage of ZeRO.
    `groups` are those over which gradients of each kind are summed, `neighbours` those with the same rows."""

    def share(name: str, is_trained: bool) -> Share:
        placement = placed[name]
        group, form = groups[placement.gradient], _FORMS[stage]
        # with less than an element for each rank, two weights of a cell could have parts of one size
        if stage == 3 and (not is_product(name, placement.shape) or placement.local_size < group.size):
            form = "parts"
        if not is_trained and form == "parts":
            form = "whole"
        return share_of(name, placement, group=group, form=form, is_trained=is_trained, neighbours=neighbours)

    return {name: share(name, is_trained) for name, is_trained in trained.items()}


def group_name(kind: Gradient) -> str:
    """Of the groups over which gradients of a kind are summed."""
    return kind if kind == "ends" else "_".join(GROUP_AXES[kind])


def is_product(name: str, shape: tuple[int, ...]) -> bool:
    """Whether it is a weight that a product or an embedding uses, which can be in parts until then (`gather.GATHERED`):
    a matrix, or those of all experts; the router's is used in another way."""
    return len(shape) > 1 and name.endswith((".weight", "experts.w13", "experts.w2")) and "router." not in name


def uses_of(config: RunConfig, name: str, *, is_trained: bool) -> Uses:
    """How a micro-batch uses a weight that is in parts. Everything is used once in a pass, but embedding and head once
    more in each block of multi-token prediction; for the gradient of what it embeds, an embedding is not needed. A
    block that runs again has its weights put together for that."""
    model = config.model
    forward, backward = passes(config, name)
    times = 1 + (model.mtp.depth if model.mtp is not None else 0)
    if name == "embed.weight":
        products = times if model.tie_embeddings else 0
        uses, gathers = times + products, times * forward + products * (forward + backward)
    else:
        uses = times if name == "head.weight" else 1
        head, _, rest = name.partition(".")
        is_again = head == "layers" and runs_again(config, int(rest.split(".")[0]))
        gathers = uses * (forward + backward) + backward * is_again
    return Uses(gathers=gathers, reductions=uses * backward if is_trained else 0)


def zero_plan_of(config: RunConfig, mesh: Mesh, rank: int) -> ZeroPlan:
    """What a rank of a run does, as `zero.apply_zero` makes it of the model itself, with nothing summed early."""
    stages, parallel, lora = stages_of(config), config.parallel, config.lora
    placed = placements(
        config.model, mesh, rank, sequence_parallel=parallel.sequence_parallel, lora=lora, stages=stages
    )
    adapters = adapter_shapes(config.model, lora) if lora is not None else {}
    weights = {name: each for name, each in placed.items() if each.gradient != "none"}
    trained = {name: lora is None or name in adapters for name, each in weights.items() if each.local_size}
    kinds = {each.gradient for each in weights.values()}
    groups = {kind: _group(group_name(kind), gradient_group(kind, mesh, rank), rank) for kind in kinds}
    repeated = next((each.repeated for each in placed.values() if each.repeated is not None), None)
    neighbours = None if repeated is None else _group(NEIGHBOURS, repeated.ranks, rank)
    shares = shares_of(placed, trained, parallel.zero_stage, groups, neighbours)
    on_use = (share for share in shares.values() if share.form == "on_use")
    return ZeroPlan(
        stage=parallel.zero_stage,
        shares=tuple(shares.values()),
        names=tuple(name for name in weights if lora is None or name in adapters),
        world=Group(name="world", ranks=tuple(range(mesh.world_size)), index=rank),
        uses={share.name: uses_of(config, share.name, is_trained=share.is_trained) for share in on_use},
        bucket_bytes=parallel.bucket_bytes,
        wire=WIRES[parallel.reduce_dtype],
        offload=parallel.offload_optimizer,
        compress=parallel.compress,
    )


def _group(name: str, ranks: tuple[int, ...], rank: int) -> Group:
    return Group(name=name, ranks=ranks, index=ranks.index(rank))
