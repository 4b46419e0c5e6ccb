"""Central differences: the judge of every hand-derived backward."""

from collections.abc import Callable

import numpy as np

from tests.oracle.arrays import F64


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


def relative_error(found: F64 | float, expected: F64 | float) -> float:
    """Largest absolute difference over the largest absolute expected value; infinite if the shapes differ."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape:
        return float("inf")
    scale = float(np.abs(expected).max(initial=0.0))
    worst = float(np.abs(found - expected).max(initial=0.0))
    return worst / scale if scale > 0.0 else worst
