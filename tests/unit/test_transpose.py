"""Copies between matrices and their transposes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_moe_train.checkpoint.huggingface import contiguous, copy_across


@given(
    rows=st.integers(0, 300),
    columns=st.integers(0, 600),
    dtype=st.sampled_from(["<u2", "<u4", "u1"]),
    source_turned=st.booleans(),
    target_turned=st.booleans(),
)
def test_any_shape_and_order(rows: int, columns: int, dtype: str, source_turned: bool, target_turned: bool) -> None:
    values = np.arange(rows * columns).astype(dtype).reshape(rows, columns)
    source = np.ascontiguousarray(values.T).T if source_turned else values
    wide = np.zeros((columns, 2 * rows + 1) if target_turned else (rows, 2 * columns + 1), dtype)
    target = wide[:, :rows].T if target_turned else wide[:, :columns]
    copy_across(target, source)
    np.testing.assert_array_equal(target, values)
    beside = wide[:, rows:] if target_turned else wide[:, columns:]
    assert not beside.any()


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4)])
def test_other_dimensions(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    target = np.zeros_like(values)
    copy_across(target, values)
    np.testing.assert_array_equal(target, values)


def test_contiguous() -> None:
    values = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert contiguous(values) is values
    turned = contiguous(values.T)
    assert turned.flags.c_contiguous
    np.testing.assert_array_equal(turned, values.T)
