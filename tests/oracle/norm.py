"""RMSNorm (Zhang & Sennrich, 2019). D: the normalised last axis."""

import numpy as np

from tests.oracle.arrays import F64, in_float64


@in_float64
def rms_norm(x: F64, weight_D: F64, eps: float) -> F64:
    """x (..., D) -> x / sqrt(mean(x^2) + eps) * weight."""
    return x * _inverse_rms(x, eps) * weight_D


@in_float64
def rms_norm_vjp(d_y: F64, x: F64, weight_D: F64, eps: float) -> tuple[F64, F64]:
    """Return (d_x, d_weight_D).

    With r = (mean(x^2) + eps)^(-1/2): dr/dx_i = -r^3 x_i / D, and y_j = x_j r w_j, so
    d_x_i = r w_i d_y_i - r^3 x_i mean_j(x_j w_j d_y_j).
    """
    r = _inverse_rms(x, eps)
    g = d_y * weight_D
    d_x = r * g - r**3 * x * (x * g).mean(axis=-1, keepdims=True)
    d_weight_D = (d_y * x * r).reshape(-1, x.shape[-1]).sum(axis=0)
    return d_x, d_weight_D


def _inverse_rms(x: F64, eps: float) -> F64:
    inverse: F64 = 1.0 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    return inverse
