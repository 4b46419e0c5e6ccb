"""What both directions of a conversion share: the result, the proof that a block kept its values, threads. Pure."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ascend_moe_train.checkpoint.safetensors_stream import Array
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.config import ModelConfig

Check = Callable[[Path], None]
"""Looks at a complete folder before it gets its name; raises when something is wrong with it."""

_MAX_WORKERS = 8
# What all threads together may hold of blocks that are rearranged, unless a single one is larger.
_BLOCKS_BYTES = 256 * 2**20
_COPIES = 2  # a block as it is read, and as it is written


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion did, all of it verified. `experts` is their number in a layer, 0 for a dense model."""

    out: Path
    model_type: str | None
    tensors_read: int
    tensors_written: int
    experts: int
    moe_layers: int
    bytes_read: int
    bytes_written: int
    files: int
    files_reused: int
    notes: tuple[str, ...]


def summary(
    out: Path,
    model: ModelConfig,
    model_type: str | None,
    *,
    read: Sequence[int],
    written: Sequence[int],
    files: tuple[int, int],
    notes: Iterable[str],
) -> Converted:
    """The result: sizes in bytes of the tensors read and written; files in all, and those that were there before."""
    return Converted(
        out=out,
        model_type=model_type,
        tensors_read=len(read),
        tensors_written=len(written),
        experts=model.moe.num_experts if model.moe is not None else 0,
        moe_layers=sum(model.is_moe(layer) for layer in range(model.num_layers)),
        bytes_read=sum(read),
        bytes_written=sum(written),
        files=files[0],
        files_reused=files[1],
        notes=tuple(notes),
    )


def check_lines(parts: Sequence[Array], views: Sequence[Array], wheres: Iterable[str]) -> None:
    """Compares what was rearranged with what it was, by the sums (modulo the item's width) of each row and column.

    Both sides are unsigned integers of the same shape; `wheres` are their files and names. Raises CheckpointError.
    """
    for part, view, where in zip(parts, views, wheres, strict=True):
        for axis in range(part.ndim):
            one = np.add.reduce(part, axis=axis, dtype=part.dtype)
            if not np.array_equal(one, np.add.reduce(view, axis=axis, dtype=part.dtype)):
                raise CheckpointError(f"{where}: sums along axis {axis} differ after it was rearranged")


def num_workers(largest_block_bytes: int) -> int:
    """How many threads there is memory and a core for."""
    fitting = _BLOCKS_BYTES // max(1, _COPIES * largest_block_bytes)
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0)), fitting))
