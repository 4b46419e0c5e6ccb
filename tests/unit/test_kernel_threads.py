"""The native kernels give the same bits for any number of threads. Called through ctypes, where threads can be set."""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.model.kernels import build
from ascend_moe_train.selftest.kernel_cases import Array, normal

THREADS = (1, 2, 3, 7)


def room(*shape: int) -> Array:
    return np.full(shape, np.nan, np.float32)


def integers(*values: int) -> Array:
    return np.array(values, np.int32)


def tokens(count: int, below: int) -> Array:
    return np.random.default_rng(0).integers(0, below, count).astype(np.int32)


COUNTS = integers(0, 301, 7, 92)
QKV = [normal((2, 130, heads, 16), seed) for seed, heads in enumerate((4, 2, 2))]
ATTENTION = [*QKV, np.zeros((2, 130), np.int32), normal((4,), 3), integers(100)]
# Kernel, inputs, outputs: those in which threads share a sum, or shares of unequal size.
CALLS: dict[str, tuple[list[Array], list[Array]]] = {
    "grouped_matmul": ([normal((400, 33), 4), normal((4, 33, 40), 5), COUNTS], [room(400, 40)]),
    "grouped_matmul_dx": ([normal((400, 40), 4), normal((4, 33, 40), 5), COUNTS], [room(400, 33)]),
    "grouped_matmul_dw": ([normal((400, 300), 4), normal((400, 40), 5), COUNTS], [room(4, 300, 40)]),
    "attention": (ATTENTION, [room(2, 130, 4, 16), room(2, 4, 130)]),
    "attention_grad": (
        [normal((2, 130, 4, 16), 6), *ATTENTION, normal((2, 130, 4, 16), 7), 9 + normal((2, 4, 130), 8)],
        [room(*x.shape) for x in QKV] + [room(4), room(2, 4)],
    ),
    "rms_norm_grad": (
        [normal((501, 33), 9), normal((501, 33), 10), normal((33,), 11), normal((501,), 12)],
        [room(501, 33), room(33)],
    ),
    "embed_dw": ([normal((501, 33), 13), tokens(501, 70), normal((70, 33), 14)], [room(70, 33)]),
    "cross_entropy": ([normal((501, 70), 15), tokens(501, 70)], [room(501), room(501)]),
    "square_sum": ([normal((100_003,), 16)], [room(1)]),
}


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    try:
        library = ctypes.CDLL(str(build.library()))
    except build.NoLibraryError as reason:
        pytest.skip(str(reason))
    before = library.omp_get_max_threads()
    yield library
    library.omp_set_num_threads(before)


def call(kernels: Any, name: str, tensors: list[Array]) -> None:
    """As MindSpore calls it: pointers, numbers of dims, shapes, names of types."""
    count = len(tensors)
    shapes = [(ctypes.c_int64 * x.ndim)(*x.shape) for x in tensors]
    status = getattr(kernels, name)(
        count,
        (ctypes.c_void_p * count)(*(x.ctypes.data for x in tensors)),
        (ctypes.c_int * count)(*(x.ndim for x in tensors)),
        (ctypes.POINTER(ctypes.c_int64) * count)(*(ctypes.cast(s, ctypes.POINTER(ctypes.c_int64)) for s in shapes)),
        None,
        None,
        None,
    )
    assert status == 0


@pytest.mark.parametrize("name", CALLS)
def test_any_number_of_threads_gives_the_same_bits(kernels: Any, name: str) -> None:
    inputs, outputs = CALLS[name]
    found = []
    for threads in THREADS:
        kernels.omp_set_num_threads(threads)
        fresh = [np.full_like(x, np.nan) for x in outputs]
        call(kernels, name, [*inputs, *fresh])
        assert all(np.isfinite(x).all() for x in fresh)
        found.append([x.tobytes() for x in fresh])
    assert found == [found[0]] * len(THREADS)


def test_a_kernel_refuses_what_would_leave_its_tensors(kernels: Any) -> None:
    bad_counts = [normal((400, 33), 4), normal((4, 33, 40), 5), integers(0, 301, 7, 93), room(400, 40)]
    with pytest.raises(AssertionError):
        call(kernels, "grouped_matmul", bad_counts)
    with pytest.raises(AssertionError):
        call(kernels, "embed", [integers(0, 70), normal((70, 33), 1), room(2, 33)])
    with pytest.raises(AssertionError):
        call(kernels, "cross_entropy", [normal((2, 70), 1), integers(-1, 70), room(2), room(2)])
