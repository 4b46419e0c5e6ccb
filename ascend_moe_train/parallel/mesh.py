"""Ranks as points of a mesh: axes, coordinates, groups. Pure.

The dense part and the experts are spread over the same ranks in two ways (parallel folding, Liu et al., 2025, arXiv
2504.14960). In both orders the last axis is the innermost, so that its ranks are neighbours, as in Megatron-LM:

    rank = ((pp * DP + dp) * CP + cp) * TP + tp  =  ((pp * EDP + edp) * EP + ep) * ETP + etp
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm, prod
from typing import Self

from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.config import MAX_RANKS, nearest_sizes
from ascend_moe_train.train.config import BatchConfig

DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")
_CHOSEN = (("pp", "cp", "tp"), ("pp", "ep", "etp"))  # what dp and edp take the rest of
STAGE_AXES = ("dp", "cp", "tp")  # all ranks of a pipeline stage


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Where a rank is along each axis, from 0."""

    pp: int
    dp: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The size of each axis. `make` builds one from what a user chooses; dp and edp follow."""

    world_size: int
    pp: int
    dp: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int

    def __post_init__(self) -> None:
        for axes in (DENSE_AXES, EXPERT_AXES):
            if self.size(axes) != self.world_size:
                raise ValueError(f"the axes {axes} hold {self.size(axes)} ranks of {self.world_size}")

    @classmethod
    def make(cls, world_size: int, *, pp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1, etp: int = 1) -> Self:
        """The mesh of so many ranks, data parallel along what the axes leave.

        Raises ConfigError if the ranks do not divide by pp x cp x tp and by pp x ep x etp: with the numbers, and the
        nearest number of ranks and sizes of axes that fit.
        """
        sizes = {"pp": pp, "cp": cp, "tp": tp, "ep": ep, "etp": etp}
        for name, size in {"ranks": world_size, **sizes}.items():
            if not 0 < size <= MAX_RANKS:
                raise ConfigError(f"{name} {size} is not allowed: must be from 1 to {MAX_RANKS}")
        for axes in _CHOSEN:
            if world_size % _product(sizes, axes):
                raise ConfigError(_misfit(world_size, sizes, axes))
        stage = world_size // pp
        dp, edp = stage // (cp * tp), stage // (ep * etp)
        return cls(world_size=world_size, pp=pp, dp=dp, cp=cp, tp=tp, edp=edp, ep=ep, etp=etp)

    def size(self, axes: Sequence[str]) -> int:
        """Ranks in each group along some axes; 1 along none."""
        sizes: list[int] = [getattr(self, axis) for axis in axes]
        return prod(sizes)

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank is. Raises ValueError for a rank that does not exist."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of {self.world_size}")
        rest, found = rank, {}
        for axis in reversed(DENSE_AXES):
            rest, found[axis] = divmod(rest, self.size((axis,)))
        rest = rank
        for axis in reversed(EXPERT_AXES):
            rest, found[axis] = divmod(rest, self.size((axis,)))
        return Coordinates(**found)

    def group(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` at most along `axes`, ascending; `rank` alone without axes.

        Raises ValueError if the axes are neither all of the dense part nor all of the experts, or if there is no such
        rank.
        """
        order = _order_of(axes)
        here = self.coordinates(rank)
        members, stride = [rank], 1
        for axis in reversed(order):
            size = self.size((axis,))
            if axis in axes:
                first = stride * getattr(here, axis)
                members = [member - first + stride * place for place in range(size) for member in members]
            stride *= size
        return tuple(members)

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Every rank is in one of them; ascending by first rank. Raises ValueError as `group` does."""
        heads = self.group([axis for axis in _order_of(axes) if axis not in axes], 0)
        return [self.group(axes, rank) for rank in heads]


def mesh_of(run: RunConfig, num_ranks: int) -> Mesh:
    """The mesh of a run on so many ranks, whose batch fits it. Raises ConfigError as `Mesh.make`, `check_batch` do."""
    parallel = run.parallel
    mesh = Mesh.make(num_ranks, pp=parallel.pp, cp=parallel.cp, tp=parallel.tp, ep=parallel.ep, etp=parallel.etp)
    check_batch(run.batch, mesh)
    return mesh


def check_batch(batch: BatchConfig, mesh: Mesh) -> None:
    """Raises ConfigError if the sequences of a step cannot be shared out in equal micro-batches to the dp ranks."""
    at_once = mesh.dp * batch.micro_sequences
    if batch.global_sequences % at_once:
        below = batch.global_sequences // at_once * at_once
        choices = [" or ".join(str(size) for size in (below, below + at_once) if size)]
        if micro := nearest_sizes(batch.micro_sequences, partial(_shares_out, batch.global_sequences, mesh.dp)):
            choices.append(f"batch.micro_sequences {' or '.join(map(str, micro))}")
        raise ConfigError(
            f"batch.global_sequences {batch.global_sequences} does not divide by dp {mesh.dp} x batch.micro_sequences "
            f"{batch.micro_sequences} = {at_once} (dp is {mesh.world_size} ranks / pp {mesh.pp} x cp {mesh.cp} x tp "
            f"{mesh.tp}): use {', or '.join(choices)}"
        )


def num_micro(batch: BatchConfig, mesh: Mesh) -> int:
    """Micro-batches of an optimizer step, each of `micro_sequences` on every dp rank."""
    return batch.global_sequences // (mesh.dp * batch.micro_sequences)


def _shares_out(global_sequences: int, dp: int, micro_sequences: int) -> bool:
    return global_sequences % (dp * micro_sequences) == 0


def _order_of(axes: Sequence[str]) -> tuple[str, ...]:
    for order in (DENSE_AXES, EXPERT_AXES):
        if set(axes) <= set(order):
            return order
    raise ValueError(f"axes {list(axes)} are neither all of {list(DENSE_AXES)} nor all of {list(EXPERT_AXES)}")


def _product(sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    return prod(sizes[axis] for axis in axes)


def _misfit(world_size: int, sizes: Mapping[str, int], axes: Sequence[str]) -> str:
    """One line: the numbers, the nearest numbers of ranks that fit all axes, and of each axis the nearest sizes."""
    needed = lcm(*(_product(sizes, each) for each in _CHOSEN))
    below = world_size // needed * needed
    ranks = [str(size) for size in (below, below + needed) if 0 < size <= MAX_RANKS]
    choices = [f"{' or '.join(ranks)} ranks"] if ranks else []
    for axis in axes:
        fits = partial(_fits, world_size, sizes, axis)
        if sizes[axis] > 1 and (nearest := nearest_sizes(sizes[axis], fits, world_size)):
            choices.append(f"parallel.{axis} {' or '.join(map(str, nearest))}")
    product = " x ".join(f"{axis} {sizes[axis]}" for axis in axes)
    return (
        f"{world_size} ranks do not divide by parallel {product} = {_product(sizes, axes)}: use "
        f"{', or '.join(choices) or 'smaller sizes'}"
    )


def _fits(world_size: int, sizes: Mapping[str, int], axis: str, size: int) -> bool:
    return all(world_size % _product({**sizes, axis: size}, each) == 0 for each in _CHOSEN)
