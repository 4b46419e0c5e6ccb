"""Rows on their way while something else is computed: the exchange here ends only once that has been."""

import threading
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.parallel.autodiff import exchange_rows
from ascend_moe_train.parallel.beside import Beside
from ascend_moe_train.parallel.callback import host_operator
from ascend_moe_train.parallel.comm import Array, Group, LocalComm, RecordingComm
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.queued import QueuedComm

WORLD = LocalComm.world
ROWS, ROOM, HIDDEN = 5, 7, 3


class Patient(LocalComm):
    """An exchange ends when something else was done since it began."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def all_to_all_v(
        self, group: Group, x: Array, send_n: Array, recv_n: Array, rows: int, out: Array | None = None
    ) -> Array:
        assert self.done.wait(60), "nothing else was done meanwhile"
        self.done.clear()
        return super().all_to_all_v(group, x, send_n, recv_n, rows, out)


class _Marked(nn.Cell):
    """Twice u, forward and backward, which is told to the exchange."""

    def __init__(self, done: threading.Event) -> None:
        super().__init__()

        def twice(u: Array, out: Array) -> None:
            out[...] = 2 * u
            done.set()

        self.double = host_operator(twice, lambda u: u)

    def construct(self, u: Any) -> Any:
        return self.double(u)

    def bprop(self, u: Any, out: Any, dout: Any) -> tuple[Any]:
        return (self.double(dout),)


class _Around(nn.Cell):
    """There, something in between, and back; something else beside both."""

    def __init__(self, beside: Beside, other: Any) -> None:
        super().__init__()
        self.beside, self.other = beside, other

    def construct(self, x_ND: Any, size_AA: Any, u: Any) -> tuple[Any, Any]:
        y_RD, v = self.beside.there(x_ND, size_AA, u, self.other)
        z_ND, w = self.beside.back(y_RD * y_RD, size_AA, v, self.other)
        return z_ND, w


class _Plain(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        ranks = HostOps(LocalComm())
        self.there, self.back = exchange_rows(ranks, WORLD, ROOM, ROWS), exchange_rows(ranks, WORLD, ROWS, ROOM)

    def construct(self, x_ND: Any, size_AA: Any, u: Any) -> tuple[Any, Any]:
        y_RD = self.there(x_ND, size_AA[0], size_AA[0])
        return self.back(y_RD * y_RD, size_AA[0], size_AA[0]), 4 * u


class _Gradients(nn.Cell):
    def __init__(self, net: nn.Cell) -> None:
        super().__init__()
        self.net, self.gradient = net, ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, x_ND: Any, size_AA: Any, u: Any, dz_ND: Any, dw: Any) -> Any:
        found = self.gradient(self.net)(x_ND, size_AA, u, (dz_ND, dw))
        return found[0], found[2]


def test_something_else_is_computed_while_rows_travel_forward_and_backward() -> None:
    generator = np.random.default_rng(0)
    x_ND, u, dz_ND, dw = (
        ms.Tensor(generator.standard_normal(shape).astype(np.float32))
        for shape in ((ROWS, HIDDEN), (4,), (ROWS, HIDDEN), (4,))
    )
    size_AA = ms.Tensor(np.array([[4]], np.int32))
    patient = Patient()
    recording = RecordingComm(patient)
    beside = Beside(QueuedComm(recording), WORLD, ROWS, ROOM)
    around, plain = _Around(beside, _Marked(patient.done)), _Plain()
    found, expected = (
        [*net(x_ND, size_AA, u), *_Gradients(net)(x_ND, size_AA, u, dz_ND, dw)] for net in (around, plain)
    )
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.asnumpy(), other.asnumpy())
    assert [call.verb for call in recording.calls] == ["all_to_all_v"] * 6
    assert {call.payload_bytes for call in recording.calls} == {4 * HIDDEN * 4}
