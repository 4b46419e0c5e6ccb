"""What one writer holds of the tensors of a checkpoint, and how it writes that. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ascend_moe_train import boxes
from ascend_moe_train.boxes import Box
from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.layout import PieceEntry, StoredPiece, TensorEntry, TensorSpec
from ascend_moe_train.checkpoint.piece_files import write_file
from ascend_moe_train.errors import CheckpointError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, in the coordinates of the whole, and an array of the box's shape; a view will do."""

    box: Box
    array: Array


@dataclass(frozen=True)
class Portion:
    """What one writer holds of a tensor: the shape of the whole, and the pieces that it is to write.

    Empty pieces are left out of a checkpoint; so is a tensor that nobody has a piece of.
    """

    shape: tuple[int, ...]
    pieces: Sequence[Piece]


def whole(array: Array) -> Portion:
    """A tensor of which one writer holds all."""
    return Portion(array.shape, (Piece(boxes.whole(array.shape), array),))


def write_portions(
    folder: Path,
    portions: Mapping[str, Portion],
    *,
    writer: int,
    num_writers: int,
    max_file_bytes: int,
    max_piece_bytes: int,
) -> dict[str, TensorEntry]:
    """Writes a writer's files into a folder and makes them durable; returns what it wrote, for the manifest.

    Raises:
        CheckpointError: a name or dtype that cannot be stored, or a file that cannot be written, by its name.
    """
    dtypes = {name: _dtype(name, portion) for name, portion in portions.items() if portion.pieces}
    arrays: dict[str, Array] = {}
    stored: dict[str, StoredPiece] = {}
    for name, dtype in dtypes.items():
        for box, array in _pieces(portions[name], max_piece_bytes, writer):
            key = layout.piece_key(name, portions[name].shape, box)
            if key in arrays:
                raise CheckpointError(f"checkpoint: two pieces of writer {writer} have the name {key!r}")
            arrays[key] = array
            stored[key] = StoredPiece(name, box, dtype, array.shape, sha256="")
    pieces: dict[str, list[PieceEntry]] = {name: [] for name in dtypes}
    stem = layout.file_stem(writer, num_writers)
    for file, keys in layout.plan_files(stored, max_file_bytes, stem).items():
        header = layout.file_layout({key: stored[key] for key in keys}).header
        digests = write_file(folder / file, header, {key: arrays[key] for key in keys})
        for key in keys:
            piece = PieceEntry(file=file, box=stored[key].box, sha256=digests[key])
            pieces[stored[key].tensor].append(piece)
    return {
        name: TensorEntry(dtype=dtype, shape=portions[name].shape, pieces=tuple(pieces[name]))
        for name, dtype in dtypes.items()
    }


def merge_portions(written: Sequence[Mapping[str, TensorEntry]], where: str) -> dict[str, TensorEntry]:
    """What all writers wrote, each tensor with the pieces of all of them.

    Raises:
        CheckpointError: they differ about a tensor, or do not have each of its elements just once.
    """
    specs: dict[str, TensorSpec] = {}
    pieces: dict[str, list[PieceEntry]] = {}
    for writer, tensors in enumerate(written):
        for name, entry in tensors.items():
            spec = specs.setdefault(name, TensorSpec(dtype=entry.dtype, shape=entry.shape))
            if (spec.dtype, spec.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{where}: tensor {name!r} is {entry.dtype} {list(entry.shape)} for writer {writer}, but "
                    f"{spec.dtype} {list(spec.shape)} for another"
                )
            pieces.setdefault(name, []).extend(entry.pieces)
    merged = {
        name: TensorEntry(dtype=spec.dtype, shape=spec.shape, pieces=tuple(pieces[name]))
        for name, spec in specs.items()
    }
    layout.check_tensors(merged, where)
    return merged


def _dtype(name: str, portion: Portion) -> layout.Dtype:
    for piece in portion.pieces:
        if not boxes.fits(piece.box, portion.shape) or piece.array.shape != boxes.box_shape(piece.box):
            raise ValueError(f"tensor {name!r} {portion.shape}: an array {piece.array.shape} for the box {piece.box}")
        if piece.array.dtype != portion.pieces[0].array.dtype:
            raise ValueError(f"tensor {name!r}: pieces of {piece.array.dtype} and {portion.pieces[0].array.dtype}")
    return layout.dtype_tag(name, portion.pieces[0].array.dtype)


def _pieces(portion: Portion, max_piece_bytes: int, writer: int) -> list[tuple[Box, Array]]:
    """Cut to size. A tensor without elements is a single piece of the first writer."""
    everything = boxes.whole(portion.shape)
    cut: list[tuple[Box, Array]] = []
    for piece in portion.pieces:
        max_elements = max(1, max_piece_bytes // piece.array.itemsize)
        for box in boxes.cut(piece.box, max_elements):
            if boxes.volume(box) or (writer == 0 and not cut and piece.box == everything):
                cut.append((box, boxes.view(piece.array, box, piece.box)))
    return cut
