"""Saving and loading: round trip, order of durability, keep, memory, and what a failing disk leaves behind."""

import errno
import os
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from ascend_moe_train.checkpoint import store
from ascend_moe_train.errors import CheckpointError
from tests.hf_folders import as_ours

TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "embed.weight": np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32),
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "brain": np.arange(-3, 3, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(3, 2),
    "counts": np.array([-1, 2**40], dtype=np.int64),
    "ids": np.arange(4, dtype=np.int32),
    "bytes": np.arange(7, dtype=np.uint8),
    "flags": np.array([True, False, True]),
    "scalar": np.array(1.5, dtype=np.float32),
    "empty": np.zeros((0, 3), dtype=np.float32),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}
META = {"config": {"optim": {"lr": 0.1}}, "rng": 2**70, "loss_scale": None, "note": "学习"}


def refuse(message: str) -> None:
    raise AssertionError(f"unexpected skip: {message}")


def names_in(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def test_round_trip(tmp_path: Path) -> None:
    path = store.save(tmp_path / "runs" / "checkpoints", 7, TENSORS, META, keep=1)
    tensors, meta = store.load(path)
    assert path.name == "step-00000007"
    assert_same(tensors, TENSORS)
    assert meta == META
    tensors["embed.weight"][0, 0] = 0.0


def test_several_files_open_with_safetensors(tmp_path: Path) -> None:
    path = store.save(tmp_path, 7, TENSORS, META, keep=1, max_file_bytes=40)
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 2
    merged: dict[str, Any] = {}
    for shard in shards:
        part = {name: as_ours(value) for name, value in load_file(shard).items()}
        assert len(part) == 1 or sum(array.nbytes for array in part.values()) <= 40
        assert not merged.keys() & part.keys()
        merged |= part
    assert_same(merged, TENSORS)
    assert_same(store.load(path)[0], TENSORS)
    with safe_open(path / shards[0].name, framework="numpy") as opened:
        assert set(opened.keys()) <= set(TENSORS)


def test_select_reads_only_what_is_asked(tmp_path: Path) -> None:
    path = store.save(tmp_path, 7, TENSORS, META, keep=1)
    tensors, _ = store.load(path, select=lambda name: name.startswith("e"))
    assert_same(tensors, {name: TENSORS[name] for name in ("embed.weight", "empty")})


def test_newest_and_keep(tmp_path: Path) -> None:
    assert store.newest(tmp_path / "none") is None
    assert store.load_newest(tmp_path / "none", refuse) is None
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    (tmp_path / "step-9").mkdir()
    assert store.newest(tmp_path) is None
    for step in (2, 10, 100, 1000):
        store.save(tmp_path, step, {"w": np.full(3, step, np.int32)}, {"step": step}, keep=2)
    assert names_in(tmp_path) == ["notes.txt", "step-00000100", "step-00001000", "step-9"]
    checkpoint = store.newest(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.names, checkpoint.meta) == (1000, ("w",), {"step": 1000})
    loaded = store.load_newest(tmp_path, refuse)
    assert loaded is not None
    assert loaded[0] == checkpoint
    assert loaded[1]["w"].tolist() == [1000] * 3


def test_same_step_again_is_replaced(tmp_path: Path) -> None:
    for value in (1, 2):
        path = store.save(tmp_path, 5, {"w": np.full(3, value, np.int32)}, {}, keep=1)
    assert names_in(tmp_path) == ["step-00000005"]
    assert store.load(path)[0]["w"].tolist() == [2] * 3


def test_folder_set_aside_is_loaded_and_gets_its_name_back(tmp_path: Path) -> None:
    path = store.save(tmp_path, 5, {"w": np.arange(3)}, {}, keep=1)
    path.rename(tmp_path / ".replaced-step-00000005")
    loaded = store.load_newest(tmp_path, refuse)
    assert loaded is not None and loaded[0].step == 5
    store.save(tmp_path, 4, {"w": np.arange(3)}, {}, keep=1)
    assert names_in(tmp_path) == ["step-00000004", "step-00000005"]


def test_damaged_later_checkpoint_does_not_push_out_good_ones(tmp_path: Path) -> None:
    for step in (100, 300):
        path = store.save(tmp_path, step, {"w": np.arange(3)}, {}, keep=9)
    (path / "manifest.json").unlink()
    store.save(tmp_path, 200, {"w": np.arange(3)}, {}, keep=1)
    assert names_in(tmp_path) == ["step-00000200", "step-00000300"]
    skipped: list[str] = []
    loaded = store.load_newest(tmp_path, skipped.append)
    assert loaded is not None and loaded[0].step == 200
    assert len(skipped) == 1 and "step-00000300" in skipped[0]


def test_unfinished_folders_go_and_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("stays")
    root = tmp_path / "checkpoints"
    (root / ".tmp-step-00000003").mkdir(parents=True)
    (root / ".tmp-step-00000003" / "tensors-00000.safetensors").write_bytes(b"half")
    (root / ".tmp-step-00000004").symlink_to(outside)
    (root / ".tmp-other").mkdir()
    store.save(root, 5, TENSORS, META, keep=1)
    assert names_in(root) == [".tmp-other", "step-00000005"]
    assert (outside / "precious").exists()


def test_durable_before_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(tmp_path, 1, TENSORS, META, keep=1)
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor: int) -> None:
        events.append("fsync " + str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path)))
        fsync(descriptor)

    def record_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    store.save(tmp_path, 2, TENSORS, META, keep=1)
    assert events == [
        "fsync .tmp-step-00000002/tensors-00000.safetensors",
        "fsync .tmp-step-00000002/manifest.json",
        "fsync .tmp-step-00000002",
        "rename .tmp-step-00000002 step-00000002",
        "fsync .",
        "rename step-00000001 .tmp-step-00000001",
        "fsync .",
    ]


def test_memory_does_not_grow_with_the_state(tmp_path: Path) -> None:
    tensors = {f"w{index}": np.ones((1024, 1024), np.float32) for index in range(8)}
    tracemalloc.start()
    try:
        path = store.save(tmp_path, 1, tensors, {}, keep=1)
        saving_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        loaded, _ = store.load(path)
        loading_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert saving_bytes < 2 * 2**20
    assert loading_bytes < sum(array.nbytes for array in loaded.values()) + 2 * 2**20


@pytest.mark.parametrize(
    ("tensors", "meta", "expected"),
    [
        ({"w": np.zeros(2, np.float64)}, {}, "tensor 'w' has dtype float64; allowed: float32"),
        ({"w": np.zeros(2, ">f4")}, {}, "tensor 'w' has dtype >f4; allowed: float32"),
        ({"w": np.array([None])}, {}, "tensor 'w' has dtype object; allowed"),
        ({"a b": np.zeros(2)}, {}, "tensor name 'a b' cannot be used"),
        ({"": np.zeros(2)}, {}, "tensor name '' cannot be used"),
        ({"__metadata__": np.zeros(2)}, {}, "tensor name '__metadata__' cannot be used"),
        ({}, {"guard": {"loss": [1.0, float("nan")]}}, "meta.guard.loss.1 is nan"),
        ({}, {"data": {3: 1}}, "meta.data has the key 3"),
        ({}, {"path": Path("x")}, "meta.path is a PosixPath"),
    ],
)
def test_what_cannot_be_stored(tmp_path: Path, tensors: dict[str, Any], meta: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        store.save(tmp_path, 1, tensors, meta, keep=1)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(("step", "keep"), [(-1, 1), (10**12, 1), (1, 0)])
def test_arguments_out_of_range(tmp_path: Path, step: int, keep: int) -> None:
    with pytest.raises(ValueError, match="step"):
        store.save(tmp_path, step, {}, {}, keep=keep)


class FailingDisk:
    """Lets a number of file system calls pass, then answers every further write with "no space left"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
        self.left = allowed
        self.failed_on = ""
        for owner, name in ((Path, "mkdir"), (Path, "rename"), (Path, "open"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self.limited(getattr(owner, name), name))

    def limited(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                self.failed_on = self.failed_on or name
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.left -= 1
            return call(*args, **kwargs)

        return wrapper


def test_disk_full_at_any_call(tmp_path: Path) -> None:
    """Every call of a save fails once; the checkpoints before it stay loadable and nothing half-written is left."""
    failed_on = set()
    for allowed in range(100):
        root = tmp_path / str(allowed)
        store.save(root, 1, TENSORS, META, keep=2)
        store.save(root, 2, TENSORS, META, keep=2)
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = FailingDisk(monkeypatch, allowed)
            try:
                store.save(root, 3, TENSORS, META, keep=2, max_file_bytes=40)
                break
            except CheckpointError as error:
                message = str(error)
        failed_on.add(disk.failed_on)
        assert str(root) in message and "No space left on device" in message and "\n" not in message
        loaded = store.load_newest(root, refuse)
        assert loaded is not None and loaded[0].step >= 2
        assert_same(loaded[1], TENSORS)
        store.save(root, 4, TENSORS, META, keep=1)
        assert names_in(root) == ["step-00000004"]
    assert allowed > 15
    assert failed_on == {"mkdir", "open", "fsync", "rename"}


def test_write_that_fails_midway_leaves_nothing(tmp_path: Path) -> None:
    """The operating system refuses the write itself, as it does when the disk fills up in the middle of a tensor."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"^cannot write .*tensors-00000\.safetensors: File too large$"):
            store.save(tmp_path, 3, {"w": np.zeros(2**20, np.float32)}, {}, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names_in(tmp_path) == []


@contextmanager
def as_nobody() -> Iterator[None]:
    """The superuser may write everywhere; such a test runs as somebody else."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_read_only_folder(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    path = store.save(root, 1, TENSORS, META, keep=1)
    for folder in (path, root):
        folder.chmod(0o555)
    # pytest's own folders, one more of them where several workers run tests; nobody else's
    for parent in (each for each in tmp_path.parents if each.name.startswith(("pytest-", "popen-"))):
        parent.chmod(parent.stat().st_mode | 0o055)
    tmp_path.chmod(0o755)
    try:
        with as_nobody():
            with pytest.raises(CheckpointError, match=r"^cannot create .*\.tmp-step-00000002: Permission denied$"):
                store.save(root, 2, TENSORS, META, keep=1)
            assert store.load_newest(root, refuse) is not None
            assert names_in(root) == ["step-00000001"]
    finally:
        for folder in (path, root):
            folder.chmod(0o755)


def test_root_is_a_file(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("")
    with pytest.raises(CheckpointError, match=r"cannot create .*checkpoints: File exists"):
        store.save(root, 1, TENSORS, META, keep=1)
    with pytest.raises(CheckpointError, match=r"cannot read .*checkpoints: Not a directory"):
        store.newest(root)


def test_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(tmp_path, 1, TENSORS, META, keep=1)
    assert names_in(tmp_path) == []
