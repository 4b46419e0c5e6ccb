"""What ranks tell each other between steps, as plain values. Every rank of the group makes the same call.

Pure. Values are JSON, so that nothing that comes from another process is run.
"""

import json
from typing import Any

import numpy as np

from ascend_moe_train.parallel.comm import Comm, Group


def exchange_json(comm: Comm, value: Any, group: Group | None = None) -> list[Any]:
    """Every rank's value, in the order of the group (default: all ranks). Any value that JSON has."""
    group = group or comm.world
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length_n = comm.all_gather(group, np.array([text.size], np.int64))
    padded = np.zeros(int(length_n.max()), np.uint8)
    padded[: text.size] = text
    rows = comm.all_gather(group, padded).reshape(group.size, padded.size)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, length_n, strict=True)]


def broadcast_json(comm: Comm, value: Any, root: int = 0, group: Group | None = None) -> Any:
    """The value of rank `root`, a place in the group (default: all ranks). The others' values are not looked at."""
    group = group or comm.world
    text = np.frombuffer(json.dumps(value if group.index == root else None).encode(), np.uint8)
    length = comm.broadcast(group, np.array([text.size], np.int64), root)
    buffer = text if group.index == root else np.zeros(int(length[0]), np.uint8)
    return json.loads(comm.broadcast(group, buffer, root).tobytes())


def sum_int(comm: Comm, value: int, group: Group | None = None) -> int:
    """The sum over the ranks, in 64 bits."""
    return int(comm.all_reduce(group or comm.world, np.array([value], np.int64))[0])


def any_true(comm: Comm, flag: bool, group: Group | None = None) -> bool:
    """Whether the flag is set on any rank."""
    return bool(comm.all_reduce(group or comm.world, np.array([flag], np.int32), "max")[0])
