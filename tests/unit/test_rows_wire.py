"""Rows of any magnitude in fewer bits, there and back, against the oracle; on one rank, which sends to itself.

Shape letters: see parallel/rows_wire.py.
"""

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from ascend_moe_train.parallel.autodiff import exchange_rows
from ascend_moe_train.parallel.comm import LocalComm, RecordingComm
from ascend_moe_train.parallel.config import ExpertWire
from ascend_moe_train.parallel.expert_sizes import row_bytes
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.rows_wire import rows_wire
from tests.oracle.wires import WIRES

N, D, SENT = 9, 16, 7
BITS: tuple[ExpertWire, ...] = ("fp16", "bf16", "int8")
# what fp16 alone could not hold, and what no scale helps
FACTORS = np.array([1.0, 1e6, 3e30, 1e-8, 1e-30, 1e-38, 0.0, 1.0, 1.0], np.float32)[:, None]


class _Both(nn.Cell):
    """(x, dy) -> (y, dx)."""

    def __init__(self, exchange: Any) -> None:
        super().__init__()
        self.exchange, self.count = exchange, ms.Tensor([SENT], ms.int32)
        self.gradient = ops.GradOperation(sens_param=True)

    def moved(self, x_ND: Any) -> Any:
        return self.exchange(x_ND, self.count, self.count)

    def construct(self, x_ND: Any, dy_ND: Any) -> Any:
        y_ND = self.moved(x_ND)
        return y_ND, self.gradient(self.moved)(ops.depend(x_ND, y_ND), dy_ND)


def rows(seed: int) -> Any:
    x_ND: Any = np.random.default_rng(seed).standard_normal((N, D)).astype(np.float32) * FACTORS
    return x_ND


@pytest.fixture(scope="module", params=BITS)
def wired(request: pytest.FixtureRequest) -> tuple[ExpertWire, _Both, RecordingComm]:
    ms.set_context(mode=ms.GRAPH_MODE)
    comm = RecordingComm(LocalComm())
    wire = rows_wire(request.param, on_host=True)
    return request.param, _Both(exchange_rows(HostOps(comm), comm.world, N, N, wire)), comm


def test_rows_of_any_magnitude(wired: tuple[ExpertWire, _Both, RecordingComm]) -> None:
    wire, both, comm = wired
    x_ND, dy_ND = rows(1), rows(2)
    comm.calls.clear()
    found = [each.asnumpy() for each in both(ms.Tensor(x_ND), ms.Tensor(dy_ND))]
    for given, got in zip((x_ND, dy_ND), found, strict=True):
        right_ND = WIRES[wire](given.astype(np.float64))
        top_N1 = np.abs(given).max(axis=1, keepdims=True)
        # next to the smallest numbers that fp32 has, a step may be none
        off_ND = np.abs(got - right_ND)[:SENT] / np.maximum(top_N1[:SENT], 1e-35)
        assert (off_ND[:5] < 1e-6).all() and (off_ND < 0.02).all()
        assert not got[SENT:].any()
        assert 1e-4 < (np.abs(got - given)[:5] / top_N1[:5]).max() < 0.005
    # forward, and for the gradient forward and backward
    assert sum(call.payload_bytes for call in comm.calls) == 3 * SENT * row_bytes(D, 4, wire)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(wired: tuple[ExpertWire, _Both, RecordingComm], broken: float) -> None:
    """So that the step is skipped, as the guard does it on all ranks; other rows are not touched."""
    _, both, _ = wired
    x_ND, dy_ND = rows(1), rows(2)
    whole = [each.asnumpy().copy() for each in both(ms.Tensor(x_ND), ms.Tensor(dy_ND))]
    x_ND[2, 3] = dy_ND[4, 5] = broken
    found = [each.asnumpy() for each in both(ms.Tensor(x_ND), ms.Tensor(dy_ND))]
    for before, after, row, column in zip(whole, found, (2, 4), (3, 5), strict=True):
        assert not np.isfinite(after[row, column])
        assert np.array_equal(np.delete(before, row, 0), np.delete(after, row, 0))


def test_bytes_of_a_row() -> None:
    assert [row_bytes(1024, 4, wire) for wire in (None, "bf16", "fp16", "int8")] == [4096, 2048, 2052, 1028]
