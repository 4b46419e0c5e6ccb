"""The writer thread: one write in flight, errors reach the caller, an interrupt loses nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.checkpoint import saving, store
from ascend_moe_train.checkpoint.portion import whole
from ascend_moe_train.checkpoint.writer import AsyncWriter
from ascend_moe_train.errors import CheckpointError

PORTIONS = {"w": whole(np.arange(5, dtype=np.float32))}


def save_with(writer: AsyncWriter, root: Path, step: int) -> None:
    writer.prepare(root, step)
    writer.submit_part(root, step, PORTIONS, {"step": step})


class SlowSave:
    """Stands in for `saving.save_part`: waits until it may go on, and counts how many are at work at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = threading.Event()
        self.started: list[int] = []
        self.at_work = 0
        self.save = saving.save_part
        monkeypatch.setattr(saving, "save_part", self)

    def __call__(self, root: Path, step: int, *arguments: Any, **options: Any) -> Path:
        self.started.append(step)
        self.at_work += 1
        assert self.at_work == 1
        assert self.may_go.wait(timeout=20)
        self.at_work -= 1
        return self.save(root, step, *arguments, **options)


def test_writes_and_keeps(tmp_path: Path) -> None:
    with AsyncWriter(keep=2) as writer:
        assert writer.wait() is None
        for step in (1, 2, 3):
            save_with(writer, tmp_path, step)
        assert writer.wait() == tmp_path / "step-00000003"
        assert writer.wait() is None
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_submit_returns_at_once_and_prepare_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowSave(monkeypatch)
    with AsyncWriter(keep=9) as writer:
        save_with(writer, tmp_path, 1)
        assert store.newest(tmp_path) is None
        second = threading.Thread(target=save_with, args=(writer, tmp_path, 2))
        second.start()
        second.join(timeout=0.2)
        assert second.is_alive() and slow.started == [1]
        slow.may_go.set()
        second.join(timeout=20)
        assert not second.is_alive()
    assert slow.started == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("call", ["prepare", "submit_part", "wait", "close"])
def test_failure_is_raised_once_by_the_next_call(tmp_path: Path, call: str) -> None:
    writer = AsyncWriter(keep=1)
    writer.prepare(tmp_path, 1)
    (tmp_path / ".tmp-step-00000001" / "tensors-00000.safetensors").write_text("in the way")
    writer.submit_part(tmp_path, 1, PORTIONS, {})
    arguments = {"prepare": (tmp_path, 2), "submit_part": (tmp_path, 2, PORTIONS, {})}.get(call, ())
    with pytest.raises(CheckpointError, match=r"cannot write .*tensors-00000\.safetensors: File exists"):
        getattr(writer, call)(*arguments)
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_failure_to_prepare_is_raised_at_once(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("in the way")
    with AsyncWriter(keep=1) as writer, pytest.raises(CheckpointError, match=r"cannot create .*checkpoints: File exi"):
        writer.prepare(root, 1)
    assert root.read_text() == "in the way"


def test_leaving_the_block_by_an_error_still_writes(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), AsyncWriter(keep=1) as writer:
        save_with(writer, tmp_path, 1)
        raise ZeroDivisionError
    assert store.load_newest(tmp_path, pytest.fail) is not None


def test_interrupt_of_wait_keeps_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowSave(monkeypatch)
    # a MindSpore graph of another test may have left a handler that turns SIGINT into SIGTERM
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with AsyncWriter(keep=1) as writer:
        save_with(writer, tmp_path, 1)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            writer.wait()
        slow.may_go.set()
        assert writer.wait() == tmp_path / "step-00000001"
    assert store.load_newest(tmp_path, pytest.fail) is not None


INTERRUPTED_PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
from ascend_moe_train.checkpoint.portion import whole
from ascend_moe_train.checkpoint.writer import AsyncWriter
portions = {f"w{index}": whole(np.full(2**20, index, np.float32)) for index in range(16)}
with AsyncWriter(keep=2) as writer:
    for step in range(1, 10**6):
        writer.prepare(Path(sys.argv[1]), step)
        writer.submit_part(Path(sys.argv[1]), step, portions, {})
        print(step, flush=True)
"""


def test_control_c_of_a_program_leaves_only_complete_checkpoints(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED_PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    loaded = store.load_newest(tmp_path, pytest.fail)
    assert loaded is not None
    last_submitted = int(output.split()[-1]) if output else 1
    # The interrupt may fall between the submission and the line that tells of it.
    assert loaded[0].step in (last_submitted, last_submitted + 1)
    # It may also fall between the preparation and the submission of the next one.
    assert not any(list(folder.iterdir()) for folder in tmp_path.glob(".*"))
