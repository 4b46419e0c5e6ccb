"""Tensors of a Hugging Face folder to read: checked for infinities and NaN, and counted. Pure."""

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ascend_moe_train.checkpoint.safetensors_stream import (
    Array,
    Place,
    read_pieces,
    read_tensor,
)
from ascend_moe_train.checkpoint.strict_json import one_line
from ascend_moe_train.errors import CheckpointError

# Bits of the exponent: all of them set is an infinity or not a number.
EXPONENT = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
_CHECKED_AT_ONCE = 2**16
FLOATS: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class Weight(Protocol):
    """One tensor to read: `dtype` and `shape` are those of what is read, `stored` the tensors of the files it is from,
    `where` its file and name for messages.

    `index` picks one item of the first axis. Data comes as unsigned integers of the width of `dtype`; the next piece
    may overwrite the last. Raises CheckpointError naming file and tensor for what cannot be read or is not finite.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stored(self) -> tuple[str, ...]: ...
    @property
    def where(self) -> str: ...
    def read(self, index: int | None = None) -> Array: ...
    def pieces(self, index: int | None = None) -> Iterator[Array]: ...


class Ledger:
    """How many bytes of each tensor of the files were read."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places
        self._read: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, size_bytes: int) -> None:
        """Notes that so many more bytes of a tensor were read."""
        with self._lock:
            self._read[name] += size_bytes

    def check(self, *, unread: Collection[str]) -> None:
        """Raises CheckpointError naming a tensor that was not read just once, unless it is of `unread`."""
        for name, place in self._places.items():
            if self._read[name] != place.size_bytes and name not in unread:
                raise CheckpointError(
                    f"{place.path}: tensor {one_line(name)}: {self._read[name]} of {place.size_bytes} bytes were read"
                )


@dataclass(frozen=True, kw_only=True)
class PlainWeight:
    """A tensor that is stored as the model has it."""

    name: str
    place: Place
    ledger: Ledger
    finite: bool

    @property
    def dtype(self) -> str:
        """As stored."""
        return self.place.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return self.place.shape

    @property
    def stored(self) -> tuple[str, ...]:
        """The one tensor."""
        return (self.name,)

    @property
    def where(self) -> str:
        """File and name."""
        return f"{self.place.path}: tensor {self.name!r}"

    def read(self, index: int | None = None) -> Array:
        """All of it, or one item."""
        place = self.place if index is None else self.place.item(index)
        data = read_tensor(place, self.name)
        self._note(data)
        return data

    def pieces(self, index: int | None = None) -> Iterator[Array]:
        """All of it, or one item, flat."""
        for piece in read_pieces(self.place if index is None else self.place.item(index), self.name):
            self._note(piece)
            yield piece

    def _note(self, data: Array) -> None:
        if self.finite:
            check_finite(data, self.dtype, self.where)
        self.ledger.add(self.name, data.nbytes)


def check_finite(data: Array, dtype: str, where: str) -> None:
    """Raises CheckpointError that starts with `where` if an item of a floating-point dtype is infinite or NaN."""
    mask = EXPONENT[dtype]
    flat = data.reshape(-1)
    for start in range(0, flat.size, _CHECKED_AT_ONCE):
        part = flat[start : start + _CHECKED_AT_ONCE]
        if ((part & mask) == mask).any():
            raise CheckpointError(f"{where}: holds infinities or NaN; --allow-nonfinite takes them as they are")
