"""Collectives of host arrays as operators of a compiled graph, for CPUs."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops

from ascend_moe_train.parallel.callback import Shape, host_operator
from ascend_moe_train.parallel.comm import Array, Comm, CommError, Group, How, Operator, Partition, Tensor, Wire, into
from ascend_moe_train.parallel.shaping import identity, of_any_rows, of_any_shape, zeros_after
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

        if group.size == 1:
            return identity
        return of_any_shape(self._operator("all_reduce", group, run, lambda x: x))

    def all_gather(self, group: Group) -> Operator:
        def run(x: Array, out: Array) -> Array:
            return self.comm.all_gather(group, x, out)

        if group.size == 1:
            return identity
        call = self._operator("all_gather", group, run, lambda x: [x[0] * group.size, *x[1:]])
        return of_any_rows(call, grow=group.size)

    def reduce_scatter(self, group: Group, wire: Wire | None = None) -> Operator:
        def run(x: Array, out: Array) -> Array:
            return self.comm.reduce_scatter(group, x, wire, out)

        if group.size == 1:
            return identity
        call = self._operator("reduce_scatter", group, run, lambda x: [x[0] // group.size, *x[1:]])
        return of_any_rows(call, shrink=group.size)

    def all_to_all(self, group: Group) -> Operator:
        def run(x: Array, out: Array) -> Array:
            return self.comm.all_to_all(group, x, out)

        return identity if group.size == 1 else of_any_rows(self._operator("all_to_all", group, run, lambda x: x))

    def all_to_all_v(self, group: Group, rows: int) -> Operator:
        room = max(rows, 1)

        def run(x: Array, send_n: Array, recv_n: Array, out: Array) -> Array:
            return self.comm.all_to_all_v(group, x, send_n, recv_n, room, out)

        call = self._operator("all_to_all_v", group, run, lambda x, send_n, recv_n: [room, *x[1:]], num_inputs=3)

        def op(x: Tensor, send_n: Tensor, recv_n: Tensor) -> Tensor:
            filled = zeros_after(x, 1) if x.shape[0] == 0 else x
            result = call(filled, send_n, recv_n)
            return zeros_after(result, 0) if rows == 0 else result

        return op

    def broadcast(self, group: Group, root: int) -> Operator:
        def run(x: Array, out: Array) -> Array:
            return self.comm.broadcast(group, x, root, out)

        if group.size == 1:
            return identity
        return of_any_shape(self._operator("broadcast", group, run, lambda x: x))

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

        if group.size == 1:
            return identity
        call = self._operator("barrier", group, run, lambda token: token)
        zero = self._zero

        def op(token: Tensor) -> Tensor:
            return ops.depend(token, call(ops.depend(zero, token)))

        return op

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
