"""Names, file plan, headers and the manifest as text."""

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.layout import Manifest, PieceEntry, TensorEntry, TensorSpec
from ascend_moe_train.errors import CheckpointError

MANIFEST = Manifest(
    step=12,
    tensors={
        "w": TensorEntry(
            dtype="F32",
            shape=(2, 3),
            pieces=(
                PieceEntry(file="a.safetensors", box=((0, 2), (0, 1)), sha256="0" * 64),
                PieceEntry(file="b.safetensors", box=((0, 2), (1, 3)), sha256="1" * 64),
            ),
        ),
        "none": TensorEntry(dtype="F32", shape=(0, 3), pieces=()),
    },
    meta={"config": {"lr": 0.1}},
)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000200", 200),
        ("step-123456789", 123456789),
        ("step-000000200", None),
        ("step-200", None),
        ("step-00000200 ", None),
        ("step-00000200.old", None),
        ("step--0000200", None),
        ("latest", None),
    ],
)
def test_step_of_a_folder(name: str, step: int | None) -> None:
    assert layout.step_of(name) == step
    assert step is None or layout.folder_name(step) == name


def test_header_is_safetensors() -> None:
    specs = {
        "byte": TensorSpec(dtype="U8", shape=(3,)),
        "b": TensorSpec(dtype="F32", shape=(2, 2)),
        "a": TensorSpec(dtype="F32", shape=()),
        "wide": TensorSpec(dtype="I64", shape=(1,)),
    }
    made = layout.file_layout(specs)
    (length,) = struct.unpack("<Q", made.header[:8])
    assert len(made.header) == 8 + length and length % 8 == 0
    assert json.loads(made.header[8:]) == {
        "wide": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [8, 12]},
        "b": {"dtype": "F32", "shape": [2, 2], "data_offsets": [12, 28]},
        "byte": {"dtype": "U8", "shape": [3], "data_offsets": [28, 31]},
    }
    assert made.offsets_bytes["b"] == len(made.header) + 12
    assert made.total_bytes == len(made.header) + 31


def test_header_does_not_depend_on_the_order_given() -> None:
    specs = {name: TensorSpec(dtype="F32", shape=(2,)) for name in "cab"}
    assert layout.file_layout(specs) == layout.file_layout(dict(sorted(specs.items())))


@given(sizes=st.lists(st.integers(0, 50), max_size=20), max_file_bytes=st.integers(1, 40))
def test_plan_holds_each_tensor_once_and_keeps_the_limit(sizes: list[int], max_file_bytes: int) -> None:
    specs = {f"t{index}": TensorSpec(dtype="U8", shape=(size,)) for index, size in enumerate(sizes)}
    plan = layout.plan_files(specs, max_file_bytes)
    assert sorted(name for names in plan.values() for name in names) == sorted(specs)
    for names in plan.values():
        file_bytes = sum(specs[name].size_bytes for name in names)
        assert file_bytes <= max_file_bytes or sum(specs[name].size_bytes > 0 for name in names) == 1


def test_manifest_round_trip() -> None:
    assert layout.parse_manifest(layout.dump_manifest(MANIFEST), "here") == MANIFEST


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(meta=st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_meta_round_trip(meta: dict[str, Any]) -> None:
    manifest = Manifest(step=1, tensors={}, meta=meta)
    assert layout.parse_manifest(layout.dump_manifest(manifest), "here").meta == meta


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_or_harmless(position: int, bit: int) -> None:
    text = bytearray(layout.dump_manifest(MANIFEST))
    text[position % len(text)] ^= 1 << bit
    try:
        assert layout.parse_manifest(bytes(text), "here") == MANIFEST
    except CheckpointError as error:
        assert str(error).startswith("here: ") and "\n" not in str(error)


@given(text=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^here: "):
        layout.parse_manifest(text, "here")


def test_specs_of_arrays() -> None:
    specs = layout.tensor_specs({"w": np.zeros((2, 3), np.float16), "s": np.array(True)})
    assert specs == {"w": TensorSpec(dtype="F16", shape=(2, 3)), "s": TensorSpec(dtype="BOOL", shape=())}
    assert (specs["w"].elements, specs["w"].size_bytes, specs["s"].size_bytes) == (6, 12, 1)


def test_pieces_of_a_file() -> None:
    files = MANIFEST.by_file()
    assert {file: list(pieces) for file, pieces in files.items()} == {
        "a.safetensors": ["w[0:2,0:1]"],
        "b.safetensors": ["w[0:2,1:3]"],
    }
    piece = files["b.safetensors"]["w[0:2,1:3]"]
    assert (piece.tensor, piece.dtype, piece.shape, piece.size_bytes) == ("w", "F32", (2, 2), 16)


def test_a_tensor_of_one_writer_is_cut_to_size() -> None:
    spec = TensorSpec(dtype="F16", shape=(5, 3))
    assert layout.cut_whole("w", spec, 30) == {"w": ((0, 5), (0, 3))}
    assert list(layout.cut_whole("w", spec, 29)) == ["w[0:4,0:3]", "w[4:5,0:3]"]
    assert list(layout.cut_whole("w", spec, 5))[:3] == ["w[0:1,0:2]", "w[0:1,2:3]", "w[1:2,0:2]"]
    assert len(layout.cut_whole("w", spec, 1)) == 15


def test_a_manifest_that_nobody_could_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_MANIFEST_BYTES", 300)
    with pytest.raises(CheckpointError, match=r"the manifest of 2 pieces has \d+ bytes; allowed: 300"):
        layout.dump_manifest(MANIFEST)
