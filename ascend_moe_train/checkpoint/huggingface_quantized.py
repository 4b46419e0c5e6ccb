"""Weights that a Hugging Face folder holds quantised, decoded to bfloat16. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from ascend_moe_train.checkpoint.huggingface_folder import CONFIG, HuggingFaceFolder
from ascend_moe_train.checkpoint.huggingface_weights import (
    EXPONENT,
    FLOATS,
    Ledger,
    PlainWeight,
    Weight,
    check_finite,
)
from ascend_moe_train.checkpoint.safetensors_stream import PIECE_BYTES, Array, raw_dtype
from ascend_moe_train.checkpoint.strict_json import one_line
from ascend_moe_train.errors import CheckpointError

_DECODED = "BF16"
_SCALE_ENDING = "_scale_inv"
_FLOAT8 = "F8_E4M3"
_FLOAT8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_MAX_BLOCK = 2**20
# MXFP4 (Open Compute Project, Microscaling Formats, 2023): 32 numbers of 4 bits, the low half of a byte first, share a
# power of two.
_BLOCKS_ENDING, _POWERS_ENDING = "_blocks", "_scales"
_GROUP, _POWER_BIAS = 32, 127
_FLOAT4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_PAIRS_OF_FLOAT4 = np.stack(
    [np.concatenate((_FLOAT4_VALUES, -_FLOAT4_VALUES))[part] for part in (np.arange(256) & 15, np.arange(256) >> 4)],
    axis=-1,
)

Section = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Float8Weight:
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
        return _DECODED

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
            values = _FLOAT8_VALUES.take(part.read(), mode="clip")  # no number is beyond 255: the fastest mode
            own = factors[start // self.block[0] : -(-stop // self.block[0])]
            with np.errstate(over="ignore"):  # what is too large becomes an infinity, which is refused below
                values *= np.repeat(np.repeat(own, self.block[0], 0)[: stop - start], self.block[1], 1)[:, :columns]
            decoded = values.astype(ml_dtypes.bfloat16).view(raw_dtype(self.dtype)).reshape(-1)
            if self.finite:
                check_finite(decoded, self.dtype, self.where)
            yield decoded


@dataclass(frozen=True, kw_only=True)
class Float4Weight:
    """Matrices of all experts in MXFP4, decoded to bfloat16 and transposed, as transformers has them for gpt-oss."""

    blocks: PlainWeight
    powers: PlainWeight
    finite: bool

    @property
    def dtype(self) -> str:
        """Decoded."""
        return _DECODED

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, in, out)."""
        experts, rows, groups = self.powers.shape
        return (experts, groups * _GROUP, rows)

    @property
    def stored(self) -> tuple[str, ...]:
        """The numbers and their powers."""
        return (self.blocks.name, self.powers.name)

    @property
    def where(self) -> str:
        """File and name of the numbers."""
        return self.blocks.where

    def read(self, index: int | None = None) -> Array:
        """All experts, or one."""
        if index is None:
            return np.stack([self.read(each) for each in range(self.shape[0])])
        numbers = _PAIRS_OF_FLOAT4.take(self.blocks.read(index), axis=0, mode="clip")
        powers = self.powers.read(index).astype(np.int32) - _POWER_BIAS
        with np.errstate(over="ignore"):  # what is too large becomes an infinity, which is refused below
            values = np.ldexp(numbers.reshape(*powers.shape, _GROUP), powers[..., None])
        decoded = values.reshape(powers.shape[0], -1).T.astype(ml_dtypes.bfloat16, order="C").view(raw_dtype(_DECODED))
        if self.finite:
            check_finite(decoded, _DECODED, self.where)
        return decoded

    def pieces(self, index: int | None = None) -> Iterator[Array]:
        """Expert by expert, flat."""
        for each in range(self.shape[0]) if index is None else (index,):
            yield self.read(each).reshape(-1)


def weights_of(folder: HuggingFaceFolder, ledger: Ledger, *, finite: bool) -> dict[str, Weight]:
    """Every tensor of a folder, quantised ones together with their factors. `finite`: no infinities, no NaN.

    Raises:
        CheckpointError: a quantisation that cannot be decoded, naming config key or tensor.
    """
    plain = {
        name: PlainWeight(name=name, place=place, ledger=ledger, finite=finite and place.dtype in EXPONENT)
        for name, place in folder.places.items()
    }
    section = _section(folder)
    if section is None:
        return dict(plain)
    where = f"{folder.path / CONFIG}: quantization_config"
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(
            f"{where}.quant_method: {one_line(method)} cannot be decoded; allowed: {', '.join(_METHODS)}"
        )
    decoded = _METHODS[method](plain, section, where, finite)
    stored = {name for weight in decoded.values() for name in weight.stored}
    return decoded | {name: weight for name, weight in plain.items() if name not in stored}


def _section(folder: HuggingFaceFolder) -> Section | None:
    section = folder.config.get("quantization_config")
    if section is None or isinstance(section, dict):
        return section
    raise CheckpointError(f"{folder.path / CONFIG}: quantization_config: {one_line(section)}; allowed: a mapping")


def _float8(plain: Mapping[str, PlainWeight], section: Section, where: str, finite: bool) -> dict[str, Weight]:
    size = section.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or not 0 < n < _MAX_BLOCK for n in size):
        raise CheckpointError(f"{where}.weight_block_size: {one_line(size)}; allowed: two whole numbers from 1")
    block = (size[0], size[1])
    return {
        name: Float8Weight(weight=weight, scale=_scale_of(weight, plain, block), block=block, finite=finite)
        for name, weight in plain.items()
        if weight.dtype == _FLOAT8
    }


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


def _float4(plain: Mapping[str, PlainWeight], section: Section, where: str, finite: bool) -> dict[str, Weight]:
    decoded: dict[str, Weight] = {}
    for name, blocks in plain.items():
        if not name.endswith(_BLOCKS_ENDING):
            continue
        stem = name.removesuffix(_BLOCKS_ENDING)
        powers = plain.get(stem + _POWERS_ENDING)
        if powers is None:
            raise CheckpointError(f"{blocks.where}: {stem + _POWERS_ENDING!r} with its powers of two is missing")
        if len(powers.shape) != 3 or (powers.dtype, blocks.dtype) != ("U8", "U8"):
            raise CheckpointError(
                f"{powers.where}: is {powers.dtype} {list(powers.shape)}; allowed: U8 of 3 dimensions"
            )
        expected = (*powers.shape, _GROUP // 2)
        if blocks.shape != expected:
            raise CheckpointError(f"{blocks.where}: has shape {list(blocks.shape)}; its powers need {list(expected)}")
        decoded[stem] = Float4Weight(blocks=blocks, powers=powers, finite=finite)
    return decoded


# quant_method: how it is decoded.
_METHODS: Mapping[str, Callable[[Mapping[str, PlainWeight], Section, str, bool], dict[str, Weight]]] = MappingProxyType(
    {"fp8": _float8, "mxfp4": _float4}
)
