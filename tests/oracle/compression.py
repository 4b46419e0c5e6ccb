"""Sums of gradients in few bits with error feedback: int8 blocks, signs, products of two thin matrices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracle.arrays import F64, in_float64

Coder = Callable[[F64], F64]


@in_float64
def int8_blocks(x_KB: F64) -> F64:
    """What is left of blocks that are sent as integers of -127 to 127 times a step: round(x / s) s, where s is the
    block's max |x| / 127; a block of zeros stays one."""
    step_K1 = np.abs(x_KB).max(axis=1, keepdims=True) / 127.0
    return np.round(x_KB / np.where(step_K1 > 0, step_K1, 1.0)) * step_K1


@in_float64
def sign_bits(x_KB: F64) -> F64:
    """What is left of blocks that are sent as signs times the mean magnitude of each; zero counts as positive."""
    return np.where(x_KB >= 0, 1.0, -1.0) * np.abs(x_KB).mean(axis=1, keepdims=True)


@dataclass(frozen=True, kw_only=True)
class Lost:
    """What codes have not said until now: of each worker (n, L), and of each rank's part (n, p)."""

    of_workers: F64
    of_parts: F64


@in_float64
def two_stage(x_nL: NDArray[Any], lost: Lost, block: int, coder: Coder) -> tuple[F64, Lost]:
    """Return the mean over n ranks that all of them get, and what is lost afterwards (Tang et al., 2021, algorithm 1).

    L elements are filled up with zeros to n parts of whole blocks. Each rank codes x plus what it lost; the mean of a
    part, plus what its rank lost, is coded once more, where elements beyond L are no part of anything.
    """
    n, length = x_nL.shape
    part = lost.of_parts.shape[1]
    sent_nL = x_nL + lost.of_workers
    filled = np.zeros((n, n * part))
    filled[:, :length] = sent_nL
    said = np.stack([coder(row.reshape(-1, block)).reshape(-1) for row in filled])
    is_counted = (np.arange(n * part) < length).reshape(n, part)
    parts_np = (said.mean(axis=0).reshape(n, part) + lost.of_parts) * is_counted
    mean_np = np.stack([coder(row.reshape(-1, block)).reshape(-1) for row in parts_np])
    of_parts = (parts_np - mean_np) * is_counted
    return mean_np.reshape(-1)[:length], Lost(of_workers=sent_nL - said[:, :length], of_parts=of_parts)


@in_float64
def low_rank(x_nAB: NDArray[Any], factor_Br: NDArray[Any], lost_nAB: F64) -> tuple[F64, F64, F64]:
    """Return the mean over n ranks as a product P Q^T, the new Q, and what each rank lost (Vogels et al., 2019,
    algorithms 1 and 2): P = orthonormal columns of the mean of (x + lost) Q, new Q = the mean of (x + lost)^T P."""
    given = x_nAB + lost_nAB
    p_Ar, r_rr = np.linalg.qr((given @ factor_Br).sum(axis=0))
    p_Ar = p_Ar * np.sign(np.diag(r_rr))
    q_Br = np.mean([each.T @ p_Ar for each in given], axis=0)
    mean_AB = p_Ar @ q_Br.T
    return mean_AB, q_Br, given - mean_AB


def run_two_stage(steps: Sequence[NDArray[Any]], block: int, coder: Coder) -> list[F64]:
    """The means of one step after the other, from nothing lost."""
    n, length = steps[0].shape
    part = -(-length // (n * block)) * block
    lost, found = Lost(of_workers=np.zeros((n, length)), of_parts=np.zeros((n, part))), []
    for x_nL in steps:
        mean_L, lost = two_stage(x_nL, lost, block, coder)
        found.append(mean_L)
    return found
