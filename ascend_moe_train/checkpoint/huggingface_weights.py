"""The weights of a Hugging Face folder as the model has them: float8 blocks decoded, all of them checked. Pure."""

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ascend_moe_train.checkpoint.huggingface_folder import CONFIG, HuggingFaceFolder
from ascend_moe_train.checkpoint.safetensors_stream import (
    PIECE_BYTES,
    Array,
    Place,
    raw_dtype,
    read_pieces,
    read_tensor,
)
from ascend_moe_train.checkpoint.strict_json import one_line
from ascend_moe_train.errors import CheckpointError

# Bits of the exponent: all of them set is an infinity or not a number.
_EXPONENT = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
_CHECKED_AT_ONCE = 2**16
_SCALE_ENDING = "_scale_inv"
_FLOAT8 = "F8_E4M3"
_FLOAT8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
FLOATS: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_MAX_BLOCK = 2**20


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


@dataclass(frozen=True, kw_only=True)
class BlockScaledWeight:
    """A float8 matrix with a factor for each block of `block` rows and columns, decoded to bfloat16.

    As DeepSeek-V3's fp8_cast_bf16.py: value * factor in fp32, rounded to bfloat16.
    """

    weight: PlainWeight
    scale: PlainWeight
    block: tuple[int, int]
    finite: bool

    @property
    def dtype(self) -> str:
        """Decoded."""
        return "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.weight.shape

    @property
    def stored(self) -> tuple[str, ...]:
        """The matrix and its factors."""
        return (self.weight.name, self.scale.name)

    @property
    def where(self) -> str:
        """File and name of the matrix."""
        return self.weight.where

    def read(self, index: int | None = None) -> Array:
        """The whole matrix."""
        return np.concatenate([piece.reshape(-1, self.shape[1]) for piece in self.pieces(index)])

    def pieces(self, index: int | None = None) -> Iterator[Array]:
        """Strips of whole blocks, flat."""
        if index is not None:
            raise ValueError("a block-scaled tensor is one matrix")
        factors = self.scale.read().view(FLOATS[self.scale.dtype]).astype(np.float32)
        rows, columns = self.shape
        strip = self.block[0] * max(1, PIECE_BYTES // (2 * self.block[0] * columns))
        for start in range(0, rows, strip):
            stop = min(rows, start + strip)
            part = PlainWeight(
                name=self.weight.name,
                place=self.weight.place.rows(start, stop),
                ledger=self.weight.ledger,
                finite=False,
            )
            values = _FLOAT8_VALUES[part.read()]
            own = factors[start // self.block[0] : -(-stop // self.block[0])]
            values *= np.repeat(np.repeat(own, self.block[0], 0)[: stop - start], self.block[1], 1)[:, :columns]
            decoded = values.astype(ml_dtypes.bfloat16).view(raw_dtype(self.dtype)).reshape(-1)
            if self.finite:
                check_finite(decoded, self.dtype, self.where)
            yield decoded


def weights_of(folder: HuggingFaceFolder, ledger: Ledger, *, finite: bool) -> dict[str, Weight]:
    """Every tensor of a folder, float8 together with its factors. `finite`: infinities and NaN are refused.

    Raises:
        CheckpointError: a quantisation that cannot be decoded, naming config key or tensor.
    """
    plain = {
        name: PlainWeight(name=name, place=place, ledger=ledger, finite=finite and place.dtype in _EXPONENT)
        for name, place in folder.places.items()
    }
    block = _block(folder)
    if block is None:
        return dict(plain)
    weights: dict[str, Weight] = {}
    for name, weight in plain.items():
        if weight.dtype == _FLOAT8:
            scale = _scale_of(weight, plain, block)
            weights[name] = BlockScaledWeight(weight=weight, scale=scale, block=block, finite=finite)
    scales = {name for weight in weights.values() for name in weight.stored}
    return weights | {name: weight for name, weight in plain.items() if name not in scales}


def check_finite(data: Array, dtype: str, where: str) -> None:
    """Raises CheckpointError that starts with `where` if an item of a floating-point dtype is infinite or NaN."""
    mask = _EXPONENT[dtype]
    flat = data.reshape(-1)
    for start in range(0, flat.size, _CHECKED_AT_ONCE):
        part = flat[start : start + _CHECKED_AT_ONCE]
        if ((part & mask) == mask).any():
            raise CheckpointError(f"{where}: holds infinities or NaN; --allow-nonfinite takes them as they are")


def _block(folder: HuggingFaceFolder) -> tuple[int, int] | None:
    """Rows and columns of the blocks that share a factor; None where nothing is quantised."""
    where = f"{folder.path / CONFIG}: quantization_config"
    section = folder.config.get("quantization_config")
    if section is None:
        return None
    if not isinstance(section, dict):
        raise CheckpointError(f"{where}: {one_line(section)}; allowed: a mapping")
    method, size = section.get("quant_method"), section.get("weight_block_size")
    if method != "fp8":
        raise CheckpointError(f"{where}.quant_method: {one_line(method)} cannot be decoded; allowed: 'fp8'")
    if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or not 0 < n < _MAX_BLOCK for n in size):
        raise CheckpointError(f"{where}.weight_block_size: {one_line(size)}; allowed: two whole numbers from 1")
    return size[0], size[1]


def _scale_of(weight: PlainWeight, plain: Mapping[str, PlainWeight], block: tuple[int, int]) -> PlainWeight:
    where = weight.where
    name = f"{weight.name}{_SCALE_ENDING}"
    scale = plain.get(name)
    if scale is None:
        raise CheckpointError(f"{where}: is {_FLOAT8}, but {name!r} with its factors is missing")
    if len(weight.shape) != 2:
        raise CheckpointError(f"{where}: is {_FLOAT8} with shape {list(weight.shape)}; allowed: a matrix")
    expected = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    if scale.dtype not in FLOATS or scale.shape != expected:
        raise CheckpointError(
            f"{scale.where}: is {scale.dtype} {list(scale.shape)}, but blocks {list(block)} of "
            f"{list(weight.shape)} need {', '.join(FLOATS)} {list(expected)}"
        )
    return scale
