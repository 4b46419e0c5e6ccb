"""Any part of any tensor, whatever writers cut it into: against slices of the whole."""

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ascend_moe_train import boxes
from ascend_moe_train.boxes import Box
from ascend_moe_train.checkpoint import layout, store
from ascend_moe_train.checkpoint.reshard import read_boxes
from ascend_moe_train.errors import CheckpointError
from tests.hf_folders import as_ours, same_tensors
from tests.many_writers import deal, save_together

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.uint8, np.bool_]


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return rng.integers(0, 2**8, shape).astype(DTYPES[int(rng.integers(len(DTYPES)))])


def random_box(rng: np.random.Generator, shape: tuple[int, ...]) -> Box:
    """Of any size, empty ones among them."""
    return tuple((int(a), int(b)) for a, b in (np.sort(rng.integers(0, size + 1, 2)) for size in shape))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), min_size=1, max_size=4),
    num_writers=st.integers(1, 4),
    pieces=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_any_boxes_of_any_partition(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    num_writers: int,
    pieces: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    tensors = {f"t{index}": random_tensor(rng, shape) for index, shape in enumerate(shapes)}
    path = save_together(
        tmp_path_factory.mktemp("root"),
        7,
        deal(tensors, num_writers, seed, pieces),
        {"layout": {"writers": num_writers}},
        max_file_bytes=int(rng.integers(1, 2000)),
        max_piece_bytes=int(rng.integers(8, 500)),
    )
    manifest = store.read_manifest(path)
    assert manifest.meta == {"layout": {"writers": num_writers}}
    wanted = {name: [random_box(rng, array.shape) for _ in range(3)] for name, array in tensors.items()}
    found = read_boxes(path, manifest, wanted)
    assert list(found) == list(wanted)
    for name, arrays in found.items():
        for box, array in zip(wanted[name], arrays, strict=True):
            expected = tensors[name][tuple(slice(start, stop) for start, stop in box)]
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            assert array.tobytes() == expected.tobytes()
    same_tensors(store.load(path)[0], tensors)


def test_files_open_with_safetensors(tmp_path: Path) -> None:
    """A piece has its tensor's name there, and beside it, where it is a part, which part."""
    tensors: dict[str, Any] = {"w": np.arange(24, dtype=np.float32).reshape(4, 6), "half": np.ones(3, np.float16)}
    path = save_together(tmp_path, 1, deal(tensors, 3, seed=2), {}, max_piece_bytes=32)
    again = {name: np.zeros_like(array) for name, array in tensors.items()}
    seen = set()
    for file in path.glob("*.safetensors"):
        assert file.name.startswith("tensors-r0000")
        for key, value in load_file(file).items():
            name, _, box = key.partition("[")
            index = tuple(slice(*map(int, each.split(":"))) for each in box.rstrip("]").split(",")) if box else ...
            again[name][index] = as_ours(value)
            seen.add(key)
    same_tensors(again, tensors)
    assert len(seen) > 5 and "half[0:3]" not in seen


def test_a_large_tensor_is_cut(tmp_path: Path) -> None:
    tensors = {"w": np.arange(60, dtype=np.float32).reshape(3, 20), "row": np.arange(9.0, dtype=np.float32)}
    path = store.save(tmp_path, 1, tensors, {}, keep=1, max_file_bytes=200, max_piece_bytes=100)
    manifest = store.read_manifest(path)
    cuts = {name: [piece.box for piece in entry.pieces] for name, entry in manifest.tensors.items()}
    assert cuts == {"w": [((row, row + 1), (0, 20)) for row in range(3)], "row": [((0, 9),)]}
    assert len(manifest.by_file()) == 2
    same_tensors(store.load(path)[0], tensors)


def test_memory_is_the_result_and_one_piece(tmp_path: Path) -> None:
    """Of 64 MB in pieces of 2 MB: columns that cut across every piece."""
    tensors = {f"w{index}": np.ones((2048, 2048), np.float32) for index in range(4)}
    path = store.save(tmp_path, 1, tensors, {}, keep=1, max_piece_bytes=2**21)
    manifest = store.read_manifest(path)
    wanted: dict[str, list[Box]] = {name: [((0, 2048), (0, 256)), ((0, 1024), (512, 600))] for name in tensors}
    tracemalloc.start()
    try:
        found = read_boxes(path, manifest, wanted)
        reading_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    result_bytes = sum(array.nbytes for arrays in found.values() for array in arrays)
    assert result_bytes < 11 * 2**20
    assert reading_bytes < result_bytes + 2**21 + 2**20


def test_saving_holds_one_piece(tmp_path: Path) -> None:
    """Columns of a tensor, which are not contiguous, in pieces of 2 MB."""
    whole = np.ones((4096, 2048), np.float32)
    portions = deal({"w": whole.T}, 1, pieces=1)
    tracemalloc.start()
    try:
        save_together(tmp_path, 1, portions, {}, max_piece_bytes=2**21)
        saving_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert saving_bytes < 2**21 + 2**20


def test_a_flat_range_comes_as_boxes(tmp_path: Path) -> None:
    """As a rank with flat parts of its tensors reads them."""
    array = np.arange(5 * 7 * 3, dtype=np.float32).reshape(5, 7, 3)
    path = save_together(tmp_path, 1, deal({"w": array}, 2, seed=4, pieces=9), {})
    manifest = store.read_manifest(path)
    for start, stop in ((0, 105), (0, 40), (40, 80), (80, 105), (22, 23)):
        found = read_boxes(path, manifest, {"w": list(boxes.flat_boxes(array.shape, start, stop))})
        np.testing.assert_array_equal(np.concatenate([each.ravel() for each in found["w"]]), np.arange(start, stop))


def test_a_name_like_that_of_a_piece(tmp_path: Path) -> None:
    """It is refused where it would be taken for one, and only there."""
    tensors = {"w": np.zeros(4, np.float32), "w[0:2]": np.ones(2, np.float32)}
    path = store.save(tmp_path, 1, tensors, {}, keep=9)
    same_tensors(store.load(path)[0], tensors)
    with pytest.raises(CheckpointError, match=r"two pieces of writer 0 have the name 'w\[0:2\]'"):
        store.save(tmp_path, 2, tensors, {}, keep=9, max_piece_bytes=8)
    assert store.steps(tmp_path) == [1]


def test_boxes_are_cut_to_the_size_that_is_read() -> None:
    """A writer's box may be larger than a piece; every piece is one that a reader takes."""
    assert layout.MAX_PIECE_BYTES == 2**28
    box = ((0, 2**20), (0, 2**10))
    cut = list(boxes.cut(box, layout.MAX_PIECE_BYTES // 4))
    assert len(cut) == 16 and boxes.cover_problem((2**20, 2**10), cut) is None
    assert all(boxes.volume(piece) * 4 <= layout.MAX_PIECE_BYTES for piece in cut)
