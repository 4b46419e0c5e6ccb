"""Communication between ranks, on NumPy arrays: groups, the ten verbs, and what needs no second process.

Pure. Backends: `LocalComm` here (one rank), `mpi.MpiComm`. `host_ops.HostOps` and `native.NativeOps` make graph
operators of the same verbs (`Collectives`), and `autodiff` gives those their gradients.

N rows; n is the number of ranks of the group, and `send_n` has one number for each of them. "Payload" is what one rank
puts in, in bytes, whatever part of it stays where it is; every verb states its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.parallel.contents import Content

Array = NDArray[Any]
Tensor = Any
Operator = Callable[..., Tensor]
How = Literal["sum", "max"]
Wire = Literal["fp16", "bf16"]
Partition = Sequence[tuple[int, ...]]

VERBS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "broadcast",
    "send",
    "recv",
    "barrier",
    "split",
)
WIRE_DTYPES: dict[Wire, np.dtype[Any]] = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


class CommError(Exception):
    """A collective that cannot be done as called, or failed."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that act together, in the order of their parts, as this rank sees them. `content` is what calls on it
    carry, for those who count; to backends it makes no difference."""

    name: str
    ranks: tuple[int, ...]
    index: int
    """This rank's place in `ranks`."""
    content: Content = "other"

    def carrying(self, content: Content) -> Self:
        """The same ranks, for calls that carry that."""
        return replace(self, content=content)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


class Comm(Protocol):
    """The verbs on host arrays. Every rank of a group calls the same verbs on it, in the same order, with arrays of the
    same dtype and, unless said otherwise, of the same shape.

    Dtypes: fp64, fp32, fp16, bf16 (ml_dtypes), integers; bool for all but sums. fp16 and bf16 are summed in fp32 and
    the sum is rounded. Sums are made in the order of the ranks, so they are bit-identical on all ranks, in every run,
    and `all_reduce` equals `all_gather` of `reduce_scatter`. `wire` is for fp32: each contribution is rounded to that
    dtype and moved in it, and summed in fp32; the sum of `all_reduce` is rounded and moved in it too, so that all ranks
    get the same. In a group of one rank nothing is moved and nothing is rounded.

    `out`, if given, is a C-contiguous array of the result's shape and dtype that does not overlap the input; it is
    written and returned. Without it results are new arrays. Raises CommError.
    """

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def world(self) -> Group:
        """All ranks, in order."""

    def split(self, name: str, partition: Partition) -> Group:
        """This rank's part of a partition of all ranks. Every rank calls it with the same arguments. No payload."""

    def all_reduce(
        self, group: Group, x: Array, how: How = "sum", wire: Wire | None = None, out: Array | None = None
    ) -> Array:
        """The sum or maximum over the ranks, of any shape. Payload: x in the dtype that moves."""

    def all_gather(self, group: Group, x: Array, out: Array | None = None) -> Array:
        """All ranks' x one after the other: (N, ...) -> (n * N, ...). Payload: x."""

    def reduce_scatter(self, group: Group, x: Array, wire: Wire | None = None, out: Array | None = None) -> Array:
        """This rank's part of the sum: (n * N, ...) -> (N, ...). Payload: x in the dtype that moves."""

    def all_to_all(self, group: Group, x: Array, out: Array | None = None) -> Array:
        """Part i of x goes to rank i, part j of the result comes from rank j: (n * N, ...) -> (n * N, ...).

        Payload: x, with the part that a rank keeps."""

    def all_to_all_v(
        self, group: Group, x: Array, send_n: Array, recv_n: Array, rows: int, out: Array | None = None
    ) -> Array:
        """Uneven parts: the first send_n[0] rows of x go to rank 0 of the group, the next send_n[1] to rank 1 ...; the
        result is what comes from rank 0, then from rank 1 ..., then zeros: (N, ...) -> (rows, ...).

        N may differ between ranks. CommError if sum(send_n) > N or sum(recv_n) > rows.
        Payload: sum(send_n) rows, those for itself too."""

    def broadcast(self, group: Group, x: Array, root: int, out: Array | None = None) -> Array:
        """x of rank `root` (a place in the group); the others' x gives shape and dtype. Payload: x, on every rank."""

    def send(self, group: Group, x: Array, peer: int) -> None:
        """To rank `peer` (a place in the group), which must `recv`; in order among messages of the same group name.
        Does not wait for it, and x may be changed afterwards; but the process must not end before it is received (a
        barrier after the `recv` is enough). Payload: x."""

    def recv(self, group: Group, shape: tuple[int, ...], dtype: Any, peer: int, out: Array | None = None) -> Array:
        """What rank `peer` (a place in the group) sends. Payload: 0."""

    def barrier(self, group: Group) -> None:
        """Nobody leaves before all have come. Payload: 0."""


class Collectives(Protocol):
    """The verbs as graph operators. A factory is called once, outside of the graph; what it returns is called inside
    `construct`, with tensors. Operators have no gradient (see `autodiff`) and no order of their own: two calls that do
    not depend on each other may run in any order, and a call whose result is not used is removed. So `send` and
    `barrier` return a tensor to depend on. Semantics, dtypes and payloads are those of `Comm`; 0-dim tensors are
    allowed in `all_reduce`, `broadcast`, `send` and `barrier`.
    """

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def world(self) -> Group:
        """All ranks, in order."""

    @property
    def comm(self) -> Comm:
        """The same verbs on host arrays, for use between graphs."""

    def split(self, name: str, partition: Partition) -> Group:
        """As `Comm.split`."""

    def all_reduce(self, group: Group, how: How = "sum", wire: Wire | None = None) -> Operator:
        """op(x) -> the sum or maximum, of x's shape."""

    def all_gather(self, group: Group) -> Operator:
        """op(x): (N, ...) -> (n * N, ...)."""

    def reduce_scatter(self, group: Group, wire: Wire | None = None) -> Operator:
        """op(x): (n * N, ...) -> (N, ...)."""

    def all_to_all(self, group: Group) -> Operator:
        """op(x): (n * N, ...) -> (n * N, ...)."""

    def all_to_all_v(self, group: Group, rows: int) -> Operator:
        """op(x, send_n, recv_n): (N, ...), (n,), (n,) -> (rows, ...); the counts are int32."""

    def broadcast(self, group: Group, root: int) -> Operator:
        """op(x) -> x of `root`."""

    def send(self, group: Group, peer: int) -> Operator:
        """op(x) -> a zero of shape (1,), fp32."""

    def recv(self, group: Group, peer: int, shape: tuple[int, ...], dtype: Any) -> Operator:
        """op(token) -> what `peer` sends; the token, any tensor, says after what. `dtype` is MindSpore's."""

    def barrier(self, group: Group) -> Operator:
        """op(token) -> the token."""


def own_group(name: str, partition: Partition, rank: int, world_size: int) -> Group:
    """The part that holds `rank`. CommError unless every rank is in exactly one part."""
    if sorted(each for part in partition for each in part) != list(range(world_size)):
        raise CommError(f"split {name!r}: {list(partition)} does not hold each of ranks 0..{world_size - 1} once")
    ranks = next(part for part in partition if rank in part)
    return Group(name=name, ranks=tuple(ranks), index=ranks.index(rank))


def moved_dtype(dtype: Any, wire: Wire | None) -> np.dtype[Any]:
    """The dtype in which an array moves. CommError for a wire dtype on anything but fp32."""
    if wire is None:
        return np.dtype(dtype)
    if np.dtype(dtype) != np.float32:
        raise CommError(f"wire dtype {wire} is for float32, not {np.dtype(dtype)}")
    return WIRE_DTYPES[wire]


def part_rows(verb: str, group: Group, x: Array) -> int:
    """Rows of one of n equal parts of dim 0. CommError if they are not equal."""
    if x.ndim == 0 or x.shape[0] % group.size:
        raise CommError(f"{verb} in {group.name!r}: dim 0 of shape {x.shape} is not a multiple of {group.size} ranks")
    return int(x.shape[0]) // group.size


def check_counts(group: Group, x: Array, send_n: Array, recv_n: Array, rows: int) -> None:
    """CommError if the counts of `all_to_all_v` do not fit."""
    where = f"all_to_all_v in {group.name!r}"
    for name, counts, limit in (("send", send_n, x.shape[0] if x.ndim else 0), ("receive", recv_n, rows)):
        if counts.shape != (group.size,) or counts.min() < 0:
            raise CommError(f"{where}: {name} counts {counts.tolist()} are not {group.size} numbers from 0 on")
        if counts.sum() > limit:
            raise CommError(f"{where}: {name} counts {counts.tolist()} add up to {counts.sum()}, of {limit} rows")


def into(out: Array | None, value: Array) -> Array:
    """The value in `out`, or a copy."""
    if out is None:
        return np.array(value, order="C")
    out[...] = value
    return out


def payload_bytes(x: Array, wire: Wire | None = None) -> int:
    """Bytes of x in the dtype that moves."""
    return math.prod(x.shape) * moved_dtype(x.dtype, wire).itemsize


class LocalComm:
    """One rank. Point-to-point verbs have nobody to talk to."""

    rank = 0
    world = Group(name="world", ranks=(0,), index=0)

    def split(self, name: str, partition: Partition) -> Group:
        return own_group(name, partition, 0, 1)

    def all_reduce(
        self, group: Group, x: Array, how: How = "sum", wire: Wire | None = None, out: Array | None = None
    ) -> Array:
        moved_dtype(x.dtype, wire)
        return into(out, x)

    def all_gather(self, group: Group, x: Array, out: Array | None = None) -> Array:
        return into(out, x)

    def reduce_scatter(self, group: Group, x: Array, wire: Wire | None = None, out: Array | None = None) -> Array:
        moved_dtype(x.dtype, wire)
        return into(out, x)

    def all_to_all(self, group: Group, x: Array, out: Array | None = None) -> Array:
        return into(out, x)

    def all_to_all_v(
        self, group: Group, x: Array, send_n: Array, recv_n: Array, rows: int, out: Array | None = None
    ) -> Array:
        check_counts(group, x, send_n, recv_n, rows)
        if send_n[0] != recv_n[0]:
            raise CommError(f"all_to_all_v in {group.name!r}: {send_n[0]} rows sent, {recv_n[0]} expected")
        result = np.empty((rows, *x.shape[1:]), x.dtype) if out is None else out
        result[: send_n[0]] = x[: send_n[0]]
        result[send_n[0] :] = 0
        return result

    def broadcast(self, group: Group, x: Array, root: int, out: Array | None = None) -> Array:
        return into(out, x)

    def send(self, group: Group, x: Array, peer: int) -> None:
        raise CommError(f"send in {group.name!r}: a group of one rank has no peer {peer}")

    def recv(self, group: Group, shape: tuple[int, ...], dtype: Any, peer: int, out: Array | None = None) -> Array:
        raise CommError(f"recv in {group.name!r}: a group of one rank has no peer {peer}")

    def barrier(self, group: Group) -> None:
        pass


class ObservedComm:
    """A `Comm` around another one. Subclasses see every call in `_observe`, which makes it."""

    def __init__(self, inner: Comm) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def world(self) -> Group:
        return self.inner.world

    def _observe(self, verb: str, group: Group, payload: int, call: Callable[[], Any]) -> Any:
        raise NotImplementedError

    def split(self, name: str, partition: Partition) -> Group:
        group: Group = self._observe("split", self.world, 0, lambda: self.inner.split(name, partition))
        return group

    def all_reduce(
        self, group: Group, x: Array, how: How = "sum", wire: Wire | None = None, out: Array | None = None
    ) -> Array:
        return self._array("all_reduce", group, payload_bytes(x, wire), group, x, how, wire, out)

    def all_gather(self, group: Group, x: Array, out: Array | None = None) -> Array:
        return self._array("all_gather", group, payload_bytes(x), group, x, out)

    def reduce_scatter(self, group: Group, x: Array, wire: Wire | None = None, out: Array | None = None) -> Array:
        return self._array("reduce_scatter", group, payload_bytes(x, wire), group, x, wire, out)

    def all_to_all(self, group: Group, x: Array, out: Array | None = None) -> Array:
        return self._array("all_to_all", group, payload_bytes(x), group, x, out)

    def all_to_all_v(
        self, group: Group, x: Array, send_n: Array, recv_n: Array, rows: int, out: Array | None = None
    ) -> Array:
        payload = int(send_n.sum()) * payload_bytes(x[:1]) if x.size else 0
        return self._array("all_to_all_v", group, payload, group, x, send_n, recv_n, rows, out)

    def broadcast(self, group: Group, x: Array, root: int, out: Array | None = None) -> Array:
        return self._array("broadcast", group, payload_bytes(x), group, x, root, out)

    def send(self, group: Group, x: Array, peer: int) -> None:
        self._observe("send", group, payload_bytes(x), lambda: self.inner.send(group, x, peer))

    def recv(self, group: Group, shape: tuple[int, ...], dtype: Any, peer: int, out: Array | None = None) -> Array:
        return self._array("recv", group, 0, group, shape, dtype, peer, out)

    def barrier(self, group: Group) -> None:
        self._observe("barrier", group, 0, lambda: self.inner.barrier(group))

    def _array(self, verb: str, group: Group, payload: int, *arguments: Any) -> Array:
        result: Array = self._observe(verb, group, payload, lambda: getattr(self.inner, verb)(*arguments))
        return result


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective as recorded. `payload_bytes` is the verb's payload (see Comm), `number` counts from 0."""

    number: int
    verb: str
    group: str
    payload_bytes: int
    content: Content = "other"


class RecordingComm(ObservedComm):
    """Logs every call in `calls` before it is made. Empty the list to start anew; the numbers go on."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []
        self._number = 0

    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(verb, group name) -> (number of calls, payload in bytes), of what is in `calls`."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for call in self.calls:
            count, total_bytes = found.get((call.verb, call.group), (0, 0))
            found[call.verb, call.group] = count + 1, total_bytes + call.payload_bytes
        return found

    def _observe(self, verb: str, group: Group, payload: int, call: Callable[[], Any]) -> Any:
        call_of = Call(number=self._number, verb=verb, group=group.name, payload_bytes=payload, content=group.content)
        self.calls.append(call_of)
        self._number += 1
        return call()
