"""Packing whole documents into windows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_moe_train.data.packing import pack

CAPACITY = 32


@settings(deadline=None)
@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=200))
def test_each_document_is_in_one_window_that_it_fits(lengths: list[int]) -> None:
    sizes = np.asarray(lengths, dtype=np.int64)
    packing = pack(sizes, CAPACITY)
    windows = [packing.window(number) for number in range(packing.num_windows)]
    assert sorted(np.concatenate(windows).tolist()) == list(range(len(lengths)))
    assert all(0 < int(sizes[window].sum()) <= CAPACITY for window in windows)


@settings(deadline=None)
@given(st.lists(st.integers(1, CAPACITY), min_size=2, max_size=60))
def test_no_two_windows_could_be_one(lengths: list[int]) -> None:
    sizes = np.asarray(lengths, dtype=np.int64)
    packing = pack(sizes, CAPACITY)
    filled = sorted(int(sizes[packing.window(number)].sum()) for number in range(packing.num_windows))
    assert len(filled) == 1 or filled[0] + filled[1] > CAPACITY


@pytest.mark.parametrize(
    ("lengths", "windows"), [([20, 20, 12, 12], 2), ([32, 32], 2), ([16, 16, 8, 8, 8, 4, 4], 2), ([1], 1)]
)
def test_windows_are_as_few_as_possible_where_that_is_easy(lengths: list[int], windows: int) -> None:
    assert pack(np.asarray(lengths, dtype=np.int64), CAPACITY).num_windows == windows
