"""Which corpus the i-th sequence of a weighted blend comes from, for any i, without replaying those before it. Pure."""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.errors import DataError

MAX_PERIOD = 1 << 16


class Blend:
    """A periodic schedule: after any number i of sequences, corpus c was drawn i * w_c times, within one.

    Weights are normalised to shares w_c = n_c / P with a period P of at most 65536 sequences: exact when the weights
    as written allow it (0.7 and 0.3 give 7 and 3 of 10), else rounded to 1/65536. Raises DataError for a weight that
    rounds to nothing.

    Within the period the k-th draw of corpus c must fall into the slots floor(k / w_c) to ceil((k + 1) / w_c) - 1;
    serving the earliest deadline first meets them all. Source: Baruah et al., Proportionate Progress, Algorithmica 15
    (1996), for one processor.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = _shares(weights)
        self.period = sum(self.counts)
        corpora, draws = _schedule(self.counts)
        self._corpora: NDArray[np.int64] = np.asarray(corpora, dtype=np.int64)
        self._draws: NDArray[np.int64] = np.asarray(draws, dtype=np.int64)

    def locate(self, sequence: int) -> tuple[int, int]:
        """The corpus of a sequence of the blend, and the number of that draw within the corpus, both from 0."""
        period, slot = divmod(sequence, self.period)
        corpus = int(self._corpora[slot])
        return corpus, period * self.counts[corpus] + int(self._draws[slot])


def _shares(weights: Sequence[float]) -> list[int]:
    """Draws of each corpus in one period."""
    exact = [Fraction(repr(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    counts = [int(share * MAX_PERIOD) for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda corpus: counts[corpus] - shares[corpus] * MAX_PERIOD)
    for corpus in by_remainder[: MAX_PERIOD - sum(counts)]:
        counts[corpus] += 1
    for weight, count in zip(weights, counts, strict=True):
        if count == 0:
            raise DataError(f"data weight {weight} is less than 1/{MAX_PERIOD} of all: raise it or leave it out")
    divisor = gcd(*counts)
    return [count // divisor for count in counts]


def _schedule(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each slot of one period: the corpus drawn, and how many draws of it came before."""
    period = sum(counts)
    drawn = [0] * len(counts)
    corpora: list[int] = []
    draws: list[int] = []
    for slot in range(period):
        _, corpus = min(
            (-(-(drawn[corpus] + 1) * period // count), corpus)
            for corpus, count in enumerate(counts)
            if drawn[corpus] * period // count <= slot and drawn[corpus] < count
        )
        corpora.append(corpus)
        draws.append(drawn[corpus])
        drawn[corpus] += 1
    return corpora, draws
