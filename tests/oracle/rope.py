"""Rotary position embedding (Su et al., 2021), half-split: element i turns with element i + P.

B batch, S sequence, H heads, Z head size, P rotated pairs, 2P <= Z.
"""

import math

import numpy as np

from ascend_moe_train.model.config import RopeConfig
from tests.oracle.arrays import F64, I64, in_float64


def rope_angles(position_BS: I64, rotary_size: int, rope: RopeConfig) -> F64:
    """Return angle_BSP = position * frequency in radians; linear scaling divides the position by `factor` first."""
    frequency_P = np.array([_frequency(pair, rotary_size, rope) for pair in range(rotary_size // 2)])
    position = position_BS / rope.factor if rope.scaling == "linear" else position_BS.astype(np.float64)
    angle_BSP: F64 = position[..., None] * frequency_P
    return angle_BSP


def _frequency(pair: int, rotary_size: int, rope: RopeConfig) -> float:
    """theta^(-2p/2P), or a blend of that and its `factor`-th part."""
    frequency = rope.theta ** (-2.0 * pair / rotary_size)
    if rope.scaling == "llama3":
        return _llama3(frequency, rope)
    if rope.scaling == "yarn":
        interpolated = _yarn_ramp(pair, rotary_size, rope)
        return frequency / rope.factor * interpolated + frequency * (1.0 - interpolated)
    return frequency


def _llama3(frequency: float, rope: RopeConfig) -> float:
    """By wavelength, as in Llama 3.1: short ones stay, long ones are stretched, those between are blended."""
    assert rope.original_positions is not None
    wavelength = 2.0 * math.pi / frequency
    if wavelength < rope.original_positions / rope.high_freq_factor:
        return frequency
    if wavelength > rope.original_positions / rope.low_freq_factor:
        return frequency / rope.factor
    smooth = rope.original_positions / wavelength - rope.low_freq_factor
    smooth /= rope.high_freq_factor - rope.low_freq_factor
    return (1.0 - smooth) * frequency / rope.factor + smooth * frequency


def _yarn_ramp(pair: int, rotary_size: int, rope: RopeConfig) -> float:
    """0 for dimensions that extrapolate, 1 for those that are interpolated (Peng et al., 2023, section 3.2)."""
    assert rope.original_positions is not None
    borders = [
        rotary_size * math.log(rope.original_positions / (turns * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    ]
    if rope.truncate:
        borders = [math.floor(borders[0]), math.ceil(borders[1])]
    low, high = max(borders[0], 0), min(borders[1], rotary_size - 1)
    return min(max((pair - low) / (high - low if high != low else 0.001), 0.0), 1.0)


def rope_magnitude(rope: RopeConfig) -> float:
    """What YaRN multiplies the turned elements by."""
    return _mscale(rope.mscale, rope) / _mscale(rope.mscale_all_dim, rope) if rope.scaling == "yarn" else 1.0


def score_factor(rope: RopeConfig) -> float:
    """What YaRN multiplies attention scores by."""
    return _mscale(rope.mscale_all_dim, rope) ** 2 if rope.scaling == "yarn" else 1.0


def _mscale(weight: float, rope: RopeConfig) -> float:
    return 0.1 * weight * math.log(rope.factor) + 1.0


@in_float64
def apply_rope(x_BSHZ: F64, angle_BSP: F64, magnitude: float = 1.0) -> F64:
    """Turn each pair (x_p, x_{p+P}) by its angle, the same for all heads; elements from 2P on stay."""
    cos, sin = (magnitude * turn(angle_BSP)[:, :, None, :] for turn in (np.cos, np.sin))
    pairs = angle_BSP.shape[-1]
    first, second, rest = np.split(x_BSHZ, [pairs, 2 * pairs], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


@in_float64
def apply_rope_vjp(d_y_BSHZ: F64, angle_BSP: F64, magnitude: float = 1.0) -> F64:
    """The transpose of a rotation turns back: d_x is d_y turned by the opposite angle."""
    return apply_rope(d_y_BSHZ, -angle_BSP, magnitude)
