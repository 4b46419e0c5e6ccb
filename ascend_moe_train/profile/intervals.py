"""Sets of time intervals as sorted arrays of starts and ends, in nanoseconds. Pure."""

from array import array

import numpy as np
import numpy.typing as npt

Stamps = npt.NDArray[np.int64]


class Intervals:
    """Disjoint intervals in order: `starts` and `ends` are int64 arrays of one length."""

    def __init__(self, starts: Stamps, ends: Stamps) -> None:
        self.starts, self.ends = starts, ends
        sizes = ends - starts
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])

    @classmethod
    def union(cls, starts: "array[int]", ends: "array[int]") -> "Intervals":
        """What any of the given intervals covers."""
        first = np.frombuffer(starts, np.int64)
        last = np.frombuffer(ends, np.int64)
        order = np.argsort(first, kind="stable")
        return cls.merged(first[order], last[order])

    @classmethod
    def merged(cls, first: Stamps, last: Stamps) -> "Intervals":
        """What any of the given intervals covers, which are in the order of their starts."""
        if not len(first):
            return cls(first, last)
        reach = np.maximum.accumulate(last)
        is_new = np.concatenate([[True], first[1:] > reach[:-1]])
        heads = np.flatnonzero(is_new)
        tails = np.concatenate([heads[1:] - 1, [len(first) - 1]])
        return cls(first[heads], reach[tails])

    @property
    def total_ns(self) -> int:
        """How long they are together."""
        return int(self._before[-1])

    def covered_ns(self, points: Stamps) -> Stamps:
        """How much of the time before each point is covered."""
        place = np.searchsorted(self.starts, points, side="right") - 1
        inside = np.clip(place, 0, None)
        if not len(self.starts):
            return np.zeros(len(points), np.int64)
        part = np.minimum(points, self.ends[inside]) - self.starts[inside]
        return np.where(place < 0, 0, self._before[inside] + part)

    def common_ns(self, starts: Stamps, ends: Stamps) -> Stamps:
        """How much of each of the given intervals is covered."""
        return self.covered_ns(ends) - self.covered_ns(starts)

    def common_with(self, other: "Intervals") -> int:
        """How long both are at once."""
        return int(self.common_ns(other.starts, other.ends).sum())
