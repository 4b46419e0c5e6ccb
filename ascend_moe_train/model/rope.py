"""Rotary position embedding: tables made once, rows gathered by position. Shape letters: see kernels/protocol.py."""

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.model.config import RopeConfig


def rope_tables(
    rope: RopeConfig, head_size: int, num_positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of position * theta^(-2i/Z): two (num_positions, Z/2) fp32 arrays (Su et al., 2021, section 3.4.2).

    Linear scaling divides positions by `factor` (Chen et al., 2023). Angles are computed in fp64: in fp32 they lose
    digits at long positions.
    """
    frequency = rope.theta ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    position = np.arange(num_positions, dtype=np.float64) / (rope.factor if rope.scaling == "linear" else 1.0)
    angle = np.outer(position, frequency)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
