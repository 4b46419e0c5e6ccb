"""Array types of the oracles, and the promise that they compute in float64 whatever they are given."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Flags = NDArray[np.bool_]

P = ParamSpec("P")
R = TypeVar("R")


def in_float64(function: Callable[P, R]) -> Callable[P, R]:
    """Widen every floating array among the arguments (and inside a mapping of arrays) to float64."""

    call = cast(Callable[..., R], function)

    @wraps(function)
    def widened(*args: P.args, **kwargs: P.kwargs) -> R:
        return call(*map(_widen, args), **{name: _widen(value) for name, value in kwargs.items()})

    return widened


def _widen(value: object) -> object:
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
        return value.astype(np.float64)
    if isinstance(value, Mapping):
        return {name: _widen(entry) for name, entry in value.items()}
    return value


@in_float64
def softmax(x: F64) -> F64:
    """Softmax over the last axis: exp(x) / sum exp(x), shifted by the maximum so that nothing overflows."""
    exponential = np.exp(x - x.max(axis=-1, keepdims=True))
    share: F64 = exponential / exponential.sum(axis=-1, keepdims=True)
    return share


@in_float64
def softmax_vjp(d_y: F64, y: F64) -> F64:
    """Gradient of `softmax` from its output y: y * (d_y - sum(d_y * y))."""
    d_x: F64 = y * (d_y - (d_y * y).sum(axis=-1, keepdims=True))
    return d_x


@in_float64
def logsumexp(x: F64) -> F64:
    """log(sum(exp(x))) over the last axis, which is dropped."""
    peak = x.max(axis=-1)
    total: F64 = peak + np.log(np.exp(x - peak[..., None]).sum(axis=-1))
    return total
