"""Next-token cross entropy. V vocabulary; the leading axes are whatever the caller has."""

import numpy as np

from tests.oracle.arrays import F64, I64, in_float64, logsumexp, softmax

NOT_COUNTED = -1


@in_float64
def cross_entropy(logits_V: F64, targets: I64) -> float:
    """Mean of -log softmax(logits)[target] over targets other than -1; 0.0 when none counts."""
    counted = targets != NOT_COUNTED
    if not counted.any():
        return 0.0
    chosen = np.take_along_axis(logits_V, np.where(counted, targets, 0)[..., None], axis=-1)[..., 0]
    return float((logsumexp(logits_V) - chosen)[counted].mean())


@in_float64
def cross_entropy_vjp(logits_V: F64, targets: I64) -> F64:
    """Return d_logits for d_loss = 1: (softmax - one_hot) / number counted, zero where not counted."""
    counted = targets != NOT_COUNTED
    one_hot = np.eye(logits_V.shape[-1])[np.where(counted, targets, 0)]
    d_logits: F64 = (softmax(logits_V) - one_hot) * counted[..., None] / max(int(counted.sum()), 1)
    return d_logits
