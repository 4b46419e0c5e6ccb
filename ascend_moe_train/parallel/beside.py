"""Rows that travel between the ranks of an ep group while something else is computed.

Shape letters: see model/kernels/protocol.py; and A ranks of the group, N rows to send and R to receive.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import nn, ops

from ascend_moe_train.parallel.autodiff import InOrder
from ascend_moe_train.parallel.callback import host_operator
from ascend_moe_train.parallel.comm import Array, Group, Tensor
from ascend_moe_train.parallel.queued import QueuedComm
from ascend_moe_train.parallel.watched import named_errors

# the primitive: ops.zeros_like is a graph of its own, which MindSpore loses where a gradient is taken inside another
zeros_like = ops.ZerosLike()


class _Travel:
    """`all_to_all_v` as two operators, of which one exchange at a time is under way: begin(x, send_n, recv_n) -> ticket
    (1, ...), wait(ticket) -> (rows, ...)."""

    def __init__(self, comm: QueuedComm, group: Group, rows: int) -> None:
        self._comm, self._group, self._rows = comm, group, rows
        self._arrived: Callable[[], Array] | None = None
        self.begin = host_operator(self._begin, lambda x, send_n, recv_n: [1, *x[1:]], num_inputs=3)
        self.wait = host_operator(self._finish, lambda ticket: [rows, *ticket[1:]])

    def _begin(self, x: Array, send_n: Array, recv_n: Array, out: Array) -> None:
        if self._arrived is not None:  # for a graph that has no use for it
            self._arrived()
        # the graph may use their memory for something else
        sent, counts = np.array(x[: send_n.sum()]), (send_n.copy(), recv_n.copy())

        def call() -> Array:
            with named_errors("all_to_all_v", self._group, self._comm.rank):
                return self._comm.inner.all_to_all_v(self._group, sent, *counts, self._rows)

        self._arrived = self._comm.begin("all_to_all_v", self._group, call)
        out[...] = 0

    def _finish(self, ticket: Array, out: Array) -> None:
        assert self._arrived is not None  # it is what gives tickets
        out[...] = self._arrived()
        self._arrived = None


class _Begin(nn.Cell):
    """Begin, and in the backward pass wait."""

    def __init__(self, there: _Travel, back: _Travel) -> None:
        super().__init__()
        self.begin, self.wait = there.begin, back.wait

    def construct(self, x: Tensor, send_n: Tensor, recv_n: Tensor) -> Tensor:
        return self.begin(x, send_n, recv_n)

    def bprop(self, x: Tensor, send_n: Tensor, recv_n: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        return self.wait(dout), zeros_like(send_n), zeros_like(recv_n)


class _Wait(nn.Cell):
    """Wait, and in the backward pass begin."""

    def __init__(self, there: _Travel, back: _Travel) -> None:
        super().__init__()
        self.wait, self.begin = there.wait, back.begin

    def construct(self, ticket: Tensor, send_n: Tensor, recv_n: Tensor) -> Tensor:
        return self.wait(ticket)

    def bprop(self, ticket: Tensor, send_n: Tensor, recv_n: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        return self.begin(ops.depend(dout, out), recv_n, send_n), zeros_like(send_n), zeros_like(recv_n)


class Beside:
    """What `exchange.FlatExchange` does, bit for bit, with other(u) computed meanwhile; in the backward pass the
    gradient of that."""

    def __init__(self, comm: QueuedComm, group: Group, send_rows: int, receive_rows: int) -> None:
        self.index, self.in_order = group.index, InOrder()
        there = _Travel(comm, group, receive_rows), _Travel(comm, group, send_rows)
        back = _Travel(comm, group, send_rows), _Travel(comm, group, receive_rows)
        self.begin_there, self.wait_there = _Begin(*there), _Wait(*there)
        self.begin_back, self.wait_back = _Begin(*back), _Wait(*back)

    def there(self, x_ND: Tensor, size_AA: Tensor, u: Tensor, other: Any) -> tuple[Tensor, Tensor]:
        """-> rows in the order of their sources (R, D), and other(u)."""
        send_n, recv_n = size_AA[self.index], size_AA[:, self.index]
        ticket, u = self.in_order(self.begin_there(x_ND, send_n, recv_n), u)
        v, ticket = self.in_order(other(u), ticket)
        return self.wait_there(ticket, send_n, recv_n), v

    def back(self, y_RD: Tensor, size_AA: Tensor, u: Tensor, other: Any) -> tuple[Tensor, Tensor]:
        """-> each row where it was (N, D), and other(u)."""
        send_n, recv_n = size_AA[:, self.index], size_AA[self.index]
        ticket, u = self.in_order(self.begin_back(y_RD, send_n, recv_n), u)
        v, ticket = self.in_order(other(u), ticket)
        return self.wait_back(ticket, send_n, recv_n), v
