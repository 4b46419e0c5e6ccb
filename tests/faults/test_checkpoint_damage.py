"""Damaged and malicious checkpoints: each is refused by one line that names the file and, if any, the tensor.

Manifests that were edited carry a fresh checksum, as somebody who means harm would make one; otherwise the checksum
would refuse them all and hide the checks behind it.
"""

import hashlib
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.checkpoint import layout, store
from ascend_moe_train.checkpoint.layout import TensorSpec
from ascend_moe_train.errors import CheckpointError

TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "wide": np.arange(2, dtype=np.int64),
    "w": np.arange(12, dtype=np.float32).reshape(4, 3),
    "flag": np.array([True, False]),
}
WIDE_FILE, OTHER_FILE = "tensors-00000.safetensors", "tensors-00001.safetensors"
ZERO_SHA256 = hashlib.sha256(b"").hexdigest()
Damage = Callable[[Path], None]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = store.save(tmp_path / "root", 200, TENSORS, {"lr": 0.1}, keep=3, max_file_bytes=60)
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", WIDE_FILE, OTHER_FILE]
    return path


def seal(content: dict[str, Any]) -> bytes:
    """The manifest's text with a checksum that matches it."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def edit(change: Callable[[dict[str, Any]], object]) -> Damage:
    """A damage that changes the parsed manifest and seals it again."""

    def damage(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())
        change(content)
        (path / "manifest.json").write_bytes(seal(content))

    return damage


def set_key(key: str, value: object) -> Damage:
    return edit(lambda content: content.update({key: value}))


def set_tensor(name: str, **values: object) -> Damage:
    return edit(lambda content: content["tensors"].setdefault(name, {}).update(values))


def set_extra(name: str, size_bytes: int = 3) -> Damage:
    return edit(lambda content: content.update(extras={name: {"size_bytes": size_bytes, "sha256": ZERO_SHA256}}))


def with_extra_file(data: bytes) -> Damage:
    def damage(path: Path) -> None:
        set_extra("config.json")(path)
        (path / "huggingface").mkdir()
        (path / "huggingface" / "config.json").write_bytes(data)

    return damage


def extras_behind_a_link(path: Path) -> None:
    set_extra("config.json")(path)
    (path.parent.parent / "elsewhere").mkdir()
    (path / "huggingface").symlink_to(path.parent.parent / "elsewhere")


def replace_text(old: str, new: str) -> Damage:
    def damage(path: Path) -> None:
        text = (path / "manifest.json").read_text()
        assert text.count(old) == 1
        (path / "manifest.json").write_text(text.replace(old, new))

    return damage


def write(file: str, text: bytes) -> Damage:
    def damage(path: Path) -> None:
        (path / file).write_bytes(text)

    return damage


def truncate(file: str, drop_bytes: int) -> Damage:
    return lambda path: os.truncate(path / file, (path / file).stat().st_size - drop_bytes)


def flip(file: str, offset: int) -> Damage:
    """Flips one bit, `offset` bytes from the start or, when negative, from the end."""

    def damage(path: Path) -> None:
        data = bytearray((path / file).read_bytes())
        data[offset] ^= 4
        (path / file).write_bytes(bytes(data))

    return damage


def link_out(file: str) -> Damage:
    """Moves a file out of the folder and leaves a symbolic link to it."""

    def damage(path: Path) -> None:
        outside = path.parent.parent / "outside"
        shutil.move(path / file, outside)
        (path / file).symlink_to(outside)

    return damage


def replace_by(file: str, make: Callable[[Path], None]) -> Damage:
    def damage(path: Path) -> None:
        (path / file).unlink()
        make(path / file)

    return damage


def store_false_bool(path: Path) -> None:
    flip(OTHER_FILE, -1)(path)
    digest = hashlib.sha256((path / OTHER_FILE).read_bytes()[-2:]).hexdigest()
    set_tensor("flag", sha256=digest)(path)


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
    "unknown_version": (set_key("version", 2), MANIFEST + "version 2 cannot be read; allowed: 1"),
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
        set_tensor("x", dtype="F32", shape=[1], file=WIDE_FILE, sha256=ZERO_SHA256),
        WIDE + "has 88 bytes",
    ),
    "tensor_renamed": (
        edit(lambda content: content["tensors"].update(edit=content["tensors"].pop("wide"))),
        WIDE + "header does not match the manifest",
    ),
    "tensor_of_a_missing_file": (set_tensor("w", file="other.safetensors"), "other.safetensors: missing"),
    "tensor_name_unusable": (
        set_tensor("a\nb", dtype="F32", shape=[0], file=WIDE_FILE, sha256=ZERO_SHA256),
        MANIFEST + r"tensor name 'a\nb' cannot be used",
    ),
    "file_climbs_out": (
        set_tensor("w", file="../../secret.safetensors"),
        MANIFEST + "tensor 'w': file = '../../secret",
    ),
    "file_is_absolute": (set_tensor("w", file="/etc/passwd"), MANIFEST + "tensor 'w': file = '/etc/passwd'"),
    "file_with_newline": (set_tensor("w", file="a.safetensors\n"), MANIFEST + "tensor 'w': file = "),
    "file_is_null": (set_tensor("w", file=None), MANIFEST + "tensor 'w': file = None"),
    "dtype_unknown": (set_tensor("w", dtype="O"), MANIFEST + "tensor 'w': dtype = 'O': Input should be 'F32', 'F16'"),
    "dtype_wider": (set_tensor("w", dtype="I64"), OTHER + "has "),
    "dtype_of_same_width": (set_tensor("w", dtype="I32"), OTHER + "header does not match the manifest"),
    "shape_huge": (set_tensor("w", shape=[2**40, 2**40]), OTHER + "has "),
    "shape_over_bound": (set_tensor("w", shape=[2**63]), MANIFEST + "tensor 'w': shape.0 = 9223372036854775808: "),
    "shape_empty_but_huge": (set_tensor("w", shape=[0, 2**63]), MANIFEST + "tensor 'w': shape.1 = "),
    "shape_negative": (set_tensor("w", shape=[-4, -3]), MANIFEST + "tensor 'w': shape.0 = -4: "),
    "shape_of_floats": (set_tensor("w", shape=[4.0, 3.0]), MANIFEST + "tensor 'w': shape.0 = 4.0: "),
    "shape_of_bools": (set_tensor("w", shape=[True, 12]), MANIFEST + "tensor 'w': shape.0 = True: "),
    "shape_transposed": (set_tensor("w", shape=[3, 4]), OTHER + "header does not match the manifest"),
    "shape_too_long": (set_tensor("w", shape=[1] * 33), MANIFEST + "tensor 'w': shape = "),
    "shape_is_text": (set_tensor("w", shape="43"), MANIFEST + "tensor 'w': shape = '43'"),
    "sha256_short": (set_tensor("w", sha256="00"), MANIFEST + "tensor 'w': sha256 = '00'"),
    "sha256_wrong": (set_tensor("w", sha256=ZERO_SHA256), OTHER + "tensor 'w': sha256 does not match"),
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
    with pytest.raises(CheckpointError) as caught:
        store.load(checkpoint)
    message = str(caught.value)
    assert message.startswith(str(checkpoint / expected.split(":")[0]))
    assert expected in message
    assert "\n" not in message and len(message) < len(str(checkpoint)) + 400


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
    """A sparse file that has the size its manifest claims, 8 TiB, and takes no space."""
    elements = 2**40
    entry = TensorSpec(dtype="I64", shape=(elements,))
    made = layout.file_layout({"wide": entry})
    (checkpoint / WIDE_FILE).write_bytes(made.header)
    os.truncate(checkpoint / WIDE_FILE, made.total_bytes)
    set_tensor("wide", shape=[elements])(checkpoint)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**42, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"tensors-00000\.safetensors: tensor 'wide': no memory for 87960930"):
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
