"""What ranks tell each other between steps, as plain values. Every rank of the group makes the same call.

Pure. Values are JSON, so that nothing that comes from another process is run. Only verbs and dtypes are used that every
backend has for all ranks: `all_gather` and `broadcast` of int32.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.parallel.comm import Comm, Group


def exchange_json(comm: Comm, value: Any, group: Group | None = None) -> list[Any]:
    """Every rank's value, in the order of the group (default: all ranks). Any value that JSON has."""
    group = group or comm.world
    text = _numbers(value)
    length_n = comm.all_gather(group, np.array([text.size], np.int32))
    padded = np.zeros(int(length_n.max()), np.int32)
    padded[: text.size] = text
    rows = comm.all_gather(group, padded).reshape(group.size, padded.size)
    return [_value(row[:length]) for row, length in zip(rows, length_n, strict=True)]


def broadcast_json(comm: Comm, value: Any, root: int = 0, group: Group | None = None) -> Any:
    """The value of rank `root`, a place in the group (default: all ranks). The others' values are not looked at."""
    group = group or comm.world
    text = _numbers(value if group.index == root else None)
    length = comm.broadcast(group, np.array([text.size], np.int32), root)
    buffer = text if group.index == root else np.zeros(int(length[0]), np.int32)
    return _value(comm.broadcast(group, buffer, root))


def sum_int(comm: Comm, value: int, group: Group | None = None) -> int:
    """The sum over the ranks, in 64 bits."""
    return int(_gathered(comm, np.array([value], np.int64), group).sum())


def max_int(comm: Comm, value: int, group: Group | None = None) -> int:
    """The largest of the ranks, in 64 bits."""
    return int(_gathered(comm, np.array([value], np.int64), group).max())


def sum_floats(comm: Comm, values: Sequence[float], group: Group | None = None) -> list[float]:
    """The sum of each value over the ranks, in 64 bits, in the order of the group: the same on all of them."""
    return [float(each) for each in _gathered(comm, np.array(values, np.float64), group).sum(axis=0)]


def _gathered(comm: Comm, x_P: NDArray[Any], group: Group | None) -> NDArray[Any]:
    """Every rank's numbers of 64 bits, as halves: (n, P)."""
    return comm.all_gather(group or comm.world, x_P.view(np.int32)).view(x_P.dtype).reshape(-1, len(x_P))


def _numbers(value: Any) -> NDArray[np.int32]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8).astype(np.int32)


def _value(numbers: NDArray[Any]) -> Any:
    return json.loads(numbers.astype(np.uint8).tobytes())
