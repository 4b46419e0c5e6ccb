"""Gradients that are summed over ranks while the backward pass goes on: their buckets.

Gradients are copied into their buckets as they come, full buckets handed to the thread of `queued.QueuedComm`, and
after the backward pass the sums are waited for. `meeting` says when in a graph.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.parallel.buckets import Bucket, Share
from ascend_moe_train.parallel.callback import host_operator
from ascend_moe_train.parallel.comm import Array, CommError, Operator, Tensor, Wire
from ascend_moe_train.parallel.contents import gradients_in
from ascend_moe_train.parallel.flat import Apart
from ascend_moe_train.parallel.queued import QueuedComm
from ascend_moe_train.parallel.watched import named_errors


class EarlyBucket:
    """Gradients side by side, as (n, parts) like those of `reduction`, on their way. n is 1 for whole ones."""

    def __init__(self, bucket: Bucket, shares: Sequence[Share], comm: QueuedComm, wire: Wire | None) -> None:
        first = shares[bucket[0]]
        self._comm, self._group, self._wire = comm, first.group.carrying(gradients_in(wire)), wire
        self._is_whole = first.form == "whole"
        sizes = [prod(shares[i].updated_shape) for i in bucket]
        self.size = sum(sizes)
        self._packed = np.zeros((1 if self._is_whole else first.group.size, self.size), np.float32)
        self._result = np.empty(self.size, np.float32)
        stops = np.cumsum(sizes).tolist()
        self._columns = [self._packed[:, stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
        self._missing = set(range(len(bucket)))
        self._wait: Any = None

    def put(self, number: int, grad: Array) -> None:
        """Copies the gradient of one of its tensors."""
        columns, flat = self._columns[number], grad.reshape(-1)
        rows, rest = divmod(flat.size, columns.shape[1])
        columns[:rows] = flat[: flat.size - rest].reshape(rows, -1)
        if rest:
            columns[rows, :rest] = flat[flat.size - rest :]
        self._missing.discard(number)

    @property
    def is_full(self) -> bool:
        """Whether all gradients are there, and not yet on their way."""
        return not self._missing and self._wait is None

    def begin(self) -> None:
        """Sends them on their way."""
        verb = "all_reduce" if self._is_whole else "reduce_scatter"

        def call() -> None:
            with named_errors(verb, self._group, self._comm.rank):
                flat = self._packed.reshape(-1)
                if self._is_whole:
                    self._comm.inner.all_reduce(self._group, flat, "sum", self._wire, self._result)
                else:
                    self._comm.inner.reduce_scatter(self._group, flat, self._wire, self._result)

        self._wait = self._comm.begin(verb, self._group, call)

    def finish(self, out: Array) -> None:
        """Waits for the sums, and writes them. Raises CommError if they were not on their way."""
        if self._wait is None:
            raise CommError(f"rank {self._comm.rank}: {len(self._missing)} gradients of a bucket did not come")
        self._wait()
        out[...] = self._result
        self._missing, self._wait = set(range(len(self._columns))), None


class EarlySums:
    """The buckets of a rank, by their places among the trained tensors, and what graphs do with them."""

    def __init__(self, buckets: Sequence[Bucket], shares: Sequence[Share], comm: QueuedComm, wire: Wire | None) -> None:
        self._buckets = {bucket: EarlyBucket(bucket, shares, comm, wire) for bucket in buckets}
        self._at = {shares[i].name: (bucket, k) for bucket in buckets for k, i in enumerate(bucket)}
        self.names = frozenset(self._at)

    def begin_full(self) -> None:
        """Sends all full buckets on their way, in their order."""
        for bucket in self._buckets.values():
            if bucket.is_full:
                bucket.begin()

    def put(self, name: str, grad: Array) -> None:
        """Copies a gradient into its bucket."""
        bucket, number = self._at[name]
        self._buckets[bucket].put(number, grad)

    def finish(self, bucket: Bucket, out: Array) -> None:
        """Waits for a bucket's sums and writes them; sends what is full and not yet on its way. Raises CommError if
        gradients of it did not come."""
        self.begin_full()
        self._buckets[bucket].finish(out)

    def putting(self, name: str) -> Operator:
        """op(gradient) -> a token, once it is in its bucket."""

        def put(grad: Array, out: Array) -> None:
            self.put(name, grad)
            out[...] = 0

        return host_operator(put, lambda grad: [1], ms.float32)

    def beginning(self) -> Operator:
        """op(x) -> a token, once `begin_full` was called."""

        def begin(x: Array, out: Array) -> None:
            self.begin_full()
            out[...] = 0

        return host_operator(begin, lambda x: [1], ms.float32)

    def finishing(self, bucket: Bucket) -> Operator:
        """op(token) -> the sums of a bucket, flat."""
        size = self._buckets[bucket].size
        return host_operator(lambda token, out: self.finish(bucket, out), lambda token: [size], ms.float32)


class AwaitedBucket(nn.Cell):
    """Like `reduction._ReduceBucket`: (gradients of P tensors, after) -> of those in the bucket the sums."""

    def __init__(self, bucket: Bucket, shares: Sequence[Share], early: EarlySums) -> None:
        super().__init__()
        self.finish, self.apart = early.finishing(bucket), Apart([shares[i].updated_shape for i in bucket])
        self.one = ms.Tensor(np.ones(1, np.float32))

    def construct(self, grads: tuple[Tensor, ...], after: Any) -> tuple[Tensor, ...]:
        return self.apart(self.finish(ops.depend(self.one, after)))
