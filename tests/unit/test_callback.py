"""Python functions in compiled graphs: what they get, what they may return, and what comes of their errors."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from ascend_moe_train.parallel.callback import host_operator, named_failures
from ascend_moe_train.parallel.comm import Array, CommError, LocalComm
from ascend_moe_train.parallel.host_ops import HostOps
from tests.rules.source import ROOT

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


class Once(nn.Cell):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator

    def construct(self, *inputs: Any) -> Any:
        return self.operator(*inputs)


class Refusal(Exception):
    """Raised inside a graph."""


def refuse(x: Array, out: Array) -> None:
    raise Refusal("not this time")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_graph", [True, False])
def test_arrays_of_every_dtype(dtype: str, is_graph: bool) -> None:
    def turn(x: Array, out: Array) -> None:
        assert x.dtype == out.dtype == np.dtype(dtype)
        assert x.flags.c_contiguous and out.flags.c_contiguous
        out[...] = x.T

    ms.set_context(mode=ms.GRAPH_MODE)
    x = np.arange(6).reshape(2, 3).astype(dtype)
    operator = host_operator(turn, lambda x: [x[1], x[0]])
    found = (Once(operator) if is_graph else operator)(ms.Tensor(x))
    assert np.array_equal(found.asnumpy(), x.T)


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE])
def test_functions_are_told_apart(mode: int) -> None:
    def fill(x: Array, out: Array) -> None:
        out[...] = out.size

    ms.set_context(mode=mode)
    x = ms.Tensor(np.ones(4, np.float32))
    operators = [host_operator(fill, lambda x: [x[0] // 2]), host_operator(fill, lambda x: [2 * x[0]])]
    assert [operator(x).asnumpy().tolist() for operator in operators] == [[2.0] * 2, [8.0] * 8]
    assert [Once(operator)(x).asnumpy().tolist() for operator in operators] == [[2.0] * 2, [8.0] * 8]
    ms.set_context(mode=ms.GRAPH_MODE)


def test_several_inputs_and_another_dtype() -> None:
    def count(x: Array, y: Array, z: Array, out: Array) -> None:
        out[...] = [x.size, y.size, z.size, x.sum() + y.sum() + z.sum()]

    operator = host_operator(count, lambda x, y, z: [4], ms.int64, num_inputs=3)
    inputs = [ms.Tensor(np.ones(shape, np.float32)) for shape in ((2, 3), (5,), (1, 1, 4))]
    found = Once(operator)(*inputs)
    assert found.dtype == ms.int64
    assert found.asnumpy().tolist() == [6, 5, 4, 15]


def test_a_non_contiguous_input_arrives_in_its_order() -> None:
    def copy(x: Array, out: Array) -> None:
        out[...] = x

    operator = host_operator(copy, lambda x: x)

    class Transposed(nn.Cell):
        def construct(self, x: Any) -> Any:
            return operator(ops.transpose(x, (1, 0))), operator(x[:, 1])

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    turned, column = Transposed()(ms.Tensor(x))
    assert np.array_equal(turned.asnumpy(), x.T)
    assert np.array_equal(column.asnumpy(), x[:, 1])


def test_bf16_is_refused_when_the_graph_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MindSpore writes the graph that fails into the working directory
    with pytest.raises(CommError, match="cast to fp32"):
        Once(host_operator(refuse, lambda x: x))(ms.Tensor(np.ones(3, np.float32), ms.bfloat16))


def fail_in_a_graph() -> None:
    """Run in a process of its own: MindSpore runs no graph after a failure."""
    ms.set_context(mode=ms.GRAPH_MODE)
    x = ms.Tensor(np.ones(3, np.float32))
    with pytest.raises(Refusal, match="not this time"), named_failures():
        Once(host_operator(refuse, lambda x: x))(x)


def fail_in_a_collective() -> None:
    """As above."""
    ms.set_context(mode=ms.GRAPH_MODE)
    collectives = HostOps(LocalComm())
    with (
        pytest.raises(CommError, match=r"^rank 0: send in 'world': a group of one rank has no peer 1$"),
        named_failures(),
    ):
        Once(collectives.send(collectives.world, 1))(ms.Tensor(np.ones(3, np.float32)))


@pytest.mark.parametrize("function", [fail_in_a_graph, fail_in_a_collective])
@pytest.mark.parametrize("compiler", [{}, {"CC": "no-compiler"}])
def test_errors_come_out(function: Any, compiler: dict[str, str]) -> None:
    code = f"from tests.unit.test_callback import *\n{function.__name__}()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **compiler},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="of another kind"), named_failures():
        raise RuntimeError("of another kind")
