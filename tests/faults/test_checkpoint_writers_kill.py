"""Kill -9 of any of several writer processes in a save: the checkpoint before stays, and the next save succeeds."""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ascend_moe_train.checkpoint import store
from tests.many_writers import deal, save_together
from tests.writer_processes import GAVE_UP, NUM_WRITERS, tensors

ALL_WELL = [0] * NUM_WRITERS


class Writers:
    """The process that starts writers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, root: Path, step: int, deadline_s: float = 60.0, *kill: float) -> list[int]:
        """Has a checkpoint saved; the exit codes of all writers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(root, step, deadline_s, *kill, file=self._process.stdin, flush=True)
        return [int(code) for code in self._process.stdout.readline().split()]


@pytest.fixture
def writers() -> Iterator[Writers]:
    command = [sys.executable, "-m", "tests.writer_processes"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Writers(process)
        process.communicate(timeout=60)


def load_and_check(root: Path) -> int:
    """The step of the newest checkpoint; fails when any that is visible is damaged or mixes two steps."""
    for path in root.glob("step-*"):
        found, meta = store.load(path)
        step = meta["step"]
        assert path.name == f"step-{step:08d}" and found.keys() == tensors(0).keys()
        assert all((array == np.float32(step)).all() for array in found.values())
    newest = store.newest(root)
    assert newest is not None
    return newest.step


def test_kill_at_random_moments(tmp_path: Path, writers: Writers) -> None:
    """20 of them fall into a save that is not finished."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    assert writers(tmp_path, 1) == ALL_WELL
    started_s = time.monotonic()
    assert writers(tmp_path, 2) == ALL_WELL
    duration_s = time.monotonic() - started_s
    newest, unfinished = 2, 0
    while unfinished < 20:
        victim, delay_s = generator.randrange(NUM_WRITERS), generator.uniform(0.0, duration_s)
        codes = writers(tmp_path, newest + 1, 0.3, victim, delay_s)
        assert codes[victim] in (0, -signal.SIGKILL)
        assert all(code in (0, GAVE_UP) for index, code in enumerate(codes) if index != victim)
        step = load_and_check(tmp_path)
        assert step in (newest, newest + 1)
        if 0 in codes:
            assert step == newest + 1, "a writer was told of a checkpoint that is not there"
        unfinished += step == newest
        # what is left of the save that was cut is in the way of none that follows
        if unfinished % 4 == 0:
            assert writers(tmp_path, step + 1) == ALL_WELL
            step += 1
        newest = step
    assert load_and_check(tmp_path) == newest
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{newest - 1:08d}", f"step-{newest:08d}"]


@pytest.mark.parametrize(("victim", "step"), [(0, 3), (0, 2), (1, 3)], ids=["first", "first_same_step", "second"])
def test_kill_before_each_operation(tmp_path: Path, writers: Writers, victim: int, step: int) -> None:
    """How often writers look for each other changes from time to time, so the operations are not always the same."""
    for before in (1, 2):
        portions = deal(tensors(before), NUM_WRITERS, seed=before)
        save_together(tmp_path / "before", before, portions, {"step": before}, keep=2)
    found = []
    for operations in range(1000):
        root = shutil.copytree(tmp_path / "before", tmp_path / str(operations))
        codes = writers(root, step, 0.2, victim, operations)
        found.append(load_and_check(root))
        store.save(root, 4, {}, {}, keep=1)
        assert [entry.name for entry in root.iterdir()] == ["step-00000004"]
        if codes[victim] == 0:
            break
    assert operations > 8
    assert found[0] == 2 and found[-1] == step and set(found) <= {2, step}
