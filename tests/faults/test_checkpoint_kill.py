"""Kill -9 in the middle of a save: the newest checkpoint always loads, and none that was complete is lost.

A child process saves again and again. It is killed at random moments, and, in a second test, right before each single
operation on the file system that a save consists of.
"""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.checkpoint import store

KEEP = 2
# Every tensor is filled with the step, so that a mixture of two checkpoints shows. Several files, a few megabytes.
CHILD = """
import os, signal, sys
from pathlib import Path
import numpy as np
from ascend_moe_train.checkpoint import store

def tensors(step):
    return {f"w{index}": np.full((256, 300), step, np.float32) for index in range(12)}

def save(root, step):
    store.save(root, step, tensors(step), {"step": step}, keep=2, max_file_bytes=2**20)
"""
SAVE_FOREVER = """
root, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    save(root, step)
    print(step, flush=True)
    step += 1
"""
# For each count, a fork saves and dies by a kill just before that many file system operations (audit events) are done.
DIE_AT_EACH_OPERATION = """
EVENTS = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}

def die_at(count):
    left = [count]
    def hook(event, arguments):
        if event in EVENTS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

for count in range(1000):
    root = Path(sys.argv[1]) / str(count)
    for step in (1, 2):
        save(root, step)
    child = os.fork()
    if child == 0:
        die_at(count)
        save(root, int(sys.argv[2]))
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(count)
        break
"""


def load_and_check(root: Path) -> int | None:
    """The step of the newest checkpoint; fails when any that is visible is damaged or mixes two steps."""
    for path in root.glob("step-*"):
        store.load(path)
    loaded = store.load_newest(root, pytest.fail)
    if loaded is None:
        return None
    checkpoint, tensors = loaded
    assert checkpoint.meta == {"step": checkpoint.step}
    assert len(tensors) == 12
    assert all((array == np.float32(checkpoint.step)).all() for array in tensors.values())
    return checkpoint.step


def run_child(program: str, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHILD + program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, **options)


def test_kill_at_random_moments(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    newest_step, unfinished = 0, 0
    for _ in range(25):
        process = run_child(SAVE_FOREVER, tmp_path, newest_step + 1)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(generator.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        finished = [newest_step + 1, *map(int, process.communicate(timeout=60)[0].split())]
        assert process.returncode == -signal.SIGKILL
        unfinished += any(entry.name.startswith(".") for entry in tmp_path.iterdir())
        step = load_and_check(tmp_path)
        # The kill may fall between the end of a save and the line that tells of it.
        assert step in (finished[-1], finished[-1] + 1)
        assert step is not None
        newest_step = step
    assert unfinished > 0, "no kill fell into a save: the test shows nothing"
    store.save(tmp_path, newest_step + 1, {}, {}, keep=KEEP)
    assert len(list(tmp_path.iterdir())) == KEEP


@pytest.mark.parametrize("step", [3, 2], ids=["new_step", "same_step_again"])
def test_kill_before_each_operation(tmp_path: Path, step: int) -> None:
    process = run_child(DIE_AT_EACH_OPERATION, tmp_path, step)
    operations = int(process.communicate(timeout=120)[0])
    assert process.returncode == 0
    assert operations > 15
    steps = [load_and_check(tmp_path / str(count)) for count in range(operations + 1)]
    assert steps[0] == 2 and steps[-1] == step
    assert steps == sorted(steps, key=lambda found: found or 0)
    for count in range(operations + 1):
        root = tmp_path / str(count)
        store.save(root, 4, {}, {}, keep=1)
        assert [entry.name for entry in root.iterdir()] == ["step-00000004"]
