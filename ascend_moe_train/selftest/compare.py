"""How far results are from what they should be. Pure."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def relative_error(found: NDArray[Any] | float, expected: NDArray[Any] | float) -> float:
    """Largest absolute difference over the largest absolute expected value; infinite if the shapes differ."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape:
        return float("inf")
    scale = float(np.abs(expected).max(initial=0.0))
    worst = float(np.abs(found - expected).max(initial=0.0))
    return worst / scale if scale > 0.0 else worst
