"""Rotary position embedding (Su et al., 2021), half-split: element i turns with element i + Z/2.

B batch, S sequence, H heads, Z head size, P = Z/2 rotated pairs.
"""

import numpy as np

from ascend_moe_train.model.config import RopeConfig
from tests.oracle.arrays import F64, I64, in_float64


def rope_angles(position_BS: I64, head_size: int, rope: RopeConfig) -> F64:
    """Return angle_BSP = position * theta^(-2p/Z) in radians; linear scaling divides the position by `factor` first."""
    pair_P = np.arange(head_size // 2, dtype=np.float64)
    frequency_P = rope.theta ** (-2.0 * pair_P / head_size)
    position = position_BS / rope.factor if rope.scaling == "linear" else position_BS.astype(np.float64)
    angle_BSP: F64 = position[..., None] * frequency_P
    return angle_BSP


@in_float64
def apply_rope(x_BSHZ: F64, angle_BSP: F64) -> F64:
    """Turn each pair (x_p, x_{p+Z/2}) by its angle, the same for all heads."""
    cos, sin = np.cos(angle_BSP)[:, :, None, :], np.sin(angle_BSP)[:, :, None, :]
    first, second = np.split(x_BSHZ, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@in_float64
def apply_rope_vjp(d_y_BSHZ: F64, angle_BSP: F64) -> F64:
    """The transpose of a rotation turns back: d_x is d_y turned by the opposite angle."""
    return apply_rope(d_y_BSHZ, -angle_BSP)
