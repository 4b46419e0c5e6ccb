"""No space left for one of several writers, at whatever it writes: all are told which file and why, and soon."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.checkpoint import store
from tests.many_writers import assert_given_up, deal, outcomes

TENSORS = {"w": np.arange(30, dtype=np.float32).reshape(5, 6), "large": np.ones((60, 20), np.float32)}
TEMPORARY = ".tmp-step-00000003"


class FullDisk:
    """Files whose names begin with `stem` get so many bytes; then there is no space, once: removing makes some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stem: str, room_bytes: int) -> None:
        self.stem, self.room_bytes = stem, room_bytes
        self.open = Path.open
        monkeypatch.setattr(Path, "open", lambda path, *arguments, **options: self.opened(path, *arguments, **options))

    def opened(self, path: Path, *arguments: Any, **options: Any) -> Any:
        stream = self.open(path, *arguments, **options)
        if not path.name.startswith(self.stem):
            return stream
        real = stream.write

        def write(data: Any) -> Any:
            self.room_bytes -= len(data)
            if self.room_bytes < 0:
                self.room_bytes = 2**40
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(data)

        return Stream(stream, write)


class Stream:
    """A file with another `write`."""

    def __init__(self, stream: Any, write: Callable[[Any], Any]) -> None:
        self._stream, self.write = stream, write

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@pytest.mark.parametrize(
    ("file", "writer", "room_bytes"),
    [
        ("tensors-r00000-00000.safetensors", 0, 0),
        ("tensors-r00000-00000.safetensors", 0, 300),
        ("tensors-r00001-00000.safetensors", 1, 0),
        ("tensors-r00002-00000.safetensors", 2, 300),
        ("part-00001.tmp", 1, 0),
        ("manifest.json", 0, 0),
    ],
)
def test_a_full_disk_of_one_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, writer: int, room_bytes: int
) -> None:
    """Long before the deadline, and the checkpoint before stays; with space, the same save succeeds."""
    store.save(tmp_path, 2, TENSORS, {}, keep=9)
    portions = deal(TENSORS, 3, pieces=9)
    with monkeypatch.context() as patched:
        FullDisk(patched, file, room_bytes)
        started_s = time.monotonic()
        found = outcomes(tmp_path, portions, deadline_s=60)
        assert time.monotonic() - started_s < 20
    says = f"cannot write {tmp_path / TEMPORARY / file}: No space left on device"
    assert str(found[writer]) == says
    assert [str(found[index]) for index in {0, 1, 2} - {writer}] == [f"writer {writer} of 3: {says}"] * 2
    assert_given_up(tmp_path, ["step-00000002"])
    assert outcomes(tmp_path, portions) == [tmp_path / "step-00000003"] * 3
