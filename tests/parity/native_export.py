"""Exports graphs of every verb of MindSpore's own operators as for a device, on a machine without one.

A program of its own: MS_SIMULATION_LEVEL=0 RANK_SIZE=4 RANK_ID=1 python -m tests.parity.native_export FOLDER. Only
types and shapes are checked, which is all that can be without a device.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mindspore as ms
import numpy as np
from mindspore import communication, nn, ops

from ascend_moe_train.model.kernels.portable import PortableKernels
from ascend_moe_train.parallel import autodiff
from ascend_moe_train.parallel.comm import Operator, Tensor
from ascend_moe_train.parallel.config import ExpertWire
from ascend_moe_train.parallel.context import context_kernels
from ascend_moe_train.parallel.native import NativeOps
from ascend_moe_train.parallel.rows_wire import rows_wire

N, D, ROWS = 8, 3, 5
WIRES: tuple[ExpertWire, ...] = ("fp16", "bf16", "int8")


class _Call(nn.Cell):
    """The operator's result has the shape that it is added to; with `has_gradient`, so has the gradient."""

    def __init__(self, operator: Operator, has_gradient: bool) -> None:
        super().__init__()
        self.operator, self.has_gradient = operator, has_gradient
        self.gradient = ops.GradOperation(sens_param=True)

    def construct(self, like: Tensor, *inputs: Tensor) -> Tensor:
        y = self.operator(*inputs) + like
        return (y, self.gradient(self.operator)(*inputs, y) + inputs[0]) if self.has_gradient else y


def calls(native: NativeOps) -> dict[str, tuple[Operator, tuple[int, ...], Any]]:
    """name -> (operator, shape of the result, dtype)."""
    world, n = native.world, native.world.size
    counts = ms.Tensor([1, 2, 0, 1], ms.int32)

    def rows(make: Callable[[], Operator]) -> Operator:
        call = make()

        def op(x: Tensor) -> Tensor:
            return call(x, counts, counts)

        return op

    found: dict[str, tuple[Operator, tuple[int, ...], Any]] = {}
    for dtype in (ms.float32, ms.bfloat16):
        found |= {
            f"all_reduce {dtype}": (native.all_reduce(world), (N, D), dtype),
            f"max {dtype}": (native.all_reduce(world, "max"), (N, D), dtype),
            f"all_gather {dtype}": (native.all_gather(world), (n * N, D), dtype),
            f"reduce_scatter {dtype}": (native.reduce_scatter(world), (N // n, D), dtype),
            f"all_to_all {dtype}": (native.all_to_all(world), (N, D), dtype),
            f"all_to_all_v {dtype}": (rows(lambda: native.all_to_all_v(world, ROWS)), (ROWS, D), dtype),
            f"broadcast {dtype}": (native.broadcast(world, 2), (N, D), dtype),
            f"barrier {dtype}": (native.barrier(world), (N, D), dtype),
        }
    return found | {
        "all_reduce bf16 wire": (native.all_reduce(world, "sum", "bf16"), (N, D), ms.float32),
        "reduce_scatter fp16 wire": (native.reduce_scatter(world, "fp16"), (N // n, D), ms.float32),
        "send": (native.send(world, 2), (1,), ms.float32),
        "recv": (native.recv(world, 0, (2, D), ms.float32), (2, D), ms.float32),
        "gradient gather_sum": (autodiff.gather_sum(native, world), (n * N, D), ms.float32),
        "gradient scatter_sum": (autodiff.scatter_sum(native, world), (N // n, D), ms.float32),
        "gradient exchange": (autodiff.exchange(native, world), (N, D), ms.float32),
        "gradient exchange_rows": (rows(lambda: autodiff.exchange_rows(native, world, ROWS, N)), (ROWS, D), ms.float32),
        **{
            f"gradient exchange_rows in {wire}": (rows(partial(in_wire, native, wire)), (ROWS, D), ms.float32)
            for wire in WIRES
        },
        "gradient of ring attention": (attention("ring", native), (N, D), ms.float32),
        "gradient of ulysses attention": (attention("ulysses", native), (N, D), ms.float32),
    }


def in_wire(native: NativeOps, wire: ExpertWire) -> Operator:
    """Rows in fewer bits."""
    return autodiff.exchange_rows(native, native.world, ROWS, N, rows_wire(wire, on_host=False))


def attention(form: Literal["ring", "ulysses"], native: NativeOps) -> Operator:
    """Of N / n places of one sequence, with n heads."""
    n = native.world.size
    kernels = context_kernels(form, PortableKernels(), native, native.world, seq_len=N, window=None, has_sinks=False)
    start_BS = ms.Tensor(np.zeros((1, N // n), np.int32))

    def op(x: Tensor) -> Tensor:
        x_BSHZ = x.reshape((1, N // n, n, D))
        return kernels.attention(x_BSHZ, x_BSHZ, x_BSHZ, start_BS).reshape((N, D))

    return op


def main(folder: str) -> None:
    """Prints each name that could be exported."""
    ms.set_context(mode=ms.GRAPH_MODE)
    communication.init = lambda: None
    native = NativeOps()
    native._is_cpu = False
    for name, (operator, shape, dtype) in calls(native).items():
        x, like = (ms.Tensor(np.ones(each, np.float32), dtype) for each in ((N, D), shape))
        ms.export(
            _Call(operator, "gradient" in name), like, x, file_name=str(Path(folder) / "graph"), file_format="MINDIR"
        )
        print(f"exported {name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
