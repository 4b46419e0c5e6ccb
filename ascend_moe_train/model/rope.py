"""Rotary position embedding: tables made once, rows gathered by position. Shape letters: see kernels/protocol.py."""

import math

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.model.config import RopeConfig


def rope_tables(
    rope: RopeConfig, rotary_size: int, num_positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of position * frequency: two (num_positions, rotary_size / 2) fp32 arrays.

    Angles are computed in fp64: in fp32 they lose digits at long positions.
    """
    angle = np.outer(np.arange(num_positions, dtype=np.float64), frequencies(rope, rotary_size))
    magnitude = _mscale(rope, rope.mscale) / _mscale(rope, rope.mscale_all_dim) if rope.scaling == "yarn" else 1.0
    return (magnitude * np.cos(angle)).astype(np.float32), (magnitude * np.sin(angle)).astype(np.float32)


def softmax_factor(rope: RopeConfig) -> float:
    """What the scale of attention scores is multiplied by."""
    return _mscale(rope, rope.mscale_all_dim) ** 2 if rope.scaling == "yarn" else 1.0


def frequencies(rope: RopeConfig, rotary_size: int) -> NDArray[np.float64]:
    """Radians per position of each pair, theta^(-2i/Z) before scaling (Su et al., 2021, section 3.4.2)."""
    plain = rope.theta ** (-np.arange(0, rotary_size, 2, dtype=np.float64) / rotary_size)
    if rope.scaling in ("llama3", "yarn") and rope.original_positions is not None:
        kept = (
            _kept_by_llama3(rope, plain, rope.original_positions)
            if rope.scaling == "llama3"
            else _kept_by_yarn(rope, rotary_size, rope.original_positions)
        )
        return kept * plain + (1.0 - kept) * plain / rope.factor
    return plain / rope.factor


def _kept_by_llama3(rope: RopeConfig, frequency: NDArray[np.float64], original_positions: int) -> NDArray[np.float64]:
    """Share of each frequency that is not divided, by how often it turns within the original positions."""
    turns = original_positions * frequency / (2 * math.pi)
    return np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)


def _kept_by_yarn(rope: RopeConfig, rotary_size: int, original_positions: int) -> NDArray[np.float64]:
    """The same by dimension (Peng et al., 2023, section 3.2)."""

    def dimension(turns: float) -> float:
        """The dimension whose frequency turns so often."""
        return rotary_size * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_size - 1)
    pair = np.arange(rotary_size // 2, dtype=np.float64)
    return 1.0 - np.clip((pair - low) / ((high - low) or 0.001), 0.0, 1.0)


def _mscale(rope: RopeConfig, weight: float) -> float:
    return 0.1 * weight * math.log(rope.factor) + 1.0
