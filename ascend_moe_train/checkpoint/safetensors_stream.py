"""Safetensors files of anybody: where each tensor lies, and reading any part of one. Pure.

Format: https://huggingface.co/docs/safetensors. A header is accepted only when it accounts for every byte of the file.
Data is handed out as unsigned integers as wide as the items, so that moving bytes can never change a value.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.checkpoint.files import naming, open_regular
from ascend_moe_train.checkpoint.strict_json import one_line, parse_json
from ascend_moe_train.errors import CheckpointError

Array = NDArray[Any]

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
    | {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
)
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
PIECE_BYTES = 4 * 2**20
_MAX_DIMENSIONS = 32
_MAX_DIMENSION = 2**48


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Which file it was when its header was read."""

    device: int
    inode: int
    size_bytes: int
    changed_ns: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """A tensor in a file: `start_bytes` counts from the start of the file."""

    path: Path
    stamp: Stamp
    dtype: str
    shape: tuple[int, ...]
    start_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of data."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def rows(self, start: int, stop: int) -> "Place":
        """The part of the first axis from `start` to before `stop`."""
        row_bytes = prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        start_bytes = self.start_bytes + start * row_bytes
        return replace(self, shape=(stop - start, *self.shape[1:]), start_bytes=start_bytes)

    def item(self, index: int) -> "Place":
        """One item of the first axis."""
        part = self.rows(index, index + 1)
        return replace(part, shape=part.shape[1:])


def read_header(path: Path) -> dict[str, Place]:
    """Where each tensor of a file lies, in the order of the file.

    Raises:
        CheckpointError: not a safetensors file, or one whose header and length do not fit together; the line names the
            file, and the tensor where there is one.
    """
    with open_regular(path) as stream, naming("read", path):
        stamp = _stamp(stream)
        length_bytes = int.from_bytes(_exactly(stream, 8, 0, path), "little")
        if length_bytes > min(MAX_HEADER_BYTES, stamp.size_bytes - 8):
            raise CheckpointError(
                f"{path}: says that its header has {length_bytes} bytes; allowed: at most {MAX_HEADER_BYTES}, and what "
                f"the file has, {stamp.size_bytes} with 8 before the header"
            )
        text = _exactly(stream, length_bytes, 8, path)
    header = parse_json(text, f"{path}: header is not valid JSON")
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is {one_line(header)}; allowed: a mapping")
    header.pop("__metadata__", None)
    starts = [
        _place(path, stamp, name, entry, 8 + length_bytes, f"{path}: tensor {one_line(name)}")
        for name, entry in header.items()
    ]
    return _without_gaps(path, stamp, dict(zip(header, starts, strict=True)), 8 + length_bytes)


def read_tensor(place: Place, what: str) -> Array:
    """The data of a tensor in its shape, as unsigned integers. Raises CheckpointError naming file and `what`."""
    array = np.empty(place.shape, raw_dtype(place.dtype))
    read_into(place, array, what)
    return array


def read_into(place: Place, array: Array, what: str) -> None:
    """As `read_tensor`, into a contiguous array of its size."""
    with _open_same(place) as stream:
        _fill(stream, array.reshape(-1).view(np.uint8).data, place.start_bytes, place, what)


def read_pieces(place: Place, what: str, piece_bytes: int = PIECE_BYTES) -> Iterator[Array]:
    """The data of a tensor as flat arrays of at most `piece_bytes`, which the next one overwrites."""
    buffer = np.empty(min(piece_bytes, place.size_bytes), np.uint8)
    with _open_same(place) as stream:
        for done in range(0, place.size_bytes, piece_bytes):
            piece = buffer[: min(piece_bytes, place.size_bytes - done)]
            _fill(stream, piece.data, place.start_bytes + done, place, what)
            yield piece.view(raw_dtype(place.dtype))


def raw_dtype(dtype: str) -> np.dtype[Any]:
    """Unsigned integers as wide as the items of a safetensors dtype."""
    return np.dtype(f"<u{ITEM_BYTES[dtype]}")


def _place(path: Path, stamp: Stamp, name: str, entry: object, data_start: int, where: str) -> Place:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: entry {one_line(entry)}; allowed: dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where}: dtype {one_line(dtype)}; allowed: {', '.join(ITEM_BYTES)}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(f"{where}: shape {one_line(shape)}; allowed: whole numbers from 0")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: data_offsets {one_line(offsets)}; allowed: two whole numbers from 0")
    place = Place(path=path, stamp=stamp, dtype=dtype, shape=tuple(shape), start_bytes=data_start + offsets[0])
    if offsets[1] - offsets[0] != place.size_bytes:
        raise CheckpointError(
            f"{where}: data_offsets {offsets} are {offsets[1] - offsets[0]} bytes, but {dtype} {shape} needs "
            f"{place.size_bytes}"
        )
    return place


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= _MAX_DIMENSION for one in value)


def _without_gaps(path: Path, stamp: Stamp, places: dict[str, Place], data_start: int) -> dict[str, Place]:
    ordered = dict(sorted(places.items(), key=lambda item: (item[1].start_bytes, item[1].size_bytes)))
    end = data_start
    for name, place in ordered.items():
        if place.start_bytes != end:
            problem = "overlaps the one before it" if place.start_bytes < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {one_line(name)}: its data {problem}")
        end += place.size_bytes
        if end > stamp.size_bytes:
            raise CheckpointError(
                f"{path}: tensor {one_line(name)} ends at byte {end}, but the file has {stamp.size_bytes}: cut short"
            )
    if end != stamp.size_bytes:
        raise CheckpointError(f"{path}: has {stamp.size_bytes} bytes, but its header accounts for {end}")
    return ordered


def _open_same(place: Place) -> FileIO:
    stream = open_regular(place.path)
    if _stamp(stream) != place.stamp:
        stream.close()
        raise CheckpointError(f"{place.path}: changed while it was being read")
    return stream


def _stamp(stream: FileIO) -> Stamp:
    status = os.fstat(stream.fileno())
    return Stamp(device=status.st_dev, inode=status.st_ino, size_bytes=status.st_size, changed_ns=status.st_mtime_ns)


def _exactly(stream: FileIO, size_bytes: int, offset_bytes: int, path: Path) -> bytes:
    data = os.pread(stream.fileno(), size_bytes, offset_bytes)
    if len(data) != size_bytes:
        raise CheckpointError(f"{path}: has {len(data) + offset_bytes} bytes: too short for a safetensors file")
    return data


def _fill(stream: FileIO, target: memoryview, offset_bytes: int, place: Place, what: str) -> None:
    done = 0
    while done < len(target):
        try:
            count = os.preadv(stream.fileno(), [target[done:]], offset_bytes + done)
        except OSError as error:
            raise CheckpointError(f"{place.path}: tensor {what!r}: cannot be read: {error.strerror}") from error
        if not count:
            raise CheckpointError(f"{place.path}: tensor {what!r}: the file ends too early")
        done += count
