"""A checkpoint of ours to read from, tensor by tensor, each verified as it is read. Pure."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.converted import ADAPTERS, only_adapters
from ascend_moe_train.checkpoint.layout import Manifest
from ascend_moe_train.checkpoint.safetensors_stream import Array, Place, read_header, read_pieces, read_tensor
from ascend_moe_train.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class CheckpointSource:
    """The checkpoint's tensors: where they lie, and their checksums."""

    path: Path
    manifest: Manifest
    places: Mapping[str, Place]


def open_source(checkpoint: Path) -> CheckpointSource:
    """Opens a checkpoint, or the newest in a folder of them. Raises CheckpointError: none, damaged, adapters only."""
    path = store.find(checkpoint)
    manifest = store.read_manifest(path)
    if any(name.startswith(ADAPTERS) for name in manifest.tensors):
        raise only_adapters(path)
    places = {name: place for file in manifest.by_file() for name, place in read_header(path / file).items()}
    return CheckpointSource(path=path, manifest=manifest, places=places)


class VerifiedTensor:
    """One of our tensors, read in order; at the end its checksum is that of the manifest."""

    def __init__(self, source: CheckpointSource, name: str) -> None:
        self._name, self._entry = name, source.manifest.tensors[name]
        self._place = source.places[name]
        self._offset_bytes = self._place.start_bytes
        self._digest = hashlib.sha256()

    @property
    def where(self) -> str:
        """File and name."""
        return f"{self._place.path}: tensor {self._name!r}"

    @property
    def dtype(self) -> str:
        """As stored."""
        return self._place.dtype

    def block(self, shape: tuple[int, ...]) -> Array:
        """The next so many items."""
        data = read_tensor(self._next(shape), self._name)
        self._digest.update(data.data)
        return data

    def pieces(self, shape: tuple[int, ...]) -> Iterator[Array]:
        """The next so many items, flat."""
        for piece in read_pieces(self._next(shape), self._name):
            self._digest.update(piece.data)
            yield piece

    def check(self) -> None:
        """Raises CheckpointError if the tensor is damaged or was not read to its end."""
        if self._offset_bytes != self._place.start_bytes + self._place.size_bytes:
            raise CheckpointError(f"{self.where}: not all of it was read")
        if self._digest.hexdigest() != self._entry.sha256:
            raise CheckpointError(f"{self.where}: sha256 does not match the manifest: damaged")

    def _next(self, shape: tuple[int, ...]) -> Place:
        place = replace(self._place, shape=shape, start_bytes=self._offset_bytes)
        self._offset_bytes += place.size_bytes
        return place
