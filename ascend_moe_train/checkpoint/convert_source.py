"""A checkpoint of ours to read from, tensor by tensor, each verified as it is read. Pure."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from ascend_moe_train import boxes
from ascend_moe_train.boxes import Box
from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.converted import ADAPTERS, only_adapters
from ascend_moe_train.checkpoint.layout import Manifest, piece_key
from ascend_moe_train.checkpoint.safetensors_stream import (
    ITEM_BYTES,
    PIECE_BYTES,
    Array,
    Place,
    raw_dtype,
    read_header,
    read_into,
)
from ascend_moe_train.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class StoredBox:
    """A piece of a tensor, where it lies, and its checksum."""

    box: Box
    place: Place
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CheckpointSource:
    """The checkpoint's tensors, and the pieces that each is stored as."""

    path: Path
    manifest: Manifest
    stored: Mapping[str, tuple[StoredBox, ...]]


def open_source(checkpoint: Path) -> CheckpointSource:
    """Opens a checkpoint, or the newest in a folder of them. Raises CheckpointError: none, damaged, adapters only."""
    path = store.find(checkpoint)
    manifest = store.read_manifest(path)
    if any(name.startswith(ADAPTERS) for name in manifest.tensors):
        raise only_adapters(path)
    places = {file: read_header(path / file) for file in manifest.by_file()}
    stored = {
        name: tuple(
            StoredBox(
                box=piece.box, place=places[piece.file][piece_key(name, entry.shape, piece.box)], sha256=piece.sha256
            )
            for piece in entry.pieces
        )
        for name, entry in manifest.tensors.items()
    }
    return CheckpointSource(path=path, manifest=manifest, stored=stored)


class VerifiedTensor:
    """One of our tensors, read in row-major order; at the end the checksums of its pieces are those of the manifest.

    In that order, each piece too is read from its start to its end, so every byte is read and hashed once, and no more
    is held than what is asked for.
    """

    def __init__(self, source: CheckpointSource, name: str) -> None:
        entry = source.manifest.tensors[name]
        self.dtype: str = entry.dtype
        self._name, self._shape, self._folder = name, entry.shape, source.path
        self._pieces = [_PieceReader(stored, name) for stored in source.stored[name]]
        self._done = 0

    @property
    def where(self) -> str:
        """File and name; the folder where several files hold it."""
        paths = {piece.path for piece in self._pieces}
        return f"{paths.pop() if len(paths) == 1 else self._folder}: tensor {self._name!r}"

    def block(self, shape: tuple[int, ...]) -> Array:
        """The next so many items."""
        data = np.empty(shape, raw_dtype(self.dtype))
        self._fill(data.reshape(-1))
        return data

    def pieces(self, shape: tuple[int, ...]) -> Iterator[Array]:
        """The next so many items, flat, in arrays that the next one overwrites."""
        items = prod(shape)
        at_once = PIECE_BYTES // ITEM_BYTES[self.dtype]
        buffer = np.empty(min(at_once, items), raw_dtype(self.dtype))
        for start in range(0, items, at_once):
            piece = buffer[: min(at_once, items - start)]
            self._fill(piece)
            yield piece

    def check(self) -> None:
        """Raises CheckpointError if the tensor is damaged or was not read to its end."""
        if self._done != prod(self._shape):
            raise CheckpointError(f"{self.where}: not all of it was read")
        for piece in self._pieces:
            piece.check()

    def _fill(self, data: Array) -> None:
        start = self._done
        self._done += data.size
        filled = 0
        for box in boxes.flat_boxes(self._shape, start, self._done):
            part = data[filled : filled + boxes.volume(box)].reshape(boxes.box_shape(box))
            filled += part.size
            for piece in self._pieces:
                common = boxes.intersection(piece.box, box)
                if common is not None:
                    piece.read(boxes.view(part, common, box))


class _PieceReader:
    """A piece that is read from its start to its end."""

    def __init__(self, stored: StoredBox, name: str) -> None:
        self.box, self.path = stored.box, stored.place.path
        self._place, self._sha256, self._name = stored.place, stored.sha256, name
        self._offset_bytes = stored.place.start_bytes
        self._digest = hashlib.sha256()

    def read(self, view: Array) -> None:
        """Fills an array, of any strides, with the next items."""
        data = view if view.flags.c_contiguous else np.empty(view.shape, view.dtype)
        place = replace(self._place, shape=data.shape, start_bytes=self._offset_bytes)
        read_into(place, data, self._name)
        self._offset_bytes += place.size_bytes
        self._digest.update(data.reshape(-1).data)
        if data is not view:
            view[...] = data

    def check(self) -> None:
        """Raises CheckpointError if the piece is damaged."""
        if self._digest.hexdigest() != self._sha256:
            raise CheckpointError(f"{self.path}: tensor {self._name!r}: sha256 does not match the manifest: damaged")
