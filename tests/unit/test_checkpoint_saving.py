"""Several writers of one checkpoint: what they leave, in which order, and what each of them is told when one fails."""

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.checkpoint import layout, parts, saving, store
from ascend_moe_train.checkpoint.portion import Piece, Portion, whole
from ascend_moe_train.checkpoint.saving import Writer
from ascend_moe_train.checkpoint.writer import AsyncWriter
from ascend_moe_train.errors import CheckpointError
from tests.hf_folders import same_tensors
from tests.many_writers import assert_given_up, deal, names_in, outcomes, save, save_together

TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "w": np.arange(30, dtype=np.float32).reshape(5, 6),
    "ids": np.arange(7, dtype=np.int64),
    "scalar": np.array(2.5, np.float32),
    "flags": np.array([True, False, True]),
    "none": np.zeros((0, 3), np.float16),
}
TEMPORARY = ".tmp-step-00000003"


@pytest.mark.parametrize("num_writers", [1, 2, 5])
def test_one_folder_of_all_writers(tmp_path: Path, num_writers: int) -> None:
    path = save_together(tmp_path, 3, deal(TENSORS, num_writers, seed=1), {"layout": {"tp": 2}}, max_file_bytes=60)
    assert names_in(tmp_path) == ["step-00000003"]
    tensors, meta = store.load(path)
    same_tensors(tensors, TENSORS)
    assert meta == {"layout": {"tp": 2}}
    files = names_in(path)
    assert files.pop(0) == "manifest.json" and all(file.endswith(".safetensors") for file in files)
    by_writer = {file[:14] for file in files}
    assert by_writer <= {f"tensors-r{index:05d}" for index in range(num_writers)} or num_writers == 1
    assert len(by_writer) == num_writers or num_writers == 1


def test_same_bytes_whoever_is_first(tmp_path: Path) -> None:
    """No time, identity or order of arrival is in a checkpoint."""
    portions = deal(TENSORS, 3)
    one, other = (save_together(tmp_path / name, 3, portions, {"a": 1}) for name in ("one", "other"))
    assert names_in(one) == names_in(other)
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names_in(one))


def test_older_ones_go_and_the_same_step_is_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3):
        portions = deal({"w": np.full((4, 4), step, np.float32)}, 3, seed=step)
        save_together(tmp_path, step, portions, {}, keep=2)
    assert names_in(tmp_path) == ["step-00000002", "step-00000003"]
    assert store.load(tmp_path / "step-00000003")[0]["w"].tolist() == [[3.0] * 4] * 4


def test_durable_before_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every writer's files are on the disk before its part tells of them, and all before the folder has its name."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor: int) -> None:
        events.append("fsync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def record_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    outcomes(tmp_path, deal(TENSORS, 3))
    for writer in (1, 2):
        order = [
            f"fsync tensors-r0000{writer}-00000.safetensors",
            f"fsync part-0000{writer}.tmp",
            f"rename part-0000{writer}.tmp part-0000{writer}.json",
        ]
        assert [event for event in events if event in order] == order
    assert events[-4:] == [
        "fsync manifest.json",
        f"fsync {TEMPORARY}",
        f"rename {TEMPORARY} step-00000003",
        f"fsync {tmp_path.name}",
    ]
    assert all(
        events.index(f"rename part-0000{writer}.tmp part-0000{writer}.json") < len(events) - 4 for writer in (1, 2)
    )


def test_the_others_return_when_the_folder_has_its_name(tmp_path: Path) -> None:
    portions = deal(TENSORS, 2)
    store.save(tmp_path, 3, {"old": np.zeros(3, np.float32)}, {}, keep=9)
    saving.prepare(tmp_path, 3, 2)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(save, tmp_path, 3, portions[1], 1, 2)
        while not (tmp_path / TEMPORARY / "part-00001.json").exists():
            time.sleep(0.01)
        time.sleep(0.05)
        assert not second.done(), "the checkpoint that was there before was taken for the new one"
        first = save(tmp_path, 3, portions[0], 0, 2)
        assert first == second.result(timeout=20)
    same_tensors(store.load(first)[0], TENSORS)


@pytest.mark.parametrize("absent", [1, 2, 3])
def test_a_missing_writer_is_named(tmp_path: Path, absent: int) -> None:
    store.save(tmp_path, 2, TENSORS, {}, keep=9)
    started_s = time.monotonic()
    found = outcomes(tmp_path, deal(TENSORS, 4), absent, deadline_s=0.4)
    assert 0.3 < time.monotonic() - started_s < 10
    assert str(found[0]) == f"{tmp_path / TEMPORARY}: nothing from writer {absent} of 4 after 0.4 s"
    for index in {1, 2, 3} - {absent}:
        assert f"nothing from writer {absent} of 4 after 0.4 s" in str(found[index])
    assert_given_up(tmp_path, ["step-00000002"])
    assert outcomes(tmp_path, deal(TENSORS, 4))[0] == tmp_path / "step-00000003"


def test_many_missing_writers_are_named_in_one_line(tmp_path: Path) -> None:
    saving.prepare(tmp_path, 3, 20)
    with pytest.raises(CheckpointError, match=r"nothing from writers 1, 2, 3, 4, 5, 6, 7, 8 and 11 more of 20 after 0"):
        save(tmp_path, 3, {}, 0, 20, deadline_s=0.05)


def test_a_missing_first_writer_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"save\.json: not there after 0\.1 s: writer 0 has not begun, or does not"
    ):
        save(tmp_path, 3, {}, 1, 2, deadline_s=0.1)
    saving.prepare(tmp_path, 3, 2)
    with pytest.raises(CheckpointError, match=r"nothing from writer 0 of 2 after 0\.1 s"):
        save(tmp_path, 3, deal(TENSORS, 2)[1], 1, 2, deadline_s=0.1)
    assert store.newest(tmp_path) is None


def test_any_failure_of_a_writer_is_told(tmp_path: Path) -> None:
    portions = [{}, {"w": whole(np.zeros(3, np.float64))}]
    found = outcomes(tmp_path, portions)
    assert "tensor 'w' has dtype float64; allowed" in str(found[1])
    assert str(found[0]) == f"writer 1 of 2: {found[1]}"
    assert_given_up(tmp_path)


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ([Piece(((1, 5), (0, 6)), TENSORS["w"][1:])], "tensor 'w': its pieces overlap"),
        ([Piece(((3, 5), (0, 6)), TENSORS["w"][3:])], "tensor 'w': its pieces leave out 6 of 30 elements"),
        (
            [Piece(((2, 5), (0, 6)), TENSORS["w"][2:].astype(np.float16))],
            "tensor 'w' is F16 [5, 6] for writer 1, but F32",
        ),
        ([], "tensor 'w': its pieces leave out 18 of 30 elements"),
    ],
)
def test_writers_that_do_not_agree(tmp_path: Path, second: list[Piece], says: str) -> None:
    portions = [
        {"w": Portion((5, 6), [Piece(((0, 2), (0, 6)), TENSORS["w"][:2])])},
        {"w": Portion((5, 6), second)},
    ]
    first, other = outcomes(tmp_path, portions)
    assert isinstance(first, CheckpointError) and says in str(first)
    assert str(other) == f"writer 0 of 2: {first}"
    assert_given_up(tmp_path)


def test_other_shapes_of_one_tensor(tmp_path: Path) -> None:
    portions = [{"w": whole(np.zeros(3, np.float32))}, {"w": whole(np.zeros(4, np.float32))}]
    assert r"tensor 'w' is F32 [4] for writer 1, but F32 [3] for another" in str(outcomes(tmp_path, portions)[0])


def test_what_an_earlier_save_left_is_never_mixed_in(tmp_path: Path) -> None:
    """The parts and files of all writers but the first are there from a save that was killed; they do not count."""
    old = deal({"w": np.zeros((6, 6), np.float32)}, 3, seed=5)
    outcomes(tmp_path, old, absent=0, deadline_s=0.1)
    left = tmp_path / TEMPORARY
    assert {"part-00001.json", "part-00002.json", "save.json"} <= set(names_in(left))
    shutil.copytree(left, tmp_path / "copy")
    saving.prepare(tmp_path, 3, 3)
    assert names_in(left) == ["save.json"]
    # and even one that is put back, by a process of the earlier run that is still there
    for name in ("part-00001.json", "part-00002.json"):
        shutil.copy(tmp_path / "copy" / name, left)
    with pytest.raises(CheckpointError, match=r"part-0000\d\.json: of another save: do two runs write here\?"):
        save(tmp_path, 3, deal({"w": np.ones((6, 6), np.float32)}, 3, seed=5)[0], 0, 3)
    assert store.steps(tmp_path) == []


def test_a_writer_of_an_earlier_save_leaves_the_new_one_alone(tmp_path: Path) -> None:
    """As a process that its run has left behind: it can neither hand in nor remove anything."""
    saving.prepare(tmp_path, 3, 2)
    left_behind = parts.join_save(tmp_path / TEMPORARY, 2, 0.0)
    saving.prepare(tmp_path, 3, 2)
    files = ["save.json", "tensors-r00000-00000.safetensors", "tensors-r00001-00000.safetensors"]
    for name in files[1:]:
        (tmp_path / TEMPORARY / name).write_bytes(b"of the new save")
    for index in (0, 1):
        with pytest.raises(CheckpointError, match=r"\.tmp-step-00000003: was removed while it was being written"):
            left_behind.give_up(index, CheckpointError("no space"))
    with pytest.raises(CheckpointError, match="was removed while it was being written"):
        left_behind.hand_in(1, {})
    with pytest.raises(CheckpointError, match="was removed while it was being written"):
        left_behind.await_name(tmp_path / "step-00000003", 5.0)
    assert names_in(tmp_path / TEMPORARY) == files


def test_a_part_of_another_place(tmp_path: Path) -> None:
    portions = deal(TENSORS, 3)
    outcomes(tmp_path, portions, absent=0, deadline_s=0.1)
    folder = tmp_path / TEMPORARY
    shutil.copy(folder / "part-00001.json", folder / "part-00002.json")
    with pytest.raises(CheckpointError, match=r"part-00002\.json: of another save"):
        save(tmp_path, 3, portions[0], 0, 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "part-00001.json: not a valid JSON message"),
        (b"{}", "part-00001.json: not a checkpoint message: format is not 'amt-checkpoint-part'"),
        (b"\x80\x04pickle", "part-00001.json: not a valid JSON message"),
        (b"edited", "part-00001.json: sha256 does not match the content: damaged or edited"),
    ],
)
def test_a_damaged_part(tmp_path: Path, text: bytes, says: str) -> None:
    portions = deal(TENSORS, 2)
    outcomes(tmp_path, portions, absent=0, deadline_s=0.1)
    part = tmp_path / TEMPORARY / "part-00001.json"
    part.write_bytes(part.read_bytes().replace(b'"writer": 1', b'"writer": 0') if text == b"edited" else text)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 3, portions[0], 0, 2)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert_given_up(tmp_path)


def test_a_file_that_is_not_what_its_part_says(tmp_path: Path) -> None:
    """As where the writers have folders of the same name, and not the same folder."""
    portions = deal(TENSORS, 2)
    outcomes(tmp_path, portions, absent=0, deadline_s=0.1)
    (tmp_path / TEMPORARY / "tensors-r00001-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensors-r00001-00000\.safetensors: missing"):
        save(tmp_path, 3, portions[0], 0, 2)
    assert_given_up(tmp_path)


def test_nothing_else_stays_in_the_folder(tmp_path: Path) -> None:
    portions = deal(TENSORS, 2)
    outcomes(tmp_path, portions, absent=0, deadline_s=0.1)
    (tmp_path / TEMPORARY / "tensors-r00001-00009.safetensors").write_bytes(b"of nobody")
    (tmp_path / TEMPORARY / "folder").mkdir()
    path = save(tmp_path, 3, portions[0], 0, 2)
    assert set(names_in(path)) == {"manifest.json", *store.read_manifest(path).by_file()}


def test_another_number_of_writers(tmp_path: Path) -> None:
    saving.prepare(tmp_path, 3, 2)
    with pytest.raises(CheckpointError, match=r"save\.json: 2 writers were announced, but there are 3"):
        save(tmp_path, 3, {}, 1, 3)


@pytest.mark.parametrize(("index", "count"), [(1, 1), (-1, 2), (0, 0), (0, parts.MAX_WRITERS + 1)])
def test_no_such_writer(index: int, count: int) -> None:
    with pytest.raises(ValueError, match="writer"):
        Writer(index=index, count=count)


@pytest.mark.parametrize(
    "portion",
    [
        Portion((4,), [Piece(((0, 5),), np.zeros(5, np.float32))]),
        Portion((4,), [Piece(((0, 3),), np.zeros(4, np.float32))]),
        Portion((4,), [Piece(((0, 2),), np.zeros(2, np.float32)), Piece(((2, 4),), np.zeros(2, np.float16))]),
    ],
)
def test_a_piece_that_is_no_part_of_its_tensor(tmp_path: Path, portion: Portion) -> None:
    saving.prepare(tmp_path, 3)
    with pytest.raises(ValueError, match="tensor 'w'"):
        saving.save_part(tmp_path, 3, {"w": portion}, {}, keep=1)
    assert names_in(tmp_path) == []


def test_writers_in_threads(tmp_path: Path) -> None:
    """As ranks use it: prepare, wait for each other, submit; the next save waits for the one before."""
    barrier = threading.Barrier(3)
    tensors = {step: {"w": np.full((6, 5), step, np.float32)} for step in (1, 2, 3)}
    portions = {step: deal(tensors[step], 3, seed=step) for step in tensors}

    def run(index: int) -> Path | None:
        with AsyncWriter(keep=2, writer=Writer(index=index, count=3, deadline_s=20)) as writer:
            for step in tensors:
                writer.prepare(tmp_path, step)
                barrier.wait(timeout=20)
                writer.submit_part(tmp_path, step, portions[step][index], {"step": step})
            return writer.wait()

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(run, range(3))) == {tmp_path / "step-00000003"}
    assert names_in(tmp_path) == ["step-00000002", "step-00000003"]
    for step in (2, 3):
        same_tensors(store.load(tmp_path / layout.folder_name(step))[0], tensors[step])
