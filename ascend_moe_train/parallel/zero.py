"""Data parallelism and ZeRO: what each rank updates, and how gradients get there and weights back.

Stage 0 keeps everything on every rank; 1 shares out optimizer states, 2 also the sums of gradients over micro-batches,
3 also the weights of matrices (Rajbhandari et al., 2020). Everything is in fp32, so that the flat parts that a rank
updates are its only copies of them in stage 3, and copies beside the model's weights in stages 1 and 2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import TrainingError
from ascend_moe_train.model.layers import empty
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.codecs import SignBits
from ascend_moe_train.optim.host_adamw import HostTensor
from ascend_moe_train.optim.reduction import LocalReduction, Reduction
from ascend_moe_train.parallel.agree import sum_floats
from ascend_moe_train.parallel.buckets import CLASSES, Bucket, Share
from ascend_moe_train.parallel.comm import Collectives, Comm, Group, Tensor
from ascend_moe_train.parallel.compressed import TwoStage
from ascend_moe_train.parallel.contents import COMPRESSED
from ascend_moe_train.parallel.cuts import Gradient, gradient_groups
from ascend_moe_train.parallel.early import EarlySums
from ascend_moe_train.parallel.gather import gather_on_use
from ascend_moe_train.parallel.meeting import early_names, start_early
from ascend_moe_train.parallel.mesh import Mesh, num_micro
from ascend_moe_train.parallel.queued import QueuedComm
from ascend_moe_train.parallel.reduction import ShardedReduction
from ascend_moe_train.parallel.shards import Placement, repeat_groups
from ascend_moe_train.parallel.sharing import NEIGHBOURS, WIRES, group_name, shares_of
from ascend_moe_train.parallel.zero_costs import ZeroPlan


@dataclass(frozen=True, kw_only=True)
class Owned:
    """What the optimizer updates of a tensor here: elements [start, stop) of the local one, in row-major order.

    `parameter` has the local tensor's shape, or is flat; a flat one may end with zeros beyond them.
    """

    name: str
    parameter: Any
    start: int
    stop: int


class Sharded:
    """The model as the optimizer, the step and checkpoints of one rank see it.

    `reduction`, `differentiated`, `summed` and `names` are for `TrainStep`. `owned` is what the optimizer updates;
    `num_dims` are those of the whole tensors, by name.
    """

    def __init__(
        self,
        plan: ZeroPlan,
        *,
        kept: Mapping[str, Any],
        own: Mapping[str, Any],
        reduction: Reduction,
        num_dims: Mapping[str, int],
        momenta: "Momenta | None" = None,
    ) -> None:
        """`kept` is what the model reads of each weight, `own` what the optimizer updates where that is not it;
        `momenta` is for 1-bit Adam."""
        self.plan, self.reduction, self.num_dims = plan, reduction, dict(num_dims)
        self.names, self.momenta = plan.names, momenta
        self._kept, self._own = kept, own
        self._shares = {share.name: share for share in plan.shares}
        self.differentiated = [kept[share.name] for share in plan.trained]
        self.owned = [
            Owned(
                name=share.name,
                parameter=own.get(share.name, kept[share.name]),
                start=share.updated[0],
                stop=share.updated[1],
            )
            for share in plan.trained
        ]
        self.summed = [owned.parameter for owned in self.owned] if plan.stage > 1 else self.differentiated
        self._bring = _BringParts(reduction)

    @property
    def remembered(self) -> dict[str, Any]:
        """What this rank alone keeps of compressed sums from step to step, by name."""
        cells = [*getattr(self.reduction, "reduced", ()), *(self.momenta.means if self.momenta is not None else ())]
        return {name: each for cell in cells for name, each in getattr(cell, "remembered", {}).items()}

    @property
    def weights(self) -> list[tuple[str, Any]]:
        """What the optimizer updates, by name."""
        return [(owned.name, owned.parameter) for owned in self.owned]

    def fill(self, name: str, local: NDArray[np.float32]) -> None:
        """Fills what is here of a weight from the local tensor: what the model reads and what the optimizer updates.

        Raises ValueError for another shape than the local tensor's.
        """
        share = self._shares[name]
        if tuple(local.shape) != share.shape:
            raise ValueError(f"{name}: {local.shape} is not the shape {share.shape} of the local tensor")
        part = np.zeros(share.updated_shape, np.float32)
        start, stop = share.updated
        part.reshape(-1)[: stop - start] = local.reshape(-1)[start:stop]
        self._kept[name].set_data(ms.Tensor(part if share.form == "on_use" else np.ascontiguousarray(local)))
        if name in self._own:
            self._own[name].set_data(ms.Tensor(part))

    def refill(self) -> None:
        """Brings what the optimizer updates, once it has other values, to where the model reads it.

        Every rank calls it.
        """
        parts = []
        for share in self.plan.trained:
            if share.form == "parts":
                parts.append(ms.Tensor.from_numpy(self._own[share.name].asnumpy()))
            elif share.name in self._own:
                self._kept[share.name].set_data(ms.Tensor(self._own[share.name].asnumpy()))
        if parts:
            self._bring(ms.Tensor(np.zeros(1, np.float32)), *parts).asnumpy()


@dataclass(frozen=True, kw_only=True)
class Momenta:
    """How momenta are sent once 1-bit Adam's second moments are fixed: the places of those in each bucket, what brings
    them together, and the reduction of everything else."""

    buckets: Sequence[Bucket]
    means: Sequence[TwoStage]
    reduction: Reduction


class _BringParts(nn.Cell):
    def __init__(self, reduction: Any) -> None:
        super().__init__()
        self.reduction = reduction

    def construct(self, done: Tensor, *parts: Tensor) -> Tensor:
        return self.reduction.bring(parts, done)


def apply_zero(
    model: Transformer, placed: Mapping[str, Placement], mesh: Mesh, config: RunConfig, collectives: Collectives
) -> Sharded:
    """Shares out the weights of a model whose cells hold what `placed` says, and still are to be filled.

    Every rank calls it. In stage 3 weights become flat parts.
    """
    parallel = config.parallel
    weights = dict(model.weights())
    trained = {name: parameter.requires_grad for name, parameter in weights.items()}
    shares = shares_of(placed, trained, parallel.zero_stage, *_groups(placed, mesh, config, collectives))
    wire = WIRES[parallel.reduce_dtype]
    comm = _queue(config, mesh, collectives)
    plan = ZeroPlan(
        stage=parallel.zero_stage,
        shares=tuple(shares.values()),
        names=_names(weights, placed, config.lora is not None),
        world=collectives.world,
        uses=gather_on_use(model, shares, collectives, wire, config),
        bucket_bytes=parallel.bucket_bytes,
        wire=wire,
        offload=parallel.offload_optimizer,
        compress=parallel.compress,
        early=frozenset() if comm is None else frozenset(early_names(model, shares)),
    )
    early = None
    if comm is not None and plan.early:
        early = EarlySums([b for b in plan.buckets.reduced if plan.is_early(b)], plan.trained, comm, wire)
        start_early(model, early)
    kept = dict(model.weights())
    own = {share.name: _own(share, plan.offload) for share in plan.trained if plan.offload or share.form == "parts"}
    return Sharded(
        plan,
        kept=kept,
        own=own,
        reduction=_reduction(plan, kept, own, mesh, collectives, early=early),
        momenta=_momenta(plan, kept, own, mesh, collectives),
        num_dims={name: len(placed[name].shape) for name in plan.names},
    )


def check_adds_up(plan: ZeroPlan, placed: Mapping[str, Placement], comm: Comm) -> None:
    """Raises TrainingError unless what all ranks update is each element of the model once. Every rank calls it."""
    here = {share.name: share.weight * share.num_counted for share in plan.trained}
    counts_P = sum_floats(comm, [here.get(name, 0.0) for name in plan.names])
    wrong = [
        f"{name} ({placed[name].gradient}) {count:g} of {prod(placed[name].shape)}"
        for name, count in zip(plan.names, counts_P, strict=True)
        if abs(count - prod(placed[name].shape)) > 0.5
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        ranks = f"{comm.world.size} ranks"
        raise TrainingError(f"elements that {ranks} update do not add up to the model: {', '.join(wrong[:3])}{more}")


def _groups(
    placed: Mapping[str, Placement], mesh: Mesh, config: RunConfig, collectives: Collectives
) -> tuple[dict[Gradient, Group], Group | None]:
    """This rank's, by the kind of gradient that they sum, and of those with the same rows."""
    kinds = {placement.gradient for placement in placed.values()}
    groups = {
        kind: collectives.split(group_name(kind), gradient_groups(kind, mesh)) for kind in CLASSES if kind in kinds
    }
    if not any(placement.repeated is not None for placement in placed.values()):
        return groups, None
    return groups, collectives.split(NEIGHBOURS, repeat_groups(config.model, mesh))


def _names(weights: Mapping[str, Any], placed: Mapping[str, Placement], has_adapters: bool) -> tuple[str, ...]:
    """What is trained on any rank, in the same order on all; with adapters every weight is on every rank."""
    if has_adapters:
        return tuple(name for name, parameter in weights.items() if parameter.requires_grad)
    return tuple(name for name, placement in placed.items() if placement.gradient != "none")


def _own(share: Share, is_on_host: bool) -> Any:
    """What the optimizer updates of a tensor, apart from what the model reads."""
    if is_on_host:
        return HostTensor(share.updated_shape)
    part = empty(*share.updated_shape)
    part.name = f"part.{share.name}"
    return part


def _momenta(
    plan: ZeroPlan, kept: Mapping[str, Any], own: Mapping[str, Any], mesh: Mesh, collectives: Collectives
) -> Momenta | None:
    shares = plan.trained
    buckets = [bucket for bucket in plan.buckets.reduced if plan.sends_momenta(bucket)]
    if not buckets:
        return None
    means = []
    for bucket in buckets:
        first, size = shares[bucket[0]], sum(shares[i].size for i in bucket)
        group = first.group.carrying(COMPRESSED[plan.compress.method])
        means.append(TwoStage(collectives, group, size, SignBits(), plan.compress.block, first.name))
    reduction = _reduction(plan, kept, own, mesh, collectives, leaves_momenta=True)
    return Momenta(buckets=buckets, means=means, reduction=reduction)


def _reduction(
    plan: ZeroPlan,
    kept: Mapping[str, Any],
    own: Mapping[str, Any],
    mesh: Mesh,
    collectives: Collectives,
    *,
    leaves_momenta: bool = False,
    early: EarlySums | None = None,
) -> Reduction:
    """Cross entropy is a sum over sequences and their parts, equal on tp ranks, and of the last stage; balance and z
    loss are sums over stages, equal on all ranks of each; what is dropped adds up."""
    if mesh.world_size == 1:
        return LocalReduction()
    of_loss, of_all = 1 / mesh.tp, mesh.pp / mesh.world_size
    in_parts = {i: share.name for i, share in enumerate(plan.trained) if share.form == "parts"}
    return ShardedReduction(
        plan,
        collectives,
        parts=[] if plan.offload else [own[name] for name in in_parts.values()],
        weights={i: kept[name] for i, name in in_parts.items()},
        figure_weights=(of_loss, of_loss, of_all, of_all, 1.0),
        leaves_momenta=leaves_momenta,
        early=early,
    )


def _queue(config: RunConfig, mesh: Mesh, collectives: Collectives) -> QueuedComm | None:
    """Whose thread sums gradients while the backward pass goes on, if they are summed in the graph of that pass, and as
    they are."""
    parallel = config.parallel
    is_same_graph = mesh.pp == 1 and (parallel.zero_stage > 1 or num_micro(config.batch, mesh) == 1)
    is_plain = parallel.compress.method == "none" and parallel.reduce_dtype != "fp16"
    comm = collectives.comm
    return comm if isinstance(comm, QueuedComm) and is_same_graph and is_plain else None
