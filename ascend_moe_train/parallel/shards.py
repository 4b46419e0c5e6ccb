"""What each rank holds of every tensor, sums up with whom, and owns. Pure.

A rank's local tensor is, for each dim, a concatenation of intervals of the global one, as the table in cuts.py says.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.boxes import flat_boxes
from ascend_moe_train.model.adapters import adapter_shapes
from ascend_moe_train.model.config import LoraConfig, ModelConfig
from ascend_moe_train.model.counts import buffer_shapes, parameter_shapes
from ascend_moe_train.parallel.cuts import GROUP_AXES, OTHER_AXES, Cut, Gradient, Row, gradient_group, row_of, sections
from ascend_moe_train.parallel.mesh import DENSE_AXES, EXPERT_AXES, Mesh
from ascend_moe_train.parallel.stages import Stages

Array = NDArray[Any]
Intervals = tuple[tuple[int, int], ...]


class _Piece(NamedTuple):
    """An interval of one dim that `copies` ranks along its axis hold."""

    start: int
    stop: int
    copies: int


@dataclass(frozen=True, kw_only=True)
class Box:
    """A block of a global tensor: `ranges` (start, stop) of each dim; its first element is number `offset` of the local
    tensor in row-major order. The others follow with the strides of the local tensor."""

    ranges: Intervals
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dim."""
        return tuple(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Local rows [start, stop) that some tp neighbours hold too: keys and values of a head that several of them need.

    Each of the `ranks` (ascending) has the gradient of its own queries only, so that these rows are summed over them.
    """

    start: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What one rank holds of one tensor of global `shape`: nothing where dim 0 has no intervals.

    `group` are the ranks (ascending) over which the gradient is summed, `index` the place of this rank in it. After
    that, and the sum over `repeated.ranks`, `replicas` ranks of the stage hold the same values, in repeated rows
    len(repeated.ranks) times as many. `is_first` is whether no rank outside the group has them and comes before.
    """

    shape: tuple[int, ...]
    gradient: Gradient
    intervals: tuple[Intervals, ...]
    group: tuple[int, ...]
    index: int
    replicas: int
    is_first: bool
    repeated: Repeated | None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what the rank holds."""
        return tuple(sum(stop - start for start, stop in intervals) for intervals in self.intervals)

    @property
    def local_size(self) -> int:
        """Elements that the rank holds; 0 if it has no such tensor."""
        return prod(self.local_shape)

    @property
    def part(self) -> tuple[int, int]:
        """(start, stop) of this rank's flat part of the local tensor, shared out over its group."""
        return flat_part(self.local_size, len(self.group), self.index)


def placements(
    model: ModelConfig,
    mesh: Mesh,
    rank: int,
    *,
    sequence_parallel: bool = False,
    lora: LoraConfig | None = None,
    stages: Stages | None = None,
) -> dict[str, Placement]:
    """Every weight, adapter and buffer of the model by name, as a rank holds it, in the order of the forward pass.

    Without `stages`, each rank is taken to be of a stage that holds all layers. Raises ValueError for sizes that do not
    divide, which `parallel.config.check_parallel` finds first.
    """
    shapes = parameter_shapes(model) | (adapter_shapes(model, lora) if lora is not None else {}) | buffer_shapes(model)
    site = _Site(model=model, mesh=mesh, rank=rank, sequence_parallel=sequence_parallel)
    holders = {name: stages.holders(name) if stages is not None else None for name in shapes}
    return {name: site.place(row_of(name), shape, holders[name]) for name, shape in shapes.items()}


def repeat_groups(model: ModelConfig, mesh: Mesh) -> list[tuple[int, ...]]:
    """All ranks by the key and value heads they hold, of one dp, cp and pp place each: those of `Repeated.ranks`.

    Groups of one rank where there are enough heads for every tp rank.
    """
    size = max(1, mesh.tp // model.num_kv_heads)
    return [ranks[i : i + size] for ranks in mesh.groups(("tp",)) for i in range(0, mesh.tp, size)]


def take(value: Array, placement: Placement) -> Array:
    """The local part of a global value; a view of it where that is possible."""
    for dim, intervals in enumerate(placement.intervals):
        pieces = [value[(slice(None),) * dim + (slice(start, stop),)] for start, stop in intervals or ((0, 0),)]
        value = np.concatenate(pieces, axis=dim) if len(pieces) > 1 else pieces[0]
    return value


def part_size(local_size: int, n: int) -> int:
    """Elements of each of n equal flat parts, zeros at the end of the last ones included."""
    return -(-local_size // n)


def flat_part(local_size: int, n: int, index: int) -> tuple[int, int]:
    """(start, stop) of the elements in the index-th of n equal flat parts, without the zeros that fill up the last."""
    per = part_size(local_size, n)
    return min(index * per, local_size), min((index + 1) * per, local_size)


def boxes(placement: Placement, start: int, stop: int) -> list[Box]:
    """What elements [start, stop) of the local tensor, in row-major order, are in the global one.

    As few as possible: not more than (2 dims - 1) times the intervals of each dim.
    """
    shape = placement.local_shape
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = []
    for block in flat_boxes(shape, start, stop):
        dims = (_global_runs(*pair) for pair in zip(block, placement.intervals, strict=True))
        for runs in product(*dims):
            ranges = tuple((first, first + length) for _, first, length in runs)
            offset = sum(place * stride for (place, _, _), stride in zip(runs, strides, strict=True))
            found.append(Box(ranges=ranges, offset=offset))
    return found


def box_view(flat: Array, start: int, box: Box, placement: Placement) -> Array:
    """The elements of a box in `flat`, the elements of the local tensor from number `start` on; a view of them.

    Raises ValueError for a box that is not all in there.
    """
    shape = placement.local_shape
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    last = box.offset + sum((size - 1) * stride for size, stride in zip(box.shape, strides, strict=True))
    if flat.ndim != 1 or box.offset < start or last >= start + flat.size:
        raise ValueError(f"elements {box.offset} to {last} are not in {flat.shape} elements from {start} on")
    step = flat.strides[0]
    return np.lib.stride_tricks.as_strided(flat[box.offset - start :], box.shape, [step * each for each in strides])


def owned(placement: Placement) -> list[Box]:
    """The part of the global tensor that this rank answers for, in checkpoints and counts.

    Over all ranks of a stage, every element is in one box: of those that hold the same after reduction, each owns its
    flat part; of repeated rows the first of the neighbours.
    """
    if not placement.is_first:
        return []
    found = boxes(placement, *placement.part)
    repeated = placement.repeated
    if repeated is None or placement.group[placement.index] == repeated.ranks[0]:
        return found
    row_size = prod(placement.local_shape[1:])
    return [box for box in found if not repeated.start <= box.offset // row_size < repeated.stop]


class _Site:
    """A rank as the place of tensors."""

    def __init__(self, *, model: ModelConfig, mesh: Mesh, rank: int, sequence_parallel: bool) -> None:
        self.model, self.mesh, self.rank = model, mesh, rank
        self.between: Gradient = "partial" if sequence_parallel else "dense"
        here = mesh.coordinates(rank)
        self.place_along = {axis: getattr(here, axis) for axis in (*DENSE_AXES, *EXPERT_AXES)}
        self.groups = {gradient: gradient_group(gradient, mesh, rank) for gradient in GROUP_AXES}
        self.indices = {gradient: group.index(rank) for gradient, group in self.groups.items()}

    def place(self, row: Row, shape: tuple[int, ...], holders: tuple[int, ...] | None) -> Placement:
        """What the rank holds of one tensor, which is on the stages `holders`, or on all."""
        gradient = self.between if row.gradient == "between" else row.gradient
        if gradient == "partial" and self.mesh.tp == 1:
            gradient = "dense"  # the same sum, so that they share its buckets
        if holders is not None and len(holders) > 1:
            gradient = "ends"
        dims = [self._pieces(cut, size) for cut, size in zip(row.cuts or (None,) * len(shape), shape, strict=True)]
        intervals = [_joined(pieces) for pieces in dims]
        is_elsewhere = holders is not None and self.place_along["pp"] not in holders
        if is_elsewhere or (row.only_first is not None and self.place_along[row.only_first]):
            intervals[0] = ()
        cut_along = {row.only_first, *(cut.axis for cut in row.cuts if cut is not None)}
        same = [axis for axis in OTHER_AXES[gradient] if axis not in cut_along]
        return Placement(
            shape=shape,
            gradient=gradient,
            intervals=tuple(intervals),
            group=self.groups[gradient],
            index=self.indices[gradient],
            replicas=len(self.groups[gradient]) * self.mesh.size(same),
            is_first=not any(self.place_along[axis] for axis in same),
            repeated=self._repeated(dims[0]),
        )

    def _pieces(self, cut: Cut | None, size: int) -> list[_Piece]:
        """The intervals of one dim that are this rank's, one of each section."""
        if cut is None:
            return [_Piece(0, size, 1)]
        n, index = self.mesh.size((cut.axis,)), self.place_along[cut.axis]
        found, begin = [], 0
        for section in sections(cut.of, size, self.model):
            copies = n // section.units if section.may_repeat and n > section.units else 1
            if section.units * copies % n:
                raise ValueError(f"{cut.of}: {section.units} cannot be shared out to {cut.axis} {n}")
            width = section.length * copies // n
            start = begin + index // copies * width
            found.append(_Piece(start, start + width, copies))
            begin += section.length
        return found

    def _repeated(self, pieces: list[_Piece]) -> Repeated | None:
        """Of the first dim; what is repeated is at its end."""
        copies = pieces[-1].copies
        if copies == 1:
            return None
        along = self.mesh.group(("tp",), self.rank)
        first = self.place_along["tp"] // copies * copies
        start = sum(piece.stop - piece.start for piece in pieces if piece.copies == 1)
        stop = sum(piece.stop - piece.start for piece in pieces)
        return Repeated(start=start, stop=stop, ranks=along[first : first + copies])


def _joined(pieces: list[_Piece]) -> Intervals:
    """Intervals that touch are one, unless only one of them is repeated."""
    starts = [
        0,
        *(i for i, (a, b) in enumerate(pairwise(pieces), 1) if a.stop != b.start or a.copies != b.copies),
        len(pieces),
    ]
    return tuple((pieces[i].start, pieces[j - 1].stop) for i, j in pairwise(starts))


def _global_runs(local: tuple[int, int], intervals: Intervals) -> Iterator[tuple[int, int, int]]:
    """(place in the local dim, place in the global dim, length) of each interval's part of a local range."""
    begin = 0
    for start, stop in intervals:
        low, high = max(local[0], begin), min(local[1], begin + stop - start)
        if low < high:
            yield low, start + low - begin, high - low
        begin += stop - start
