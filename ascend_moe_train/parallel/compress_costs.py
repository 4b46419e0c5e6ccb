"""What compressed gradients take in memory and traffic, as closed forms. Pure.

n ranks; L elements of a flat tensor; blocks of B elements with a scale of 4 bytes each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

BITS = {"int8": 8, "onebit_adam": 1}
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class TwoStageSizes:
    """Of a mean over `ranks` of `size` fp32 elements in blocks of `block`; see `compressed.TwoStage`."""

    size: int
    ranks: int
    block: int

    @property
    def part(self) -> int:
        """Elements that each rank puts together: whole blocks."""
        return -(-self.size // (self.ranks * self.block)) * self.block

    def sent_bytes(self, element_bits: int) -> dict[str, int]:
        """Payload of a rank by verb: all parts in an all_to_all, its own in an all_gather; codes and scales."""
        part_bytes = self.part // self.block * (self.block * element_bits // 8 + _FP32_BYTES)
        return {"all_to_all": self.ranks * part_bytes, "all_gather": part_bytes}

    @property
    def lost_bytes(self) -> int:
        """What a rank remembers of what was lost."""
        return _FP32_BYTES * (self.size + self.part)


def low_rank_bytes(shapes: Sequence[tuple[int, ...]], rank: int) -> tuple[int, int]:
    """(payload of the all_reduces, what is remembered) of a bucket under PowerSGD: of a matrix a x b the a r elements
    of one factor and the b r of the other travel; of anything else all."""
    sent = kept = 0
    for shape in shapes:
        if is_low_rank(shape, rank):
            rows, columns = shape[0], prod(shape[1:])
            sent += (rows + columns) * rank
            kept += rows * columns + columns * rank
        else:
            sent += prod(shape)
    return _FP32_BYTES * sent, _FP32_BYTES * kept


def is_low_rank(shape: tuple[int, ...], rank: int) -> bool:
    """Whether factors of so many columns are smaller than what they stand for."""
    if len(shape) != 2:
        return False
    return (shape[0] + shape[1]) * rank < shape[0] * shape[1]
