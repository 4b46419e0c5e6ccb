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

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.writer import AsyncWriter
from ascend_moe_train.errors import CheckpointError

TENSORS = {"w": np.arange(5, dtype=np.float32)}


class SlowSave:
    """Stands in for `store.save`: waits until it may go on, and counts how many are at work at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = threading.Event()
        self.started: list[int] = []
        self.at_work = 0
        self.save = store.save
        monkeypatch.setattr(store, "save", self)

    def __call__(self, root: Path, step: int, *arguments: Any, keep: int) -> Path:
        self.started.append(step)
        self.at_work += 1
        assert self.at_work == 1
        assert self.may_go.wait(timeout=20)
        self.at_work -= 1
        return self.save(root, step, *arguments, keep=keep)


def test_writes_and_keeps(tmp_path: Path) -> None:
    with AsyncWriter(keep=2) as writer:
        assert writer.wait() is None
        for step in (1, 2, 3):
            writer.submit(tmp_path, step, TENSORS, {"step": step})
        assert writer.wait() == tmp_path / "step-00000003"
        assert writer.wait() is None
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_submit_returns_at_once_and_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowSave(monkeypatch)
    with AsyncWriter(keep=9) as writer:
        writer.submit(tmp_path, 1, TENSORS, {})
        assert store.newest(tmp_path) is None
        second = threading.Thread(target=writer.submit, args=(tmp_path, 2, TENSORS, {}))
        second.start()
        second.join(timeout=0.2)
        assert second.is_alive() and slow.started == [1]
        slow.may_go.set()
        second.join(timeout=20)
        assert not second.is_alive()
    assert slow.started == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("call", ["submit", "wait", "close"])
def test_failure_is_raised_once_by_the_next_call(tmp_path: Path, call: str) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("in the way")
    writer = AsyncWriter(keep=1)
    writer.submit(root, 1, TENSORS, {})
    arguments = (root, 2, TENSORS, {}) if call == "submit" else ()
    with pytest.raises(CheckpointError, match=r"cannot create .*checkpoints: File exists"):
        getattr(writer, call)(*arguments)
    writer.close()
    assert root.read_text() == "in the way"


def test_leaving_the_block_by_an_error_still_writes(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), AsyncWriter(keep=1) as writer:
        writer.submit(tmp_path, 1, TENSORS, {})
        raise ZeroDivisionError
    assert store.load_newest(tmp_path, pytest.fail) is not None


def test_interrupt_of_wait_keeps_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowSave(monkeypatch)
    # a MindSpore graph of another test may have left a handler that turns SIGINT into SIGTERM
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with AsyncWriter(keep=1) as writer:
        writer.submit(tmp_path, 1, TENSORS, {})
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
from ascend_moe_train.checkpoint.writer import AsyncWriter
tensors = {f"w{index}": np.full(2**20, index, np.float32) for index in range(16)}
with AsyncWriter(keep=2) as writer:
    for step in range(1, 10**6):
        writer.submit(Path(sys.argv[1]), step, tensors, {})
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
    assert not list(tmp_path.glob(".*"))
