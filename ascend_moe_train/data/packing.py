"""Whole documents packed into windows of a fixed number of tokens, with little room left. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Window w holds the documents `documents[starts[w]:starts[w + 1]]`, in this order."""

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]

    @property
    def num_windows(self) -> int:
        """Windows in all."""
        return int(self.starts.size) - 1

    def window(self, number: int) -> NDArray[np.int64]:
        """The documents of one window."""
        return self.documents[self.starts[number] : self.starts[number + 1]]


def pack(lengths: NDArray[np.int64], capacity: int) -> Packing:
    """Packs documents of these lengths, none above `capacity`, into windows: best fit, longest first.

    A pure function of its arguments. Windows are found by the room left in them, of which there are `capacity` values:
    bit r of an integer says whether any window has room r, so a document costs one shift of it. Best fit decreasing
    needs at most 11/9 of the fewest windows possible, plus one (Johnson, 1974); for packing sequences of language
    models: Krell et al., 2021, arXiv 2107.02027.
    """
    windows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms = 0
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            window = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, window = capacity, len(windows)
            windows.append([])
        windows[window].append(document)
        left = room - length
        with_room.setdefault(left, []).append(window)
        rooms |= 1 << left
    sizes = np.asarray([0, *map(len, windows)], dtype=np.int64)
    documents = np.asarray([document for window in windows for document in window], dtype=np.int64)
    return Packing(documents=documents, starts=np.cumsum(sizes))
