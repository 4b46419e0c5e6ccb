"""Collectives between processes through MPI. The only file that imports mpi4py.

Sums are not MPI's own: each rank adds up its part of the contributions in the order of the ranks, then the parts are
gathered. So the result does not depend on MPI's choice of algorithm, is the same on every rank and in every run, and
fp16 and bf16, which MPI does not know, cost nothing extra. It is also no slower (benchmarks/collectives.md).
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ascend_moe_train.parallel.comm import (
    Array,
    CommError,
    Group,
    How,
    Partition,
    Wire,
    check_counts,
    into,
    moved_dtype,
    own_group,
    part_rows,
)

# up to here one message with everything is faster than two steps
SMALL_BYTES = 4096
# sums are made in blocks, so that the scratch space stays small and in the cache
BLOCK_BYTES = 16 * 2**20
# MPI keeps a core busy while it waits for another rank, which may need that core, or compile for minutes
BUSY_S, FIRST_PAUSE_S, LAST_PAUSE_S = 2e-3, 50e-6, 2e-3
# from here on a message that finds the others there first costs little
LARGE_BYTES = 2**16


class MpiComm:
    """`comm.Comm` over the processes that mpiexec started. Importing this module starts MPI."""

    def __init__(self) -> None:
        world = MPI.COMM_WORLD
        self.rank: int = world.rank
        # one thread at a time, whichever it is
        self.takes_any_thread: bool = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
        self.world = Group(name="world", ranks=tuple(range(world.size)), index=world.rank)
        self._communicators = {(self.world.name, self.world.ranks): world}
        self._scratch = np.empty(0, np.uint8)
        self._under_way: list[tuple[Any, Array]] = []

    def split(self, name: str, partition: Partition) -> Group:
        group = own_group(name, partition, self.rank, self.world.size)
        # one for each name, also of the same ranks: their messages must not overtake each other's
        if group.size > 1 and (name, group.ranks) not in self._communicators:
            world = MPI.COMM_WORLD
            self._communicators[name, group.ranks] = world.Create_group(world.group.Incl(list(group.ranks)))
        return group

    def all_reduce(
        self, group: Group, x: Array, how: How = "sum", wire: Wire | None = None, out: Array | None = None
    ) -> Array:
        moved = moved_dtype(x.dtype, wire)
        if group.size == 1:
            return into(out, x)
        result = np.empty(x.shape, x.dtype) if out is None else out
        source, target = _flat(x), _flat(result)
        # equal parts, and what is left after them; MPI's gathering of unequal parts is many times slower
        whole = 0 if source.nbytes <= SMALL_BYTES else source.size - source.size % group.size
        block = _block(moved, group.size) * group.size
        for start in range(0, whole, block):
            part = slice(start, min(start + block, whole))
            self._reduce_block(group, _rounded(source[part], moved), how, target[part])
        if whole < source.size:
            self._reduce_small(group, _rounded(source[whole:], moved), how, target[whole:])
        return result

    def all_gather(self, group: Group, x: Array, out: Array | None = None) -> Array:
        if group.size == 1:
            return into(out, x)
        result = np.empty((group.size * x.shape[0], *x.shape[1:]), x.dtype) if out is None else out
        self._call(group, "allgather", x.nbytes, _bytes(x), _bytes(result))
        return result

    def reduce_scatter(self, group: Group, x: Array, wire: Wire | None = None, out: Array | None = None) -> Array:
        moved = moved_dtype(x.dtype, wire)
        rows = part_rows("reduce_scatter", group, x)
        if group.size == 1:
            return into(out, x)
        result = np.empty((rows, *x.shape[1:]), x.dtype) if out is None else out
        source, target = _flat(x), _flat(result)
        block = _block(moved, group.size)
        for start in range(0, target.size, block):
            part = target[start : start + block]
            starts = [index * target.size + start for index in range(group.size)]
            sent = source
            if moved != source.dtype:
                sent = np.concatenate([_rounded(source[each : each + part.size], moved) for each in starts])
                starts = [index * part.size for index in range(group.size)]
            _add(self._exchange(group, sent, starts, part.size), "sum", part)
        return result

    def all_to_all(self, group: Group, x: Array, out: Array | None = None) -> Array:
        part_rows("all_to_all", group, x)
        if group.size == 1:
            return into(out, x)
        result = np.empty(x.shape, x.dtype) if out is None else out
        self._call(group, "alltoall", x.nbytes, _bytes(x), _bytes(result))
        return result

    def all_to_all_v(
        self, group: Group, x: Array, send_n: Array, recv_n: Array, rows: int, out: Array | None = None
    ) -> Array:
        check_counts(group, x, send_n, recv_n, rows)
        result = np.empty((rows, *x.shape[1:]), x.dtype) if out is None else out
        row_bytes = x.dtype.itemsize * int(np.prod(x.shape[1:]))
        sent, received = (counts.astype(np.int64) * row_bytes for counts in (send_n, recv_n))
        messages = (
            [_bytes(x), (sent, np.cumsum(sent) - sent)],
            [_bytes(result), (received, np.cumsum(received) - received)],
        )
        if group.size == 1:
            MPI.COMM_SELF.Alltoallv(*messages)
        else:
            # ranks of a group take the same way, so it depends on what they all know
            self._call(group, "alltoallv", LARGE_BYTES, *messages)
        result[recv_n.sum() :] = 0
        return result

    def broadcast(self, group: Group, x: Array, root: int, out: Array | None = None) -> Array:
        result = into(out, x)
        if group.size > 1:
            self._call(group, "bcast", result.nbytes, _bytes(result), root)
        return result

    def send(self, group: Group, x: Array, peer: int) -> None:
        self._under_way = [each for each in self._under_way if not each[0].Test()]
        # the peer reads it when it comes to it, and x may be another tensor's memory by then
        kept = np.array(_bytes(x))
        self._under_way.append((self._of(group).Isend(kept, peer), kept))

    def recv(self, group: Group, shape: tuple[int, ...], dtype: Any, peer: int, out: Array | None = None) -> Array:
        result = np.empty(shape, dtype) if out is None else out
        _await(self._of(group).Irecv(_bytes(result), peer))
        return result

    def barrier(self, group: Group) -> None:
        if group.size > 1:
            _await(self._of(group).Ibarrier())

    def _call(self, group: Group, name: str, size_bytes: int, *messages: Any) -> None:
        """One of MPI's collectives; a rank that waits for long leaves its core to others. MPI's blocking ones are the
        faster for large messages. `size_bytes` is the same on all ranks."""
        communicator = self._of(group)
        if size_bytes < LARGE_BYTES:
            _await(getattr(communicator, f"I{name}")(*messages))
        else:
            _await(communicator.Ibarrier())
            getattr(communicator, name.capitalize())(*messages)

    def _of(self, group: Group) -> Any:
        if (group.name, group.ranks) not in self._communicators:
            raise CommError(f"group {group.name!r} of ranks {list(group.ranks)} was not made by split")
        return self._communicators[group.name, group.ranks]

    def _reduce_small(self, group: Group, sent: Array, how: How, target: Array) -> None:
        received = np.empty((group.size, sent.size), sent.dtype)
        self._call(group, "allgather", sent.nbytes, _bytes(sent), _bytes(received))
        _add(list(received), how, target, sent.dtype)

    def _reduce_block(self, group: Group, sent: Array, how: How, target: Array) -> None:
        count = sent.size // group.size
        parts = self._exchange(group, sent, range(0, sent.size, count), count)
        gathered = target if sent.dtype == target.dtype else np.empty(sent.size, sent.dtype)
        _add(parts, how, gathered[group.index * count :][:count])
        # the ranks have just met
        self._of(group).Allgather(MPI.IN_PLACE, _bytes(gathered))
        if gathered is not target:
            target[...] = gathered

    def _exchange(self, group: Group, sent: Array, starts: Sequence[int], count: int) -> list[Array]:
        """Every rank's elements for this rank, in the order of the ranks: `count` elements from `starts[i]` on go to
        rank i. The parts are valid until the next call."""
        part_bytes, mine = count * sent.dtype.itemsize, group.index
        if self._scratch.size < group.size * part_bytes:
            self._scratch = np.empty(group.size * part_bytes, np.uint8)
        received = self._scratch[: group.size * part_bytes]
        # what a rank has for itself stays where it is
        sizes = [0 if index == mine else part_bytes for index in range(group.size)]
        messages = (
            [_bytes(sent), (sizes, [start * sent.dtype.itemsize for start in starts])],
            [received, (sizes, [index * part_bytes for index in range(group.size)])],
        )
        self._call(group, "alltoallv", part_bytes * group.size, *messages)
        parts = list(received.view(sent.dtype).reshape(group.size, count))
        parts[mine] = sent[starts[mine] :][:count]
        return parts


def _await(request: Any) -> None:
    end_s, pause_s = time.perf_counter() + BUSY_S, FIRST_PAUSE_S
    while not request.Test():
        if time.perf_counter() < end_s:
            os.sched_yield()
        else:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)


def _block(dtype: np.dtype[Any], size: int) -> int:
    """Elements of one rank's part of a block."""
    return max(BLOCK_BYTES // dtype.itemsize // size, 1)


def _flat(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(-1)


def _bytes(x: Array) -> Array:
    return _flat(x).view(np.uint8)


def _rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    """x in the dtype that moves; beyond its range is infinity, which a loss scaler sees."""
    with np.errstate(over="ignore"):
        return x if x.dtype == dtype else x.astype(dtype)


def _add(parts: list[Array], how: How, target: Array, rounding: np.dtype[Any] | None = None) -> None:
    """The sum or maximum of at least two parts, in their order, rounded to `rounding` and to the target's dtype."""
    narrow = parts[0].dtype.itemsize == 2 and parts[0].dtype.kind in "fV"
    combine = np.add if how == "sum" else np.maximum
    if not narrow:
        combine(parts[0], parts[1], out=target)
        for part in parts[2:]:
            combine(target, part, out=target)
        return
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        combine(total, part.astype(np.float32), out=total)
    target[...] = _rounded(_rounded(total, rounding or target.dtype), target.dtype)
