"""AdamW (Loshchilov & Hutter, 2019) and clipping by the global norm."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ascend_moe_train.optim.config import OptimConfig
from tests.oracle.arrays import F64, in_float64


@dataclass(frozen=True, kw_only=True)
class Moments:
    """One tensor's running means of the gradient and of its square; zeros before the first step."""

    first: F64
    second: F64


@in_float64
def adamw(
    weight: F64, grad: F64, moments: Moments, update: int, lr: float, optim: OptimConfig, decay: bool
) -> tuple[F64, Moments]:
    """Return the weight and moments after update number `update` (from 1, skipped steps not counted).

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; with m^ = m / (1 - b1^t), v^ = v / (1 - b2^t):
    w = w - lr (m^ / (sqrt(v^) + eps) + weight_decay w), where `decay` is false for norms and biases.
    """
    first = optim.beta1 * moments.first + (1.0 - optim.beta1) * grad
    second = optim.beta2 * moments.second + (1.0 - optim.beta2) * grad**2
    direction = first / (1.0 - optim.beta1**update)
    direction = direction / (np.sqrt(second / (1.0 - optim.beta2**update)) + optim.eps)
    shrink = optim.weight_decay * weight if decay else 0.0
    return weight - lr * (direction + shrink), Moments(first=first, second=second)


@in_float64
def clip_by_global_norm(grads: Mapping[str, F64], clip_norm: float | None) -> tuple[dict[str, F64], float]:
    """Return (grads * min(1, clip_norm / (norm + 1e-6)), norm before); the 1e-6 is torch's. None clips nothing."""
    norm = float(np.sqrt(sum((grad**2).sum() for grad in grads.values())))
    scale = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
    return {name: grad * scale for name, grad in grads.items()}, norm
