"""MindSpore's own collectives: HCCL on Ascend, MCCL on CPUs. The only file that names them.

Checked on CPUs: what MCCL of MindSpore 2.10 has, which is `all_reduce` (sum of fp32 and fp16), and in the group of all
ranks `all_gather` and `broadcast`. The other verbs raise CommError there, naming the verb; so do fp64 and int64, of
which it moves 32 bits without an error. For Ascend all verbs are written by the documentation of their operators, and
their graphs pass MindSpore's front end; they have not been run on a device.
"""

from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import communication, ops
from mindspore.ops import constexpr

from ascend_moe_train.model.kernels.constants import DTYPES
from ascend_moe_train.parallel.comm import (
    Array,
    Comm,
    CommError,
    Group,
    How,
    Operator,
    Partition,
    Tensor,
    Wire,
    into,
    own_group,
)
from ascend_moe_train.parallel.shaping import identity, of_any_rows, of_any_shape

# primitives: ops.concat and the like are graphs of their own, which MindSpore loses in a bprop
_stopped, _cast, _joined, _tile = ops.operations.StopGradient(), ops.Cast(), ops.Concat(), ops.Tile()
_sum, _filled = ops.ReduceSum(), ops.MaskedFill()


class Drawn(NamedTuple):
    """A rank of an Ascend cluster that is not here, whose graphs are drawn up and not run."""

    rank: int
    world_size: int


class NativeOps:
    """`comm.Collectives` over the processes that msrun started.

    Unlike in `comm.Comm`, sums are made by the library, in an order of its own, and with `wire` in that dtype. Ranks of
    a group ascend. Making one starts the library, unless it is for a `drawn` rank, whose operators can only be put into
    graphs: those that are made here take the size of their group from it, not from the library.
    """

    def __init__(self, drawn: Drawn | None = None) -> None:
        self._is_drawn = drawn is not None
        if drawn is None:
            communication.init()
            drawn = Drawn(communication.get_rank(), communication.get_group_size())
        self._is_cpu = not self._is_drawn and ms.get_context("device_target") == "CPU"
        self.rank: int = drawn.rank
        self.world = Group(name="world", ranks=tuple(range(drawn.world_size)), index=drawn.rank)
        self._names = {self.world.ranks: communication.GlobalComm.WORLD_COMM_GROUP}
        self.comm: Comm = EagerComm(self)
        self._zero, self._nothing = ms.Tensor(np.zeros(1, np.float32)), ms.Tensor(0.0, ms.float32)

    def split(self, name: str, partition: Partition) -> Group:
        group = own_group(name, partition, self.rank, self.world.size)
        if group.size > 1 and group.ranks not in self._names and not self._is_drawn:
            if list(group.ranks) != sorted(group.ranks):
                raise CommError(f"split {name!r}: ranks {list(group.ranks)} do not ascend")
            self._names[group.ranks] = f"{name}_{group.ranks[0]}"
            communication.create_group(self._names[group.ranks], list(group.ranks))
        return group

    def _name(self, group: Group) -> str:
        """The library's; where it is not here, ours."""
        return group.name if self._is_drawn else self._names[group.ranks]

    def all_reduce(self, group: Group, how: How = "sum", wire: Wire | None = None) -> Operator:
        if group.size == 1:
            return identity
        if self._is_cpu and (how != "sum" or wire == "bf16"):
            raise _lacking("all_reduce", group, f"for sums of fp32 and fp16, not {how} in {wire or 'fp32'}")
        return of_any_shape(_with_wire(self._made(ops.AllReduce(how, self._name(group)), group), wire))

    def all_gather(self, group: Group) -> Operator:
        self._needs("all_gather", group, in_world=True)
        if group.size == 1:
            return identity
        call, is_cpu = self._made(ops.AllGather(self._name(group)), group), self._is_cpu

        def op(x: Tensor) -> Tensor:
            return call(_of_32_bits(x, "all_gather") if is_cpu else x)

        return of_any_rows(op, grow=group.size)

    def reduce_scatter(self, group: Group, wire: Wire | None = None) -> Operator:
        self._needs("reduce_scatter", group)
        if group.size == 1:
            return identity
        call = _with_wire(self._made(ops.ReduceScatter("sum", self._name(group)), group), wire)
        return of_any_rows(call, shrink=group.size)

    def all_to_all(self, group: Group) -> Operator:
        self._needs("all_to_all", group)
        if group.size == 1:
            return identity
        return of_any_rows(self._made(ops.AlltoAll(group.size, 0, 0, self._name(group)), group))

    def all_to_all_v(self, group: Group, rows: int) -> Operator:
        self._needs("all_to_all_v", group)
        call = _all_of_one
        if group.size > 1:
            call = self._sized(ops.AlltoAllV(self._name(group)), group)
        row_R1, zero, nothing = ms.Tensor(np.arange(rows, dtype=np.int64)[:, None]), self._zero, self._nothing

        def op(x: Tensor, send_n: Tensor, recv_n: Tensor) -> Tensor:
            columns = x.size // x.shape[0]
            send_n, recv_n = _cast(send_n, ms.int64), _cast(recv_n, ms.int64)
            received = call(_stopped(x).reshape((-1,)), send_n * columns, recv_n * columns).reshape((-1,))
            # zeros by themselves would be a constant of that size in the graph
            room = _tile(_cast(ops.depend(zero, received), x.dtype), (rows * columns,))
            y_RD = _joined((received, room))[: rows * columns].reshape((rows, columns))
            # when nothing comes, the operator's result is one number without meaning
            is_empty_R1 = row_R1 >= _sum(recv_n)
            return _filled(y_RD, is_empty_R1, _cast(nothing, x.dtype)).reshape((rows, *x.shape[1:]))

        return op

    def broadcast(self, group: Group, root: int) -> Operator:
        self._needs("broadcast", group, in_world=True)
        if group.size == 1:
            return identity
        # the place in the group, as mindspore.communication.comm_func.broadcast gives it
        call, is_cpu = ops.Broadcast(root, self._name(group)), self._is_cpu

        def op(x: Tensor) -> Tensor:
            return call((_stopped(_of_32_bits(x, "broadcast") if is_cpu else x),))[0]

        return of_any_shape(op)

    def send(self, group: Group, peer: int) -> Operator:
        self._needs("send", group)
        call, zero = self._made(ops.Send(0, peer, self._name(group)), group), self._zero

        def op(x: Tensor) -> Tensor:
            return ops.depend(zero, call(x.reshape((1,)) if x.ndim == 0 else x))

        return op

    def recv(self, group: Group, peer: int, shape: tuple[int, ...], dtype: Any) -> Operator:
        self._needs("recv", group)
        return self._made(ops.Receive(0, peer, list(shape), dtype, self._name(group)), group)

    def barrier(self, group: Group) -> Operator:
        if group.size == 1:
            return identity
        # the library's barrier has no input, so that nothing would say after what it comes
        call, zero = self._made(ops.AllReduce("sum", self._name(group)), group), self._zero

        def op(token: Tensor) -> Tensor:
            return ops.depend(token, call(ops.depend(zero, token)))

        return op

    def _made(self, call: Any, group: Group) -> Operator:
        """MindSpore's operator without its own gradient, whose collectives would come in an order of their own."""
        call = self._sized(call, group)

        def op(x: Tensor) -> Tensor:
            return call(_stopped(x))

        return op

    def _sized(self, call: Any, group: Group) -> Any:
        """An operator that asked the library for the size of its group when it was made."""
        if self._is_drawn:
            call.rank_size = group.size
            call.add_prim_attr("rank_size", group.size)
        return call

    def _needs(self, verb: str, group: Group, in_world: bool = False) -> None:
        """CommError where MCCL has no such verb."""
        is_there = in_world and group.ranks == self.world.ranks
        if self._is_cpu and not is_there and group.size > 1:
            raise _lacking(verb, group, "only in the group of all ranks" if in_world else "not at all")


class EagerComm:
    """`comm.Comm` by operators outside of graphs, with what those of the collectives have."""

    def __init__(self, collectives: NativeOps) -> None:
        self._collectives = collectives

    @property
    def rank(self) -> int:
        return self._collectives.rank

    @property
    def world(self) -> Group:
        return self._collectives.world

    def split(self, name: str, partition: Partition) -> Group:
        return self._collectives.split(name, partition)

    def all_reduce(
        self, group: Group, x: Array, how: How = "sum", wire: Wire | None = None, out: Array | None = None
    ) -> Array:
        return _run(self._collectives.all_reduce(group, how, wire), out, x)

    def all_gather(self, group: Group, x: Array, out: Array | None = None) -> Array:
        return _run(self._collectives.all_gather(group), out, x)

    def reduce_scatter(self, group: Group, x: Array, wire: Wire | None = None, out: Array | None = None) -> Array:
        return _run(self._collectives.reduce_scatter(group, wire), out, x)

    def all_to_all(self, group: Group, x: Array, out: Array | None = None) -> Array:
        return _run(self._collectives.all_to_all(group), out, x)

    def all_to_all_v(
        self, group: Group, x: Array, send_n: Array, recv_n: Array, rows: int, out: Array | None = None
    ) -> Array:
        return _run(self._collectives.all_to_all_v(group, rows), out, x, send_n, recv_n)

    def broadcast(self, group: Group, x: Array, root: int, out: Array | None = None) -> Array:
        return _run(self._collectives.broadcast(group, root), out, x)

    def send(self, group: Group, x: Array, peer: int) -> None:
        _run(self._collectives.send(group, peer), None, x)

    def recv(self, group: Group, shape: tuple[int, ...], dtype: Any, peer: int, out: Array | None = None) -> Array:
        kind = ms.Tensor(np.zeros(1, dtype)).dtype
        return _run(self._collectives.recv(group, peer, shape, kind), out, np.zeros(1, np.float32))

    def barrier(self, group: Group) -> None:
        _run(self._collectives.barrier(group), None, np.zeros(1, np.float32))


def _run(operator: Operator, out: Array | None, *inputs: Array) -> Array:
    return into(out, operator(*map(ms.Tensor, inputs)).asnumpy())


def _with_wire(call: Operator, wire: Wire | None) -> Operator:
    if wire is None:
        return call
    dtype = DTYPES[wire]

    def op(x: Tensor) -> Tensor:
        return ops.cast(call(ops.cast(x, dtype)), ms.float32)

    return op


@constexpr
def _check_bits(dtype: Any, verb: str) -> None:
    if dtype in (ms.float64, ms.int64):
        raise CommError(f"{verb}: MindSpore's collectives on CPUs move 32 bits of {dtype}; MPI moves all")


def _of_32_bits(x: Tensor, verb: str) -> Tensor:
    _check_bits(x.dtype, verb)
    return x


def _all_of_one(x: Tensor, send: Tensor, receive: Tensor) -> Tensor:
    return x


def _lacking(verb: str, group: Group, what: str) -> CommError:
    return CommError(f"{verb} in {group.name!r}: MindSpore's collectives on CPUs have it {what}; MPI has all")
