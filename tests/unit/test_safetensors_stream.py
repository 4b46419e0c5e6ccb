"""Headers of safetensors files that anybody may have written, and reading parts of tensors."""

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ascend_moe_train.checkpoint.safetensors_stream import read_header, read_pieces, read_tensor
from ascend_moe_train.errors import CheckpointError

TENSORS: dict[str, Any] = {
    "a": np.arange(24, dtype=np.float32).reshape(4, 3, 2),
    "b": np.arange(7, dtype=np.float32).astype(ml_dtypes.bfloat16),
    "flag": np.array([True, False]),
    "empty": np.zeros((0, 3), np.float32),
    "one": np.array(2.5, np.float32),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "x.safetensors", {"format": "pt"})
    return tmp_path / "x.safetensors"


def test_every_tensor_is_found_and_read(path: Path) -> None:
    places = read_header(path)
    assert places.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert places[name].shape == value.shape and places[name].size_bytes == value.nbytes
        read = read_tensor(places[name], name)
        assert (read.shape, read.tobytes()) == (value.shape, value.tobytes())
        assert read.dtype.kind == "u" and read.dtype.itemsize == value.dtype.itemsize


def test_parts(path: Path) -> None:
    place = read_header(path)["a"]
    assert read_tensor(place.rows(1, 3), "a").tobytes() == TENSORS["a"][1:3].tobytes()
    assert read_tensor(place.item(2), "a").tobytes() == TENSORS["a"][2].tobytes()
    assert place.item(2).shape == (3, 2)
    pieces = [piece.copy() for piece in read_pieces(place, "a", piece_bytes=20)]
    assert [piece.size for piece in pieces] == [5, 5, 5, 5, 4]
    assert b"".join(piece.tobytes() for piece in pieces) == TENSORS["a"].tobytes()
    assert list(read_pieces(read_header(path)["empty"], "empty")) == []


def test_a_file_that_changes_is_noticed(path: Path) -> None:
    place = read_header(path)["a"]
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"x\.safetensors: changed while it was being read"):
        read_tensor(place, "a")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F64", "X", 3]),
        "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON,
    }
)
FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)


@FUZZ
@given(header=st.dictionaries(st.text(max_size=5), ENTRY | JSON, max_size=3), data=st.binary(max_size=40))
def test_any_header_is_refused_or_accounts_for_every_byte(tmp_path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    try:
        places = read_header(path)
    except CheckpointError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error) and len(str(error)) < len(str(path)) + 500
    else:
        assert sum(place.size_bytes for place in places.values()) == len(data)
        assert b"".join(read_tensor(place, name).tobytes() for name, place in places.items()) == data


@FUZZ
@given(data=st.binary(max_size=60))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(data)
    try:
        places = read_header(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
    else:
        assert places == {}


@FUZZ
@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_never_breaks_the_reader(tmp_path: Path, position: int, bit: int) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1 << bit
    path.write_bytes(data)
    try:
        for name, place in read_header(path).items():
            read_tensor(place, name)
    except CheckpointError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
