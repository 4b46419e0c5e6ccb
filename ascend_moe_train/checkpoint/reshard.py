"""Any parts of a checkpoint's tensors, however many writers cut them in whatever way. Pure.

What is asked for and what is stored are boxes in the coordinates of the whole tensor; every stored piece that has
something in common with a box asked for is read whole, verified, and copied to where it belongs.
"""

from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from ascend_moe_train import boxes
from ascend_moe_train.boxes import Box
from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.files import open_regular
from ascend_moe_train.checkpoint.layout import Manifest, StoredPiece, TensorEntry
from ascend_moe_train.checkpoint.piece_files import check_file, new_array, read_into
from ascend_moe_train.errors import CheckpointError

Array = np.ndarray[Any, Any]
# Where a piece goes: the array asked for, the box that it holds, and what that has in common with the piece.
_Place = tuple[Array, Box, Box]


def read_boxes(path: Path, manifest: Manifest, wanted: Mapping[str, Sequence[Box]]) -> dict[str, list[Array]]:
    """Reads parts of tensors, file by file and piece by piece.

    Needs memory for the result, and for one piece (at most `layout.MAX_PIECE_BYTES`) of those that do not go into it
    as they are.

    Args:
        path: the checkpoint's folder.
        manifest: of `store.read_manifest(path)`.
        wanted: names of tensors with boxes in their own coordinates, which may overlap or be empty.

    Returns:
        For each name the boxes as new arrays, in the order asked for.

    Raises:
        CheckpointError: a tensor or box that the checkpoint does not have, or damage; one line with the file and,
            where there is one, the tensor.
    """
    _check_wanted(path, manifest, wanted)
    found = {name: _new_arrays(path, name, manifest.tensors[name], wanted[name]) for name in wanted}
    for file, pieces in manifest.by_file().items():
        places = {
            key: hits
            for key, piece in pieces.items()
            if (hits := _places(piece.box, wanted.get(piece.tensor, ()), found.get(piece.tensor, [])))
        }
        if places:
            with open_regular(path / file) as stream:
                _read_file(stream, path / file, pieces, places)
    return found


def read_whole(path: Path, manifest: Manifest, names: Sequence[str]) -> dict[str, Array]:
    """As `read_boxes`, for whole tensors."""
    found = read_boxes(path, manifest, {name: [boxes.whole(manifest.tensors[name].shape)] for name in names})
    return {name: arrays[0] for name, arrays in found.items()}


def _check_wanted(path: Path, manifest: Manifest, wanted: Mapping[str, Sequence[Box]]) -> None:
    for name, boxes_of_one in wanted.items():
        entry = manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{path}: tensor {name!r} is missing")
        for box in boxes_of_one:
            if not boxes.fits(box, entry.shape):
                raise CheckpointError(f"{path}: tensor {name!r} has shape {list(entry.shape)}: no room for {box}")


def _new_arrays(path: Path, name: str, entry: TensorEntry, wanted: Sequence[Box]) -> list[Array]:
    return [new_array(entry.dtype, boxes.box_shape(box), f"{path}: tensor {name!r}") for box in wanted]


def _places(piece: Box, wanted: Sequence[Box], arrays: Sequence[Array]) -> list[_Place]:
    places = []
    for box, array in zip(wanted, arrays, strict=True):
        common = boxes.intersection(piece, box)
        if common is not None:
            places.append((array, box, common))
    return places


def _read_file(
    stream: FileIO, path: Path, pieces: Mapping[str, StoredPiece], places: Mapping[str, Sequence[_Place]]
) -> None:
    expected = layout.file_layout(pieces)
    check_file(stream, path, expected)
    for key, start_bytes in expected.offsets_bytes.items():
        if key in places:
            stream.seek(start_bytes)
            _read_piece(stream, pieces[key], places[key], f"{path}: tensor {key!r}")


def _read_piece(stream: FileIO, piece: StoredPiece, places: Sequence[_Place], where: str) -> None:
    views = [boxes.view(array, common, box) for array, box, common in places]
    fitting = (view for view in views if view.shape == piece.shape and view.flags.c_contiguous)
    data = next(fitting, None)
    if data is None:
        data = new_array(piece.dtype, piece.shape, where)
    read_into(stream, data, piece.sha256, where)
    for view, (_, _, common) in zip(views, places, strict=True):
        if view is not data:
            view[...] = boxes.view(data, common, piece.box)
