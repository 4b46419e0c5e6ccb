"""Damaged and malicious checkpoints: each is refused by one line that names the file and, if any, the tensor."""

import hashlib
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.checkpoint import layout, store
from ascend_moe_train.checkpoint.layout import TensorSpec
from ascend_moe_train.errors import CheckpointError
from tests.damage import (
    ZERO_SHA256,
    Damage,
    assert_refused,
    edit,
    extras_behind_a_link,
    flip,
    link_out,
    replace_by,
    replace_text,
    set_extra,
    set_key,
    set_piece,
    set_tensor,
    truncate,
    with_extra_file,
    write,
)

TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "wide": np.arange(2, dtype=np.int64),
    "w": np.arange(12, dtype=np.float32).reshape(4, 3),
    "flag": np.array([True, False]),
}
WIDE_FILE, OTHER_FILE = "tensors-00000.safetensors", "tensors-00001.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = store.save(tmp_path / "root", 200, TENSORS, {"lr": 0.1}, keep=3, max_file_bytes=60)
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", WIDE_FILE, OTHER_FILE]
    return path


def store_false_bool(path: Path) -> None:
    flip(OTHER_FILE, -1)(path)
    digest = hashlib.sha256((path / OTHER_FILE).read_bytes()[-2:]).hexdigest()
    set_piece("flag", sha256=digest)(path)


def new_tensor(**values: object) -> dict[str, Any]:
    piece = {"file": WIDE_FILE, "box": [[0, 1]], "sha256": ZERO_SHA256}
    return {"dtype": "F32", "shape": [1], "pieces": [piece]} | values


MANIFEST, WIDE, OTHER = "manifest.json: ", WIDE_FILE + ": ", OTHER_FILE + ": "
CASES: dict[str, tuple[Damage, str]] = {
    # The files.
    "data_flipped": (flip(OTHER_FILE, -3), OTHER + "tensor 'w': sha256 does not match the manifest: damaged"),
    "last_byte_flipped": (flip(OTHER_FILE, -1), OTHER + "tensor 'flag': sha256 does not match"),
    "header_length_flipped": (flip(WIDE_FILE, 0), WIDE + "header does not match the manifest"),
    "header_flipped": (flip(WIDE_FILE, 12), WIDE + "header does not match the manifest"),
    "one_byte_short": (truncate(WIDE_FILE, 1), WIDE + "has 87 bytes, its manifest says 88"),
    "empty_file": (write(WIDE_FILE, b""), WIDE + "has 0 bytes, its manifest says 88"),
    "grown_file": (lambda path: os.truncate(path / WIDE_FILE, 999), WIDE + "has 999 bytes, its manifest says 88"),
    "file_missing": (lambda path: (path / WIDE_FILE).unlink(), WIDE + "missing"),
    "file_is_a_link": (link_out(WIDE_FILE), WIDE + "a symbolic link, which is not followed"),
    "file_is_a_folder": (replace_by(WIDE_FILE, Path.mkdir), WIDE + "not a regular file"),
    "file_is_a_pipe": (replace_by(WIDE_FILE, os.mkfifo), WIDE + "not a regular file"),
    "bool_above_one": (store_false_bool, OTHER + "tensor 'flag': a bool is stored as a byte above 1"),
    # The manifest as a file.
    "manifest_missing": (lambda path: (path / "manifest.json").unlink(), MANIFEST + "missing"),
    "manifest_empty": (write("manifest.json", b""), MANIFEST + "not a valid JSON manifest"),
    "manifest_truncated": (truncate("manifest.json", 40), MANIFEST + "not a valid JSON manifest"),
    "manifest_is_a_link": (link_out("manifest.json"), MANIFEST + "a symbolic link, which is not followed"),
    "manifest_is_a_pipe": (replace_by("manifest.json", os.mkfifo), MANIFEST + "not a regular file"),
    "manifest_giant": (lambda path: os.truncate(path / "manifest.json", 2**40), MANIFEST + "larger than"),
    "manifest_not_json": (write("manifest.json", b"\x80\x04pickle"), MANIFEST + "not a valid JSON manifest"),
    "manifest_too_deep": (write("manifest.json", b"[" * 10**6), MANIFEST + "not a valid JSON manifest"),
    "manifest_is_a_list": (write("manifest.json", b"[]"), MANIFEST + "not a checkpoint manifest"),
    "manifest_edited": (replace_text('"step": 200', '"step": 100'), MANIFEST + "sha256 does not match the content"),
    "meta_edited": (replace_text('"lr": 0.1', '"lr": 0.2'), MANIFEST + "sha256 does not match the content"),
    "step_is_nan": (replace_text('"step": 200', '"step": NaN'), MANIFEST + "not a valid JSON manifest: NaN"),
    "number_overflows": (replace_text('"lr": 0.1', '"lr": 1e999'), MANIFEST + "Out of range float"),
    "number_of_many_digits": (replace_text('"lr": 0.1', '"lr": ' + "9" * 9999), MANIFEST + "not a valid JSON manifest"),
    "tensor_twice": (replace_text('"wide": {', '"w": {'), MANIFEST + "not a valid JSON manifest: key 'w' occurs twice"),
    # The manifest's content, sealed again.
    "unknown_format": (
        set_key("format", "other"),
        MANIFEST + "not a checkpoint manifest: format is not 'amt-checkpoint'",
    ),
    "unknown_version": (set_key("version", 1), MANIFEST + "version 1 cannot be read; allowed: 2"),
    "version_is_true": (set_key("version", True), MANIFEST + "version True cannot be read"),
    "unknown_key": (set_key("extra", 1), MANIFEST + "extra = 1: "),
    "step_negative": (set_key("step", -1), MANIFEST + "step = -1: "),
    "step_is_text": (set_key("step", "200"), MANIFEST + "step = '200': "),
    "step_is_true": (set_key("step", True), MANIFEST + "step = True: "),
    "step_of_another_folder": (set_key("step", 100), MANIFEST + "step = 100, but the folder is step-00000200"),
    "meta_is_a_list": (set_key("meta", []), MANIFEST + "meta = []: "),
    "tensors_missing": (edit(lambda content: content.pop("tensors")), MANIFEST + "tensors is missing"),
    "tensor_is_null": (edit(lambda content: content["tensors"].update(w=None)), MANIFEST + "tensor 'w': "),
    "dtype_missing": (
        edit(lambda content: content["tensors"]["w"].pop("dtype")),
        MANIFEST + "tensor 'w': dtype is missing",
    ),
    "tensor_removed": (edit(lambda content: content["tensors"].pop("flag")), OTHER + "has "),
    "tensor_added": (
        set_tensor("x", **new_tensor()),
        WIDE + "has 88 bytes",
    ),
    "tensor_renamed": (
        edit(lambda content: content["tensors"].update(edit=content["tensors"].pop("wide"))),
        WIDE + "header does not match the manifest",
    ),
    "tensor_of_a_missing_file": (set_piece("w", file="other.safetensors"), "other.safetensors: missing"),
    "tensor_name_unusable": (
        set_tensor("a\nb", **new_tensor()),
        MANIFEST + r"tensor name 'a\nb' cannot be used",
    ),
    "file_climbs_out": (
        set_piece("w", file="../../secret.safetensors"),
        MANIFEST + "tensor 'w': pieces.0.file = '../../secret",
    ),
    "file_is_absolute": (set_piece("w", file="/etc/passwd"), MANIFEST + "tensor 'w': pieces.0.file = '/etc/passwd'"),
    "file_with_newline": (set_piece("w", file="a.safetensors\n"), MANIFEST + "tensor 'w': pieces.0.file = "),
    "file_is_null": (set_piece("w", file=None), MANIFEST + "tensor 'w': pieces.0.file = None"),
    "dtype_unknown": (set_tensor("w", dtype="O"), MANIFEST + "tensor 'w': dtype = 'O': Input should be 'F32', 'F16'"),
    "dtype_wider": (set_tensor("w", dtype="I64"), OTHER + "has "),
    "dtype_of_same_width": (set_tensor("w", dtype="I32"), OTHER + "header does not match the manifest"),
    "shape_huge": (
        set_tensor("w", shape=[2**40, 2**40]),
        MANIFEST + "tensor 'w': its pieces leave out 1208925819614629174706164 of 1208925819614629174706176 elements",
    ),
    "piece_and_shape_huge": (
        edit(
            lambda content: content["tensors"].update(
                w=new_tensor(shape=[2**40], pieces=[{"file": WIDE_FILE, "box": [[0, 2**40]], "sha256": ZERO_SHA256}])
            )
        ),
        MANIFEST + "tensor 'w': a piece of 4398046511104 bytes; allowed: at most 268435456",
    ),
    "shape_over_bound": (set_tensor("w", shape=[2**63]), MANIFEST + "tensor 'w': shape.0 = 9223372036854775808: "),
    "shape_empty_but_huge": (set_tensor("w", shape=[0, 2**63]), MANIFEST + "tensor 'w': shape.1 = "),
    "shape_negative": (set_tensor("w", shape=[-4, -3]), MANIFEST + "tensor 'w': shape.0 = -4: "),
    "shape_of_floats": (set_tensor("w", shape=[4.0, 3.0]), MANIFEST + "tensor 'w': shape.0 = 4.0: "),
    "shape_of_bools": (set_tensor("w", shape=[True, 12]), MANIFEST + "tensor 'w': shape.0 = True: "),
    "shape_transposed": (
        set_tensor("w", shape=[3, 4]),
        MANIFEST + "tensor 'w': box [0:4, 0:3] is not within the shape [3, 4]",
    ),
    "shape_and_box_transposed": (
        edit(
            lambda content: content["tensors"]["w"].update(
                shape=[3, 4], pieces=[{**content["tensors"]["w"]["pieces"][0], "box": [[0, 3], [0, 4]]}]
            )
        ),
        OTHER + "header does not match the manifest",
    ),
    "shape_too_long": (set_tensor("w", shape=[1] * 33), MANIFEST + "tensor 'w': shape = "),
    "shape_is_text": (set_tensor("w", shape="43"), MANIFEST + "tensor 'w': shape = '43'"),
    "sha256_short": (set_piece("w", sha256="00"), MANIFEST + "tensor 'w': pieces.0.sha256 = '00'"),
    "sha256_wrong": (set_piece("w", sha256=ZERO_SHA256), OTHER + "tensor 'w': sha256 does not match"),
    "extra_missing": (set_extra("config.json"), "huggingface/config.json: missing"),
    "extra_changed": (with_extra_file(b"{ }"), "huggingface/config.json: sha256 does not match the manifest"),
    "extra_longer": (with_extra_file(b"{   }"), "huggingface/config.json: has 5 bytes, its manifest says 3"),
    "extra_climbs_out": (set_extra("../config.json"), MANIFEST + "extras"),
    "extra_in_a_folder": (set_extra("a/config.json"), MANIFEST + "extras"),
    "extra_huge": (set_extra("config.json", size_bytes=2**60), MANIFEST + "extras"),
    "extras_behind_a_link": (extras_behind_a_link, "huggingface: a symbolic link, which is not followed"),
    "tensor_key_unknown": (set_tensor("w", pickle=True), MANIFEST + "tensor 'w': pickle = True: "),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_with_one_line(checkpoint: Path, case: str) -> None:
    damage, expected = CASES[case]
    damage(checkpoint)
    assert_refused(checkpoint, expected)


@pytest.mark.parametrize("case", CASES)
def test_the_one_before_is_used(checkpoint: Path, case: str) -> None:
    root = checkpoint.parent
    store.save(root, 100, TENSORS, {"lr": 0.3}, keep=3)
    CASES[case][0](checkpoint)
    skipped: list[str] = []
    loaded = store.load_newest(root, skipped.append)
    assert loaded is not None
    assert loaded[0].step == 100 and loaded[0].meta == {"lr": 0.3}
    assert {name: array.tobytes() for name, array in loaded[1].items()} == {
        name: array.tobytes() for name, array in TENSORS.items()
    }
    assert len(skipped) == 1 and skipped[0].startswith(f"checkpoint step-00000200 skipped: {checkpoint}")


def test_more_than_the_memory(checkpoint: Path) -> None:
    """Sparse files that have the size that their manifest claims, 8 TiB, and take no space."""
    rows, width = 2**15, 2**25
    boxes = [((row, row + 1), (0, width)) for row in range(rows)]
    specs = {layout.piece_key("wide", (rows, width), box): TensorSpec(dtype="I64", shape=(1, width)) for box in boxes}
    made = layout.file_layout(specs)
    (checkpoint / WIDE_FILE).write_bytes(made.header)
    os.truncate(checkpoint / WIDE_FILE, made.total_bytes)
    pieces = [{"file": WIDE_FILE, "box": box, "sha256": ZERO_SHA256} for box in boxes]
    set_tensor("wide", shape=[rows, width], pieces=pieces)(checkpoint)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**42, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step-00000200: tensor 'wide': no memory for 8796093022208 bytes"):
            store.load(checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_none_left(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of 1 checkpoints can be read"):
        store.load_newest(checkpoint.parent, lambda message: None)


@pytest.mark.parametrize("path", ["nothing", "a-file"])
def test_not_a_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "a-file").write_text("")
    with pytest.raises(CheckpointError, match=rf"{path}/manifest\.json: (missing|Not a directory)$"):
        store.load(tmp_path / path)


def test_every_bit_of_every_byte_counts(checkpoint: Path) -> None:
    """A single flipped bit anywhere is refused, or changes nothing that is loaded (white space of the manifest)."""
    for file in sorted(checkpoint.iterdir()):
        data = file.read_bytes()
        for position in range(len(data)):
            changed = bytearray(data)
            changed[position] ^= 1 << (position % 8)
            file.write_bytes(bytes(changed))
            try:
                tensors, meta = store.load(checkpoint)
            except CheckpointError as error:
                assert "\n" not in str(error)
                continue
            assert file.name == "manifest.json" and chr(data[position]).isspace()
            assert meta == {"lr": 0.1} and all((tensors[name] == TENSORS[name]).all() for name in TENSORS)
        file.write_bytes(data)


def test_a_copy_under_another_name_loads(checkpoint: Path) -> None:
    best = checkpoint.parent / "best"
    shutil.copytree(checkpoint, best)
    assert store.open_checkpoint(best).step == 200
