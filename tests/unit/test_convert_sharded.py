"""Everything that reads a checkpoint, on one that several writers made in pieces: the same as on a whole one."""

import gc
import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train import boxes
from ascend_moe_train.checkpoint import layout, store
from ascend_moe_train.checkpoint.convert_export import export_folder
from ascend_moe_train.checkpoint.convert_import import import_folder
from ascend_moe_train.checkpoint.convert_source import VerifiedTensor, open_source
from ascend_moe_train.checkpoint.convert_target import ExportOptions
from ascend_moe_train.checkpoint.converted import MODEL
from ascend_moe_train.checkpoint.derive import resize_vocabulary, upcycle
from ascend_moe_train.checkpoint.describe import describe
from ascend_moe_train.checkpoint.merge import merge_adapters
from ascend_moe_train.checkpoint.peft import export_adapters
from ascend_moe_train.checkpoint.portion import Piece, Portion
from ascend_moe_train.checkpoint.starting import open_start, read_weights
from ascend_moe_train.errors import CheckpointError
from scripts.make_synthetic_hf import config_of, make
from tests.adapted import random_adapters, write_adapters
from tests.hf_folders import golden_folder, golden_model, read_folder, same_tensors, silent
from tests.many_writers import deal, save_together
from tests.unit.test_convert_proof import Interrupt
from tests.unit.test_merge import adapted_folder

MIXTRAL, QWEN3_MOE, LLAMA = "mixtral_tiny", "qwen3_moe_tiny", "llama_tiny"


def sharded(whole: Path, root: Path, num_writers: int = 3) -> Path:
    """The same checkpoint in random pieces."""
    tensors, meta = store.load(whole)
    step = store.read_manifest(whole).step
    path = save_together(root, step, deal(tensors, num_writers, seed=1, pieces=7), meta)
    assert sum(len(entry.pieces) > 1 for entry in store.read_manifest(path).tensors.values()) > 5
    return path


def one_and_other(tmp_path: Path, case: str, dtype: str = "BF16") -> tuple[Path, Path]:
    """A model in one file, and in pieces; without the files from Hugging Face, as a training run writes them."""
    import_folder(golden_folder(tmp_path / "hf", case, dtype), tmp_path / "imported", progress=silent)
    tensors, meta = store.load(tmp_path / "imported")
    whole = store.save(tmp_path / "whole", 5, tensors | {"optim.first.x": np.ones((4, 3), np.float32)}, meta, keep=1)
    return whole, sharded(whole, tmp_path / "sharded")


def same_files(one: Path, other: Path, names: str = "*") -> None:
    found = [{path.name: path.read_bytes() for path in each.glob(names) if path.is_file()} for each in (one, other)]
    assert found[0] and found[0] == found[1]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(MIXTRAL, "BF16"), (QWEN3_MOE, "F16"), ("deepseek_v3_tiny", "F32"), ("gpt_oss_tiny", "BF16"), (LLAMA, "F32")],
)
def test_export(tmp_path: Path, case: str, dtype: str) -> None:
    whole, parts = one_and_other(tmp_path, case, dtype)
    for source, out in ((whole, "from-whole"), (parts, "from-parts")):
        export_folder(source, tmp_path / out, ExportOptions(), max_shard_bytes=30_000, progress=silent)
    same_files(tmp_path / "from-whole", tmp_path / "from-parts")
    same_tensors(read_folder(tmp_path / "from-parts"), golden_model(case, dtype)[1])


@pytest.mark.parametrize(
    "derive",
    [
        lambda source, out: resize_vocabulary(source, out, vocab_size=80, progress=silent),
        lambda source, out: resize_vocabulary(source, out, vocab_size=50, progress=silent),
        lambda source, out: upcycle(source, out, num_experts=4, top_k=2, noise=0.1, seed=3, progress=silent),
    ],
    ids=["grown", "cut", "upcycled"],
)
def test_derived(tmp_path: Path, derive: Callable[[Path, Path], object]) -> None:
    whole, parts = one_and_other(tmp_path, LLAMA)
    derive(whole, tmp_path / "from-whole")
    derive(parts, tmp_path / "from-parts")
    same_files(tmp_path / "from-whole", tmp_path / "from-parts")


def test_start_and_description(tmp_path: Path) -> None:
    whole, parts = one_and_other(tmp_path, MIXTRAL)
    one, other = open_start(whole), open_start(parts)
    same_tensors(dict(read_weights(one, one.shapes)), dict(read_weights(other, other.shapes)))
    described = [describe(path) for path in (whole, parts)]
    assert described[1].files == 3 * described[0].files
    for key in ("parameters", "tensors", "data_bytes", "bytes_by_dtype", "elements_by_part", "model"):
        assert getattr(described[0], key) == getattr(described[1], key)


def test_adapters(tmp_path: Path) -> None:
    """Of a base in pieces, and in pieces themselves: merged, and as PEFT reads them."""
    adapted, lora = adapted_folder(tmp_path, MIXTRAL, ("attn.qkv", "experts.w13", "experts.w2"))
    start = open_start(adapted)
    assert start.base is not None
    base_parts = sharded(start.base.path, tmp_path / "base-parts")
    values = random_adapters(start.model, lora)
    adapted_parts = sharded(write_adapters(tmp_path / "x", base_parts, lora, values), tmp_path / "adapted-parts")
    for source, name in ((adapted, "whole"), (adapted_parts, "parts")):
        merge_adapters(source, tmp_path / f"merged-{name}", progress=silent)
        export_adapters(source, tmp_path / f"peft-{name}", "some/model")
    same_files(tmp_path / "merged-whole", tmp_path / "merged-parts", "*.safetensors")
    same_files(tmp_path / "peft-whole", tmp_path / "peft-parts")


@pytest.mark.parametrize("writer", range(3))
def test_a_damaged_piece_is_not_exported(tmp_path: Path, writer: int) -> None:
    _, parts = one_and_other(tmp_path, MIXTRAL)
    file = parts / f"tensors-r0000{writer}-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=rf"{file.name}: tensor 'model\..*': sha256 does not match the manifest"):
        export_folder(parts, tmp_path / "out", ExportOptions(), progress=silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", [MIXTRAL, "gpt_oss_tiny"])
def test_large_tensors_are_cut_at_import(tmp_path: Path, case: str) -> None:
    source = golden_folder(tmp_path / "hf", case)
    import_folder(source, tmp_path / "whole", progress=silent)
    import_folder(source, tmp_path / "cut", max_file_bytes=5000, max_piece_bytes=1500, progress=silent)
    whole, cut = (store.read_manifest(tmp_path / name) for name in ("whole", "cut"))
    assert all(len(entry.pieces) == 1 for entry in whole.tensors.values())
    assert max(len(entry.pieces) for entry in cut.tensors.values()) > 5
    sizes = [piece.size_bytes for file in cut.by_file().values() for piece in file.values()]
    assert max(sizes) <= 1500
    same_tensors(store.load(tmp_path / "cut")[0], store.load(tmp_path / "whole")[0])
    export_folder(tmp_path / "cut", tmp_path / "back", ExportOptions(), progress=silent)
    same_tensors(read_folder(tmp_path / "back"), golden_model(case)[1])


def test_an_interrupted_import_of_pieces_goes_on(tmp_path: Path) -> None:
    """Also where some pieces of a tensor are in finished files, and others are not."""
    source = golden_folder(tmp_path / "hf", MIXTRAL)
    small = partial(import_folder, source, max_file_bytes=3000, max_piece_bytes=1500)
    small(tmp_path / "whole", progress=silent)
    pieces = {key for file in store.read_manifest(tmp_path / "whole").by_file().values() for key in file}
    in_part = 0
    for share in (0.2, 0.4, 0.6, 0.8):
        out = tmp_path / f"out-{share}"
        with pytest.raises(KeyboardInterrupt):
            small(out, progress=Interrupt(share))
        lines = (tmp_path / f".{out.name}.partial" / "journal.jsonl").read_text().splitlines()[1:]
        finished = {key for line in lines for key in json.loads(line)["digests"]}
        tensors = {key.partition("[")[0] for key in finished}
        in_part += any(key.partition("[")[0] in tensors for key in pieces - finished)
        converted = small(out, progress=silent)
        assert 0 < converted.files_reused < converted.files
        same_files(out, tmp_path / "whole")
    assert in_part > 0


class Reads:
    """How a tensor is asked for: blocks of so many items, or pieces of so many bytes."""

    def __init__(self, tensor: VerifiedTensor, rng: np.random.Generator) -> None:
        self.tensor, self.rng = tensor, rng

    def __call__(self, items: int) -> list[Any]:
        found = []
        while items:
            count = int(self.rng.integers(1, items + 1))
            items -= count
            if self.rng.random() < 0.5:
                found.append(self.tensor.block((count,)))
            else:
                found += [piece.copy() for piece in self.tensor.pieces((count, 1))]
        return found


@pytest.mark.parametrize("seed", range(20))
def test_any_pieces_are_read_in_order(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascend_moe_train.checkpoint.convert_source.PIECE_BYTES", 40)
    rng = np.random.default_rng(seed)
    shape = tuple(int(size) for size in rng.integers(1, 7, int(rng.integers(0, 5))))
    array = rng.standard_normal(shape).astype(np.float32)
    path = save_together(tmp_path, 1, deal({"w": array}, 2, seed, pieces=10), {})
    tensor = VerifiedTensor(open_source(path), "w")
    found = Reads(tensor, rng)(array.size)
    tensor.check()
    assert np.concatenate(found).tobytes() == array.tobytes()
    unfinished = VerifiedTensor(open_source(path), "w")
    with pytest.raises(CheckpointError, match="tensor 'w': not all of it was read"):
        unfinished.check()


def peak_bytes(call: Callable[[], object]) -> int:
    # what other tests left makes Python collect seldom, and cycles of the call would count as long as they stay
    gc.freeze()
    gc.collect()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.unfreeze()


def test_memory_goes_by_the_largest_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a whole checkpoint (test_convert_proof), where every matrix is cut across its rows."""
    make(tmp_path / "hf", config_of(layers=2, experts=32, hidden=768, vocab_size=4096), shard_bytes=20 * 10**6)
    import_folder(tmp_path / "hf", tmp_path / "whole", progress=silent)
    tensors, meta = store.load(tmp_path / "whole")
    halves: list[dict[str, Portion]] = [{}, {}]
    for name, array in tensors.items():
        everything, size = boxes.whole(array.shape), array.shape[-1]
        for half, interval in zip(halves, ((0, size // 2), (size // 2, size)), strict=True):
            box = (*everything[:-1], interval)
            half[name] = Portion(array.shape, [Piece(box, boxes.view(array, box, everything))])
    path = save_together(tmp_path / "parts", 1, halves, meta)
    total_bytes = sum(array.nbytes for array in tensors.values())
    del tensors, halves
    exporting = partial(export_folder, path, tmp_path / "back", ExportOptions(), progress=silent)
    assert peak_bytes(exporting) < 20 * 10**6
    # how far the blocks of two threads meet in time is chance: one thread
    monkeypatch.setattr("ascend_moe_train.checkpoint.convert_write.num_workers", lambda largest_block_bytes: 1)
    deriving_bytes = [
        peak_bytes(partial(resize_vocabulary, source, tmp_path / name, vocab_size=4100, progress=silent))
        for source, name in ((tmp_path / "whole", "from-whole"), (path, "from-parts"))
    ]
    assert deriving_bytes[1] < deriving_bytes[0] + 5 * 10**6 < 25 * 10**6
    assert total_bytes > 80 * 10**6
    same_tensors(read_folder(tmp_path / "back"), read_folder(tmp_path / "hf"))


def test_the_layout_of_its_writers_is_in_meta(tmp_path: Path) -> None:
    """It is the caller's, says how the run was spread, and decides nothing here."""
    portions = deal({MODEL + "w": np.ones((4, 4), np.float32)}, 2)
    path = save_together(tmp_path, 1, portions, {"layout": {"tp": 2, "ep": 1}})
    assert json.loads((path / layout.MANIFEST_NAME).read_text())["meta"]["layout"] == {"tp": 2, "ep": 1}
    assert store.read_manifest(path).meta["layout"] == {"tp": 2, "ep": 1}
