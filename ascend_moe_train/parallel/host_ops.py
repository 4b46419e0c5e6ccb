"""Collectives of host arrays as operators of a compiled graph, for CPUs."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops

from ascend_moe_train.parallel.callback import Shape, host_operator
from ascend_moe_train.parallel.comm import Array, Comm, CommError, Group, How, Operator, Partition, Tensor, Wire, into
from ascend_moe_train.parallel.watched import named_errors


class HostOps:
    """`comm.Collectives` above a `comm.Comm`. What fails inside a graph comes out of `callback.named_failures` as a
    `watched.CollectiveError`. bf16 tensors are refused with CommError when the graph is compiled: cast to fp32."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._zero = ms.Tensor(np.zeros(1, np.float32))

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world(self) -> Group:
        return self.comm.world

    def split(self, name: str, partition: Partition) -> Group:
        return self.comm.split(name, partition)

    def all_reduce(self, group: Group, how: How = "sum", wire: Wire | None = None) -> Operator:
        def run(x: Array, out: Array) -> Array:
            return self.comm.all_reduce(group, x, how, wire, out)

        return _identity if group.size == 1 else _any_shape(self._operator("all_reduce", group, run, lambda x: x))

    def all_gather(self, group: Group) -> Operator:
        def run(x: Array, out: Array) -> Array:
            return self.comm.all_gather(group, x, out)

        return self._by_rows("all_gather", group, run, grow=group.size)

    def reduce_scatter(self, group: Group, wire: Wire | None = None) -> Operator:
        def run(x: Array, out: Array) -> Array:
            return self.comm.reduce_scatter(group, x, wire, out)

        return self._by_rows("reduce_scatter", group, run, shrink=group.size)

    def all_to_all(self, group: Group) -> Operator:
        def run(x: Array, out: Array) -> Array:
            return self.comm.all_to_all(group, x, out)

        return self._by_rows("all_to_all", group, run)

    def all_to_all_v(self, group: Group, rows: int) -> Operator:
        room = max(rows, 1)

        def run(x: Array, send_n: Array, recv_n: Array, out: Array) -> Array:
            return self.comm.all_to_all_v(group, x, send_n, recv_n, room, out)

        call = self._operator("all_to_all_v", group, run, lambda x, send_n, recv_n: [room, *x[1:]], num_inputs=3)

        def op(x: Tensor, send_n: Tensor, recv_n: Tensor) -> Tensor:
            filled = _empty(x, 1) if x.shape[0] == 0 else x
            result = call(filled, send_n, recv_n)
            return _empty(result, 0) if rows == 0 else result

        return op

    def broadcast(self, group: Group, root: int) -> Operator:
        def run(x: Array, out: Array) -> Array:
            return self.comm.broadcast(group, x, root, out)

        return _identity if group.size == 1 else _any_shape(self._operator("broadcast", group, run, lambda x: x))

    def send(self, group: Group, peer: int) -> Operator:
        def run(x: Array, out: Array) -> Array:
            self.comm.send(group, x, peer)
            return into(out, np.zeros(1, np.float32))

        call = self._operator("send", group, run, lambda x: [1], ms.float32)

        def op(x: Tensor) -> Tensor:
            return call(x.reshape((1,)) if x.ndim == 0 else x)

        return op

    def recv(self, group: Group, peer: int, shape: tuple[int, ...], dtype: Any) -> Operator:
        def run(token: Array, out: Array) -> Array:
            return self.comm.recv(group, out.shape, out.dtype, peer, out)

        call = self._operator("recv", group, run, lambda token: list(shape), dtype)
        zero = self._zero

        def op(token: Tensor) -> Tensor:
            return call(ops.depend(zero, token))

        return op

    def barrier(self, group: Group) -> Operator:
        def run(token: Array, out: Array) -> Array:
            self.comm.barrier(group)
            return into(out, token)

        call = self._operator("barrier", group, run, lambda token: token)
        zero = self._zero

        def op(token: Tensor) -> Tensor:
            return ops.depend(token, call(ops.depend(zero, token)))

        return _identity if group.size == 1 else op

    def _by_rows(self, verb: str, group: Group, run: Callable[..., Array], grow: int = 1, shrink: int = 1) -> Operator:
        """For verbs that cut or join dim 0. Without elements there is nothing to move, on any rank."""
        call = self._operator(verb, group, run, lambda x: [x[0] * grow // shrink, *x[1:]])

        def op(x: Tensor) -> Tensor:
            return _empty(x, x.shape[0] * grow // shrink) if 0 in x.shape else call(x)

        return _identity if group.size == 1 else op

    def _operator(
        self,
        verb: str,
        group: Group,
        run: Callable[..., Array],
        shape: Callable[..., Shape],
        dtype: Any = None,
        num_inputs: int = 1,
    ) -> Operator:
        def call(*arrays: Array) -> None:
            with named_errors(verb, group, self.rank):
                if run(*arrays) is not arrays[-1]:
                    raise CommError(f"{type(self.comm).__name__} did not write where it was told to")

        return host_operator(call, shape, dtype, num_inputs)


def _empty(x: Tensor, rows: int) -> Tensor:
    """Zeros like rows of x, which still come after x: a constant would let what follows run before what led to x."""
    return ops.depend(ops.zeros((rows, *x.shape[1:]), x.dtype), x)


def _identity(x: Tensor) -> Tensor:
    return x


def _any_shape(call: Operator) -> Operator:
    def op(x: Tensor) -> Tensor:
        if 0 in x.shape:
            return x
        return call(x.reshape((1,))).reshape(()) if x.ndim == 0 else call(x)

    return op
