"""Python functions as operators of a compiled graph on a CPU. Neither kind below has a gradient.

Where the C kernels can be built, functions work on the tensors' own memory. Elsewhere MindSpore's own way is taken,
which copies each input and the result. Known of both (MindSpore 2.10): calls of a graph are made one after the other;
0-dim tensors, bf16 and tensors without elements cannot cross.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops

from ascend_moe_train.model.kernels import build
from ascend_moe_train.parallel.comm import Array, CommError, Operator, Tensor

Shape = list[int]
_FAILED = 1
# what functions raised that C called
_raised: list[BaseException] = []
_HANDLER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_int),
    ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)),
    ctypes.POINTER(ctypes.c_char_p),
)


def host_operator(
    function: Callable[..., None], shape: Callable[..., Shape], dtype: Any = None, num_inputs: int = 1
) -> Operator:
    """`function(inputs..., out)`, which writes `out`, as operator(inputs...) -> out.

    `shape` maps the shapes of the inputs to that of `out`; its dtype is `dtype` of MindSpore, or that of the first
    input. When the graph is compiled, CommError is raised for bf16. What `function` raises comes out of the call of the
    graph within `named_failures`. MindSpore runs no graph in that process afterwards.
    """
    shared = _shared()
    return _copying(function, shape, dtype, num_inputs) if shared is None else shared.operator(function, shape, dtype)


@contextmanager
def named_failures() -> Iterator[None]:
    """Around calls of graphs: raises what a function in it raised, which MindSpore's own error does not say."""
    try:
        yield
    except RuntimeError:
        if not _raised:
            raise
        failure = _raised.pop()
        raise failure from failure.__cause__


class _Shared:
    """Calls from C. Functions are known by number, and kept for as long as the process lives, as graphs are."""

    def __init__(self) -> None:
        self._path = build.library()
        self._functions: list[Callable[..., None]] = []
        # C knows its address, so it must stay
        self._handler = _HANDLER(self._call)
        ctypes.CDLL(str(self._path)).set_host_function(self._handler)

    def operator(self, function: Callable[..., None], shape: Callable[..., Shape], dtype: Any) -> Operator:
        self._functions.append(function)
        number = ms.Tensor(np.array([len(self._functions) - 1], np.int32))
        call = ops.Custom(
            f"{self._path}:host_call",
            lambda number, *inputs: shape(*inputs),
            lambda number, *inputs: _result_dtype(dtype, *inputs),
            "aot",
        )
        # outside of graphs MindSpore takes operators with equal attributes for one, with one shape of the result
        call.add_prim_attr("host_function", len(self._functions) - 1)

        def op(*inputs: Tensor) -> Tensor:
            return call(number, *inputs)

        return op

    def _call(self, number: int, num_params: int, params: Any, ndims: Any, shapes: Any, dtypes: Any) -> int:
        # an exception would be printed and lost on its way through C
        try:
            arrays = [_array(params[i], tuple(shapes[i][: ndims[i]]), dtypes[i]) for i in range(1, num_params)]
            for array in arrays[:-1]:
                array.flags.writeable = False
            self._functions[number](*arrays)
        except BaseException as error:
            _raised.append(error)
            return _FAILED
        return 0


@cache
def _shared() -> _Shared | None:
    try:
        return _Shared()
    except build.NoLibraryError:
        return None


def _array(address: int, shape: tuple[int, ...], dtype: bytes) -> Array:
    """The memory at the address."""
    kind = np.dtype(dtype.decode())
    buffer = (ctypes.c_char * (kind.itemsize * int(np.prod(shape)))).from_address(address)
    return np.ndarray(shape, kind, memoryview(buffer))


def _copying(function: Callable[..., None], shape: Callable[..., Shape], dtype: Any, num_inputs: int) -> Operator:
    host_dtype = None if dtype is None else ms.Tensor(np.zeros(1), dtype).asnumpy().dtype

    def call(*inputs: Array) -> Array:
        out = np.empty(shape(*(list(each.shape) for each in inputs)), host_dtype or inputs[0].dtype)
        function(*inputs, out)
        return out

    # MindSpore counts the parameters
    def call_of_one(x: Array) -> Array:
        return call(x)

    def call_of_three(x: Array, y: Array, z: Array) -> Array:
        return call(x, y, z)

    counted = {1: call_of_one, 3: call_of_three}[num_inputs]
    return ops.Custom(counted, shape, lambda *inputs: _result_dtype(dtype, *inputs), "pyfunc")


def _result_dtype(dtype: Any, x: Any, *others: Any) -> Any:
    if ms.bfloat16 in (x.element_type(), dtype):
        raise CommError("bf16 does not leave a CPU's graph: cast to fp32")
    return x if dtype is None else dtype
