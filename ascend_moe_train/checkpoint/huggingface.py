"""Weights under Hugging Face names, and back. Pure: NumPy only.

The names themselves are the tables of huggingface_names.py.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.checkpoint.huggingface_names import LAYOUTS, Pairs, Row, repeated
from ascend_moe_train.checkpoint.strict_json import one_line
from ascend_moe_train.config_error import nearest
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.model.counts import buffer_shapes, parameter_shapes

Array = NDArray[Any]


_NOT_REAL = "biucSUOMm"  # kinds of NumPy dtypes; bfloat16, which NumPy has from outside, is kind V
# Rows and columns that are copied at once between a matrix and its transpose, and unused items between the rows
# (measured with 768 x 2048 items of two bytes: 5.7 GB/s, where NumPy alone copies 0.9 and 2.4 one way and the other).
_TILE, _TILE_GAP = (128, 256), 16
_MAX_COMPARED = 1000  # names searched for a likely misspelling
# Constants, not weights, that older files carry.
CONSTANT_ENDINGS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of one of our tensors: one Hugging Face tensor, or one per expert, each of `shape`."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of their tensors, or of one that holds all experts the part of one expert, which has `shape`."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One of our tensors, and what it is joined from: see `Row`, whose words it uses."""

    ours: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    by_expert: bool
    axis: int
    transposed: bool
    pairs: Pairs | None

    @property
    def stacked(self) -> bool:
        """Whether our first axis counts experts."""
        return ".experts." in self.ours

    @property
    def num_blocks(self) -> int:
        """Blocks lie one after another in our tensor: one per expert, else the whole."""
        return self.shape[0] if self.stacked else 1

    @property
    def verbatim(self) -> bool:
        """Whether the bytes of a block are those of its parts, one part after another."""
        block = self.shape[1:] if self.stacked else self.shape
        return not self.transposed and self.pairs is None and (len(self.pieces) == 1 or self.axis == -len(block))

    def sources(self, index: int) -> list[Source]:
        """What block `index` is joined from, in order."""
        pieces = self.pieces
        if self.by_expert:
            return [Source(name=piece.names[index], shape=piece.shape) for piece in pieces]
        return [Source(name=piece.names[0], shape=piece.shape[1:] if self.stacked else piece.shape) for piece in pieces]


def from_hf(tensors: Mapping[str, Array], cfg: ModelConfig) -> dict[str, Array]:
    """Return our tensors from those of a Hugging Face model of config `cfg`, in any of LAYOUTS; dtypes are kept.

    Raises CheckpointError naming the tensor that is missing, unknown, or of the wrong shape or dtype.
    """
    entries = name_table(cfg, layout_of(tensors, cfg))
    expected = {name: piece.shape for entry in entries for piece in entry.pieces for name in piece.names}
    _check({name: tensors[name] for name in tensors if not _skipped(name, tensors, cfg)}, expected)
    return {entry.ours: join(entry, tensors) for entry in entries}


def to_hf(params: Mapping[str, Array], cfg: ModelConfig, layout: str) -> dict[str, Array]:
    """Return the tensors of a Hugging Face model in `layout` (of LAYOUTS) from ours; the inverse of `from_hf`.

    Raises CheckpointError naming the tensor that is missing, unknown or misshapen, or that the layout has no place for.
    """
    entries = name_table(cfg, layout)
    _check(params, {entry.ours: entry.shape for entry in entries})
    return {name: tensor for entry in entries for name, tensor in split(entry, params[entry.ours])}


def config_of_present(cfg: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """Return the config of the model that `names` are tensors of: without multi-token prediction where its blocks are
    absent, since transformers leaves them out when it saves but keeps the key in config.json."""
    first = f"model.layers.{cfg.num_layers}."
    return cfg if any(name.startswith(first) for name in names) else cfg.model_copy(update={"mtp": None})


def layout_of(names: Iterable[str], cfg: ModelConfig) -> str:
    """Return the layout with the most of `names`, among those that can hold a model of config `cfg`."""
    present = frozenset(names)
    homeless = {layout: _homeless(cfg, layout) for layout in LAYOUTS}
    possible = [layout for layout in LAYOUTS if not homeless[layout]]
    if not possible:
        layout = min(LAYOUTS, key=lambda each: len(homeless[each]))
        raise _no_place(homeless[layout][0], layout)

    def found(layout: str) -> int:
        entries = name_table(cfg, layout)
        return sum(name in present for entry in entries for piece in entry.pieces for name in piece.names)

    return max(possible, key=found)


def name_table(cfg: ModelConfig, layout: str) -> list[Entry]:
    """Return an entry for each of our tensors.

    Raises CheckpointError for an unknown layout, and for a tensor that the layout has no place for.
    """
    if layout not in LAYOUTS:
        raise CheckpointError(f"layout {layout!r} is unknown: must be one of {', '.join(LAYOUTS)}")
    if homeless := _homeless(cfg, layout):
        raise _no_place(homeless[0], layout)
    rows = {row.ours: row for row in LAYOUTS[layout]}
    return [_entry(rows[_pattern(ours)], ours, shape, cfg) for ours, shape in tensor_shapes(cfg).items()]


def tensor_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each of our tensors, those without a gradient last."""
    return parameter_shapes(cfg) | buffer_shapes(cfg)


def join(entry: Entry, tensors: Mapping[str, Array]) -> Array:
    """Return our tensor from theirs, whose shapes are those of the entry. Raises CheckpointError for mixed dtypes."""
    names = [name for piece in entry.pieces for name in piece.names]
    for name in names[1:]:
        if tensors[name].dtype != tensors[names[0]].dtype:
            raise CheckpointError(
                f"{name} is {tensors[name].dtype} but {names[0]} is {tensors[names[0]].dtype}: "
                f"parts of {entry.ours} must share a dtype"
            )
    whole = np.empty(entry.shape, tensors[names[0]].dtype)
    for index in range(entry.num_blocks):
        parts = [tensors[source.name] for source in entry.sources(index)]
        if entry.stacked and not entry.by_expert:
            parts = [part[index] for part in parts]
        join_block(entry, parts, whole[index] if entry.stacked else whole)
    return whole


def split(entry: Entry, tensor: Array) -> Iterator[tuple[str, Array]]:
    """Yield (name, tensor) of each of theirs from our tensor, whose shape is that of the entry."""
    if not entry.stacked:
        for source, part in zip(entry.sources(0), split_block(entry, tensor), strict=True):
            yield source.name, contiguous(part)
        return
    by_piece = zip(*(split_block(entry, block) for block in tensor), strict=True)
    for piece, parts in zip(entry.pieces, by_piece, strict=True):
        if entry.by_expert:
            yield from zip(piece.names, map(contiguous, parts), strict=True)
        else:
            yield piece.names[0], np.stack([contiguous(part) for part in parts])


def join_block(entry: Entry, parts: Sequence[Array], out: Array) -> None:
    """Fill `out`, a block of our tensor, from the parts of that block in the order of `Entry.sources`."""
    theirs = out.swapaxes(-1, -2) if entry.transposed else out
    if entry.pairs is not None:
        whole = np.concatenate(parts, axis=entry.axis)
        parts = [whole.take(paired_order(whole.shape[entry.axis], entry.pairs), axis=entry.axis)]
    for target, part in zip(_cut(theirs, [part.shape for part in parts], entry.axis), parts, strict=True):
        copy_across(target, part)


def split_block(entry: Entry, block: Array) -> list[Array]:
    """Return the parts of a block of our tensor in the order of `Entry.sources`: views where that is possible."""
    theirs = block.swapaxes(-1, -2) if entry.transposed else block
    if entry.pairs is not None:
        theirs = theirs.take(np.argsort(paired_order(theirs.shape[entry.axis], entry.pairs)), axis=entry.axis)
    return _cut(theirs, [source.shape for source in entry.sources(0)], entry.axis)


def copy_across(target: Array, source: Array) -> None:
    """Set `target` to `source`, of the same shape and dtype; a transposed matrix by tiles that stay in the cache.

    A tile is first copied to rows that do not lie a power of two apart, which would share a few lines of the cache.
    """
    if source.ndim == 2 and source.strides[0] < source.strides[1]:
        target, source = target.T, source.T
    if source.ndim != 2 or target.strides[0] >= target.strides[1]:
        np.copyto(target, source)
        return
    rows, columns = _TILE
    tile = np.empty((rows, columns + _TILE_GAP), source.dtype)
    for row in range(0, source.shape[0], rows):
        for column in range(0, source.shape[1], columns):
            part = source[row : row + rows, column : column + columns]
            near = tile[: part.shape[0], : part.shape[1]]
            near[...] = part
            target[row : row + rows, column : column + columns] = near


def contiguous(array: Array) -> Array:
    """Return the array, or a copy of it, laid out by rows."""
    if array.flags.c_contiguous:
        return array
    copy = np.empty(array.shape, array.dtype)
    copy_across(copy, array)
    return copy


def _cut(array: Array, shapes: Sequence[tuple[int, ...]], axis: int) -> list[Array]:
    if len(shapes) == 1:
        return [array]
    return np.split(array, list(accumulate(shape[axis] for shape in shapes))[:-1], axis=axis)


def paired_order(size: int, pairs: Pairs) -> NDArray[np.int64]:
    """Return, for each of our outputs, its number among theirs."""
    block = np.arange(pairs.block)
    turned = block[pairs.start :].reshape(-1, 2).T.reshape(-1)
    order: NDArray[np.int64] = (
        np.arange(0, size, pairs.block)[:, None] + np.concatenate((block[: pairs.start], turned))
    ).reshape(-1)
    return order


def _entry(row: Row, ours: str, shape: tuple[int, ...], cfg: ModelConfig) -> Entry:
    by_expert = "{expert}" in row.theirs[0]
    theirs = (*shape[:-2], shape[-1], shape[-2]) if row.transposed else shape
    one = theirs[1:] if by_expert else theirs
    shares = [getattr(cfg, field) for field in row.shares] or [1] * len(row.theirs)
    pieces = []
    for pattern, share in zip(row.theirs, shares, strict=True):
        names = [pattern.format(layer=_layer(ours, cfg), expert=e) for e in range(shape[0] if by_expert else 1)]
        part = list(one)
        if len(row.theirs) > 1:
            part[row.axis] = part[row.axis] * share // sum(shares)
        pieces.append(Piece(names=tuple(names), shape=tuple(part)))
    return Entry(
        ours=ours,
        shape=shape,
        pieces=tuple(pieces),
        by_expert=by_expert,
        axis=row.axis,
        transposed=row.transposed,
        pairs=row.pairs(cfg) if row.pairs is not None else None,
    )


def _pattern(ours: str) -> str:
    """The name in a row: a block of multi-token prediction has the rows of any other block."""
    return re.sub(r"^mtp\.\d+\.", "mtp.{layer}.", re.sub(r"^(layers\.\d+|mtp\.\d+\.block)\.", "layers.{layer}.", ours))


def _layer(ours: str, cfg: ModelConfig) -> int:
    """The number of the block that a tensor belongs to, 0 for one of none."""
    section, _, rest = ours.partition(".")
    first = {"layers": 0, "mtp": cfg.num_layers}.get(section)
    return 0 if first is None else first + int(rest.partition(".")[0])


def _homeless(cfg: ModelConfig, layout: str) -> list[str]:
    rows = {row.ours for row in LAYOUTS[layout]}
    return [ours for ours in tensor_shapes(cfg) if _pattern(ours) not in rows]


def _no_place(ours: str, layout: str) -> CheckpointError:
    return CheckpointError(f"{ours}: Hugging Face layout '{layout}' has no place for this tensor")


def _skipped(name: str, tensors: Mapping[str, Array], cfg: ModelConfig) -> bool:
    if name.endswith(CONSTANT_ENDINGS):
        return True
    original = repeated(cfg).get(name)
    if original is None or original not in tensors:
        return False
    if not np.array_equal(tensors[name], tensors[original]):
        raise CheckpointError(f"{name} differs from {original}, which it should repeat")
    return True


def check_shapes(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    where: Callable[[str], str] = lambda name: "",
) -> None:
    """Raises CheckpointError naming a tensor that is missing, unknown or misshapen, after what `where` says of it."""
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        close = nearest(missing[0], unknown[:_MAX_COMPARED])
        instead = f": {one_line(close)} is there instead" if close else ""
        raise CheckpointError(f"{where(missing[0])}{missing[0]} is missing{more}{instead}")
    if unknown:
        name = unknown[0]
        raise CheckpointError(f"{where(name)}{one_line(name)} is not a tensor of this model ({len(unknown)} such)")
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{where(name)}{name} has shape {list(found[name])}: the config asks for {list(shape)}"
            )


def _check(tensors: Mapping[str, Array], expected: Mapping[str, tuple[int, ...]]) -> None:
    check_shapes({name: tensor.shape for name, tensor in tensors.items()}, expected)
    for name, tensor in tensors.items():
        if tensor.dtype.kind in _NOT_REAL:
            raise CheckpointError(f"{name} is {tensor.dtype}: a weight must be a floating-point tensor")
