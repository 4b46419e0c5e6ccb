"""Damaged and malicious pieces of a checkpoint that three writers made: each is refused by one line."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.boxes import Box
from ascend_moe_train.checkpoint import layout, reshard, store
from ascend_moe_train.checkpoint.portion import Piece, Portion, whole
from ascend_moe_train.errors import CheckpointError
from tests.damage import (
    ZERO_SHA256,
    Damage,
    add_piece,
    assert_refused,
    edit,
    flip,
    link_out,
    replace_by,
    set_piece,
    set_tensor,
    truncate,
)
from tests.many_writers import save_together

W = np.arange(12, dtype=np.float32).reshape(4, 3)
IDS = np.arange(5, dtype=np.int64)
FILES = [f"tensors-r0000{writer}-00000.safetensors" for writer in range(3)]
MANIFEST = "manifest.json: tensor 'w': "


def save(root: Path, w: np.ndarray[Any, Any]) -> Path:
    """`w` in three boxes, one of each writer; `ids` whole, of the second."""
    boxes = [((0, 2), (0, 3)), ((2, 4), (0, 1)), ((2, 4), (1, 3))]
    arrays = [w[:2], w[2:, :1], w[2:, 1:]]
    portions = [{"w": Portion((4, 3), (Piece(box, array),))} for box, array in zip(boxes, arrays, strict=True)]
    portions[1]["ids"] = whole(IDS)
    return save_together(root, 200, portions, {"layout": {"tp": 3}})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = save(tmp_path / "root", W)
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", *FILES]
    return path


def piece(box: Any, file: str = FILES[0]) -> dict[str, Any]:
    return {"file": file, "box": box, "sha256": ZERO_SHA256}


def pieces(*boxes: Any) -> Damage:
    return set_tensor("w", pieces=[piece(box) for box in boxes])


def alter(index: int, **values: object) -> Damage:
    """Changes one of the three pieces."""
    return edit(lambda content: content["tensors"]["w"]["pieces"][index].update(values))


def swap_files(path: Path) -> None:
    aside = path / "aside"
    (path / FILES[0]).rename(aside)
    (path / FILES[1]).rename(path / FILES[0])
    aside.rename(path / FILES[1])


def exchange(key: str) -> Damage:
    """The last two pieces are told to be each other's."""

    def change(content: dict[str, Any]) -> None:
        _, one, other = content["tensors"]["w"]["pieces"]
        one[key], other[key] = other[key], one[key]

    return edit(change)


def file_of_another_save(path: Path) -> None:
    """Same names, sizes and headers, other data."""
    other = save(path.parent.parent / "other", W + 1)
    shutil.copy(other / FILES[0], path / FILES[0])


def as_name_of_a_piece(content: dict[str, Any]) -> None:
    content["tensors"]["w[0:2,0:3]"] = {"dtype": "F32", "shape": [1], "pieces": [piece([[0, 1]])]}


CASES: dict[str, tuple[Damage, str]] = {
    # Files.
    "data_flipped": (flip(FILES[1], -1), f"{FILES[1]}: tensor 'w[2:4,0:1]': sha256 does not match the manifest"),
    "header_flipped": (flip(FILES[2], 30), f"{FILES[2]}: header does not match the manifest"),
    "file_missing": (lambda path: (path / FILES[2]).unlink(), f"{FILES[2]}: missing"),
    "file_truncated": (truncate(FILES[0], 4), f"{FILES[0]}: has "),
    "file_grown": (lambda path: os.truncate(path / FILES[0], 999), f"{FILES[0]}: has 999 bytes"),
    "file_is_a_link": (link_out(FILES[1]), f"{FILES[1]}: a symbolic link, which is not followed"),
    "file_is_a_pipe": (replace_by(FILES[1], os.mkfifo), f"{FILES[1]}: not a regular file"),
    "files_swapped": (swap_files, f"{FILES[0]}: has "),
    "file_of_another_save": (file_of_another_save, f"{FILES[0]}: tensor 'w[0:2,0:3]': sha256 does not match"),
    # Which piece is where.
    "files_exchanged": (exchange("file"), f"{FILES[1]}: has "),
    "checksums_exchanged": (exchange("sha256"), f"{FILES[1]}: tensor 'w[2:4,0:1]': sha256 does not match"),
    "boxes_exchanged": (exchange("box"), f"{FILES[1]}: has "),
    "box_of_another_place": (
        pieces([[0, 2], [0, 3]], [[2, 3], [0, 3]], [[3, 4], [0, 3]]),
        f"{FILES[0]}: has ",
    ),
    "file_unknown": (alter(1, file="other.safetensors"), "other.safetensors: missing"),
    "file_climbs_out": (set_piece("w", file="../x.safetensors"), MANIFEST + "pieces.0.file = '../x.safetensors'"),
    "file_is_absolute": (set_piece("w", file="/etc/passwd"), MANIFEST + "pieces.0.file = '/etc/passwd'"),
    "file_in_a_folder": (set_piece("w", file="a/b.safetensors"), MANIFEST + "pieces.0.file = 'a/b.safetensors'"),
    "file_with_newline": (set_piece("w", file="a.safetensors\n"), MANIFEST + "pieces.0.file = "),
    "name_of_a_piece_twice": (
        edit(as_name_of_a_piece),
        f"manifest.json: {FILES[0]} would hold two pieces with the name 'w[0:2,0:3]'",
    ),
    # What the pieces make up.
    "none": (set_tensor("w", pieces=[]), MANIFEST + "its pieces leave out 12 of 12 elements"),
    "one_removed": (
        edit(lambda content: content["tensors"]["w"]["pieces"].pop()),
        MANIFEST + "its pieces leave out 4 of 12 elements",
    ),
    "one_twice": (add_piece("w"), MANIFEST + "its pieces overlap"),
    "one_too_small": (alter(0, box=[[0, 1], [0, 3]]), MANIFEST + "its pieces leave out 3 of 12 elements"),
    "one_too_large": (alter(0, box=[[0, 3], [0, 3]]), MANIFEST + "its pieces overlap"),
    "overlap_as_large_as_the_hole": (alter(0, box=[[1, 3], [0, 3]]), MANIFEST + "its pieces overlap"),
    "one_inside_another": (pieces([[0, 4], [0, 2]], [[1, 3], [0, 1]], [[0, 2], [0, 1]]), MANIFEST + "its pieces over"),
    "shape_larger": (set_tensor("w", shape=[5, 3]), MANIFEST + "its pieces leave out 3 of 15 elements"),
    "shape_smaller": (set_tensor("w", shape=[3, 3]), MANIFEST + "box [2:4, 0:1] is not within the shape [3, 3]"),
    "shape_of_none": (set_tensor("w", shape=[0, 3]), MANIFEST + "box [0:2, 0:3] is not within the shape [0, 3]"),
    "none_of_a_huge_tensor": (
        set_tensor("w", shape=[2**48] * 32),
        MANIFEST + "box [0:2, 0:3] is not within the shape [281474976710656, 2814",
    ),
    # Boxes by themselves.
    "box_empty": (add_piece("w", box=[[2, 2], [0, 3]]), MANIFEST + "box [2:2, 0:3] is empty"),
    "box_backwards": (alter(0, box=[[2, 0], [0, 3]]), MANIFEST + "box [2:0, 0:3] is not within the shape [4, 3]"),
    "box_outside": (alter(0, box=[[3, 5], [0, 3]]), MANIFEST + "box [3:5, 0:3] is not within the shape [4, 3]"),
    "box_of_too_few_dims": (alter(0, box=[[0, 6]]), MANIFEST + "box [0:6] is not within the shape [4, 3]"),
    "box_of_32_dims": (alter(0, box=[[0, 2**48]] * 32), MANIFEST + "box [0:281474976710656, "),
    "box_of_33_dims": (alter(0, box=[[0, 1]] * 33), MANIFEST + "pieces.0.box = "),
    "box_of_no_dims": (alter(0, box=[]), MANIFEST + "box [] is not within the shape [4, 3]"),
    "box_negative": (alter(0, box=[[-1, 2], [0, 3]]), MANIFEST + "pieces.0.box.0.0 = -1: "),
    "box_huge": (alter(0, box=[[0, 2**63], [0, 3]]), MANIFEST + "pieces.0.box.0.1 = 9223372036854775808: "),
    "box_of_floats": (alter(0, box=[[0.0, 2.0], [0, 3]]), MANIFEST + "pieces.0.box.0.0 = 0.0: "),
    "box_of_bools": (alter(0, box=[[False, 2], [0, 3]]), MANIFEST + "pieces.0.box.0.0 = False: "),
    "box_of_triples": (alter(0, box=[[0, 2, 1], [0, 3]]), MANIFEST + "pieces.0.box.0"),
    "box_is_null": (alter(0, box=None), MANIFEST + "pieces.0.box = None"),
    "box_is_text": (alter(0, box="all"), MANIFEST + "pieces.0.box = 'all'"),
    # Pieces as JSON.
    "pieces_are_null": (set_tensor("w", pieces=None), MANIFEST + "pieces = None"),
    "pieces_are_text": (set_tensor("w", pieces=["w"]), MANIFEST + "pieces.0 = 'w'"),
    "piece_key_unknown": (set_piece("w", pickle=True), MANIFEST + "pieces.0.pickle = True: "),
    "piece_without_box": (
        edit(lambda content: content["tensors"]["w"]["pieces"][1].pop("box")),
        MANIFEST + "pieces.1.box is missing",
    ),
    "sha256_wrong": (alter(2, sha256=ZERO_SHA256), f"{FILES[2]}: tensor 'w[2:4,1:3]': sha256 does not match"),
    "sha256_short": (alter(2, sha256="00"), MANIFEST + "pieces.2.sha256 = '00'"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_with_one_line(checkpoint: Path, case: str) -> None:
    damage, expected = CASES[case]
    damage(checkpoint)
    assert_refused(checkpoint, expected)


def test_only_what_is_read_is_verified(checkpoint: Path) -> None:
    """Another part can be read, and one that needs the damaged piece cannot."""
    flip(FILES[1], -1)(checkpoint)
    manifest = store.read_manifest(checkpoint)
    wanted: dict[str, list[Box]] = {"w": [((0, 4), (1, 3)), ((0, 2), (0, 1))], "ids": [((1, 4),)]}
    found = reshard.read_boxes(checkpoint, manifest, wanted)
    np.testing.assert_array_equal(found["w"][0], W[:, 1:])
    np.testing.assert_array_equal(found["w"][1], W[:2, :1])
    np.testing.assert_array_equal(found["ids"][0], IDS[1:4])
    with pytest.raises(CheckpointError, match=r"r00001-00000\.safetensors: tensor 'w\[2:4,0:1\]': sha256 does not"):
        reshard.read_boxes(checkpoint, manifest, {"w": [((3, 4), (0, 2))]})


def test_a_file_that_is_not_in_the_manifest_is_not_looked_at(checkpoint: Path) -> None:
    (checkpoint / "tensors-r00007-00000.safetensors").write_bytes(b"of nobody")
    assert store.load(checkpoint)[0]["w"].tobytes() == W.tobytes()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"x": [((0, 1),)]}, "tensor 'x' is missing"),
        ({"w": [((0, 5), (0, 3))]}, "tensor 'w' has shape [4, 3]: no room for ((0, 5), (0, 3))"),
        ({"w": [((0, 4),)]}, "tensor 'w' has shape [4, 3]: no room for ((0, 4),)"),
        ({"w": [((3, 2), (0, 3))]}, "tensor 'w' has shape [4, 3]: no room for ((3, 2), (0, 3))"),
    ],
)
def test_what_is_not_there(checkpoint: Path, wanted: Any, expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        reshard.read_boxes(checkpoint, store.read_manifest(checkpoint), wanted)
    assert str(caught.value) == f"{checkpoint}: {expected}"


def test_many_pieces_are_checked_in_time(checkpoint: Path) -> None:
    """50,000 strips of one row, the last of them in the place of the one before: refused, and soon."""
    rows = 50_000
    boxes = [[[row, row + 1], [0, 3]] for row in range(rows)]
    boxes[-1] = boxes[-2]
    content = json.loads((checkpoint / "manifest.json").read_text())
    content["tensors"] = {"w": {"dtype": "F32", "shape": [rows, 3], "pieces": [piece(box) for box in boxes]}}
    edit(lambda before: before.update(content))(checkpoint)
    with pytest.raises(CheckpointError, match="tensor 'w': its pieces overlap"):
        layout.parse_manifest((checkpoint / "manifest.json").read_bytes(), "here")
