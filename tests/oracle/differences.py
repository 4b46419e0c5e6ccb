"""Central differences: the judge of every hand-derived backward."""

from collections.abc import Callable

import numpy as np

from ascend_moe_train.selftest.compare import relative_error
from tests.oracle.arrays import F64

__all__ = ["numeric_slope", "numeric_vjp", "relative_error"]


def numeric_vjp(function: Callable[[F64], F64 | float], x: F64, d_y: F64 | float, step: float = 1e-5) -> F64:
    """Return d sum(function(x) * d_y) / dx, entry by entry: (f(x + h) - f(x - h)) / 2h, error O(h^2)."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        nudge = np.zeros_like(x)
        nudge[index] = step
        gradient[index] = np.sum((function(x + nudge) - function(x - nudge)) * d_y) / (2.0 * step)
    return gradient


def numeric_slope(function: Callable[[F64], float], x: F64, direction: F64, step: float = 1e-5) -> float:
    """Return the derivative of a scalar function at x along `direction`: for arrays too large to nudge by entry."""
    return (function(x + step * direction) - function(x - step * direction)) / (2.0 * step)
