"""Collectives of host arrays as operators of a compiled graph, for CPUs.

Each is a Python function that MindSpore calls from inside the graph. What is known of such functions (MindSpore 2.10):
they get a copy of each input, the result is copied too; a result of another shape than was promised is taken silently,
hence the check; neither 0-dim tensors nor bf16 nor tensors without elements can cross.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops

from ascend_moe_train.parallel.comm import Array, Comm, CommError, Group, How, Operator, Partition, Tensor, Wire
from ascend_moe_train.parallel.watched import named_errors

Shape = list[int]


class HostOps:
    """`comm.Collectives` above a `comm.Comm`. A failure inside a graph raises `watched.CollectiveError`; MindSpore
    runs no graph in that process afterwards. bf16 tensors are refused when the graph is compiled: cast to fp32."""

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
        def run(x: Array) -> Array:
            return self.comm.all_reduce(group, x, how, wire)

        return _identity if group.size == 1 else _any_shape(self._operator("all_reduce", group, run, lambda x: x))

    def all_gather(self, group: Group) -> Operator:
        def run(x: Array) -> Array:
            return self.comm.all_gather(group, x)

        return self._by_rows("all_gather", group, run, grow=group.size)

    def reduce_scatter(self, group: Group, wire: Wire | None = None) -> Operator:
        def run(x: Array) -> Array:
            return self.comm.reduce_scatter(group, x, wire)

        return self._by_rows("reduce_scatter", group, run, shrink=group.size)

    def all_to_all(self, group: Group) -> Operator:
        def run(x: Array) -> Array:
            return self.comm.all_to_all(group, x)

        return self._by_rows("all_to_all", group, run)

    def all_to_all_v(self, group: Group, rows: int) -> Operator:
        room = max(rows, 1)

        def run(x: Array, send_n: Array, recv_n: Array) -> Array:
            return self.comm.all_to_all_v(group, x, send_n, recv_n, room)

        call = self._operator("all_to_all_v", group, run, lambda x, send_n, recv_n: [room, *x[1:]])

        def op(x: Tensor, send_n: Tensor, recv_n: Tensor) -> Tensor:
            filled = _empty(x, 1) if x.shape[0] == 0 else x
            result = call(filled, send_n, recv_n)
            return _empty(result, 0) if rows == 0 else result

        return op

    def broadcast(self, group: Group, root: int) -> Operator:
        def run(x: Array) -> Array:
            return self.comm.broadcast(group, x, root)

        return _identity if group.size == 1 else _any_shape(self._operator("broadcast", group, run, lambda x: x))

    def send(self, group: Group, peer: int) -> Operator:
        def run(x: Array) -> Array:
            self.comm.send(group, x, peer)
            return np.zeros(1, np.float32)

        call = self._operator("send", group, run, lambda x: [1], ms.float32)

        def op(x: Tensor) -> Tensor:
            return call(x.reshape((1,)) if x.ndim == 0 else x)

        return op

    def recv(self, group: Group, peer: int, shape: tuple[int, ...], dtype: Any) -> Operator:
        host_dtype = _host_dtype(dtype)

        def run(token: Array) -> Array:
            return self.comm.recv(group, shape, host_dtype, peer)

        call = self._operator("recv", group, run, lambda token: list(shape), dtype)
        zero = self._zero

        def op(token: Tensor) -> Tensor:
            return call(ops.depend(zero, token))

        return op

    def barrier(self, group: Group) -> Operator:
        def run(token: Array) -> Array:
            self.comm.barrier(group)
            return token

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
    ) -> Operator:
        """`run` as an operator. `shape` maps the shapes of the inputs to that of the result."""
        rank = self.rank
        host_dtype = None if dtype is None else _host_dtype(dtype)

        def dtypes(x: Any, *others: Any) -> Any:
            if ms.bfloat16 in (x.element_type(), dtype):
                raise CommError(f"{verb} in {group.name!r}: bf16 does not leave a CPU's graph, cast to fp32")
            return x if dtype is None else dtype

        @wraps(run)  # MindSpore counts the parameters
        def call(*arrays: Array) -> Array:
            with named_errors(verb, group, rank):
                result = np.ascontiguousarray(run(*arrays))
                expected = tuple(shape(*(list(each.shape) for each in arrays)))
                expected_dtype = host_dtype or arrays[0].dtype
                if result.shape != expected or result.dtype != expected_dtype:
                    raise CommError(f"{result.dtype}{list(result.shape)} instead of {expected_dtype}{list(expected)}")
            return result

        operator: Operator = ops.Custom(call, shape, dtypes, "pyfunc")
        return operator


def _host_dtype(dtype: Any) -> np.dtype[Any]:
    return np.dtype(ms.Tensor(np.zeros(1), dtype).asnumpy().dtype)


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
