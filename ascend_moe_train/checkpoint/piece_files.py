"""The safetensors files of a checkpoint: written durably, compared with the manifest, read with every byte verified."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.files import naming, open_regular, sync_file
from ascend_moe_train.checkpoint.layout import FileLayout, Manifest
from ascend_moe_train.errors import CheckpointError

Array = np.ndarray[Any, Any]

# Hashing and reading or writing alternate on so much, which stays in the CPU's cache.
_AT_ONCE_BYTES = 2**20


def write_file(path: Path, header: bytes, tensors: Mapping[str, Array]) -> dict[str, str]:
    """Writes a new file, makes it durable and returns the sha256 of each tensor's bytes.

    Holds a copy of one tensor at a time if it is not contiguous, else none. Raises CheckpointError naming the file.
    """
    with naming("write", path), path.open("xb") as stream:
        stream.write(header)
        digests = {name: _write_tensor(stream, array) for name, array in tensors.items()}
        sync_file(stream)
    return digests


def check_files(path: Path, manifest: Manifest) -> None:
    """Compares every file's size and header with the manifest.

    Raises:
        CheckpointError: a file is missing, damaged or not a file; the message names it.
    """
    for file, pieces in manifest.by_file().items():
        with open_regular(path / file) as stream:
            check_file(stream, path / file, layout.file_layout(pieces))


def check_file(stream: FileIO, path: Path, expected: FileLayout) -> None:
    """As `check_files`, for one that has been opened."""
    with naming("read", path):
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes != expected.total_bytes:
            raise CheckpointError(f"{path}: has {size_bytes} bytes, its manifest says {expected.total_bytes}")
        if stream.read(len(expected.header)) != expected.header:
            raise CheckpointError(f"{path}: header does not match the manifest: damaged or edited")


def new_array(dtype: layout.Dtype, shape: tuple[int, ...], where: str) -> Array:
    """An array to read into. Raises CheckpointError that starts with `where`: the memory does not suffice."""
    kind = layout.DTYPES[dtype]
    try:
        array: Array = np.empty(shape, kind)
    except (MemoryError, ValueError) as error:
        raise CheckpointError(f"{where}: no memory for {prod(shape) * kind.itemsize} bytes of shape {shape}") from error
    return array


def read_into(stream: FileIO, array: Array, sha256: str, where: str) -> None:
    """Fills a contiguous array with the next bytes of a file, which must have this checksum.

    Raises:
        CheckpointError: they have another, or cannot be read; one line that starts with `where`.
    """
    digest = hashlib.sha256()
    for part in _parts(array):
        done_bytes = 0
        while done_bytes < len(part):
            try:
                count = stream.readinto(part[done_bytes:])
            except OSError as error:
                raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from error
            if not count:
                raise CheckpointError(f"{where}: the file ends too early")
            done_bytes += count
        digest.update(part)
    if digest.hexdigest() != sha256:
        raise CheckpointError(f"{where}: sha256 does not match the manifest: damaged")
    if array.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise CheckpointError(f"{where}: a bool is stored as a byte above 1")


def _write_tensor(stream: BinaryIO, array: Array) -> str:
    digest = hashlib.sha256()
    for part in _parts(np.asarray(array, order="C")):
        stream.write(part)
        digest.update(part)
    return digest.hexdigest()


def _parts(array: Array) -> Iterator[memoryview]:
    data = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(data), _AT_ONCE_BYTES):
        yield data[start : start + _AT_ONCE_BYTES]
