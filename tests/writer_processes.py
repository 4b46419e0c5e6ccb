"""Saves checkpoints with a process for each writer, and kills one of them when it is told to.

Reads lines from standard input: ROOT STEP DEADLINE_S, or in addition VICTIM and DELAY_S, or VICTIM and OPERATIONS (a
whole number). Answers each with the exit codes of the writers: that of a signal is negative, GAVE_UP where a
CheckpointError was raised.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ascend_moe_train.checkpoint import saving
from ascend_moe_train.checkpoint.saving import Writer
from ascend_moe_train.errors import CheckpointError
from tests.many_writers import deal

NUM_WRITERS = 3
GAVE_UP = 9
# Audit events of a save: operations on the file system.
EVENTS = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def tensors(step: int) -> dict[str, Any]:
    """All filled with the step, so that a mixture of two checkpoints shows; several files for each writer."""
    return {f"w{index}": np.full((64, 150), step, np.float32) for index in range(8)}


def write(root: Path, step: int, writer: Writer, prepared: tuple[int, int]) -> int:
    """What one writer does; its exit code. The first one tells the others when it has prepared."""
    reading, writing = prepared
    os.close(writing if writer.index > 0 else reading)
    try:
        if writer.index == 0:
            saving.prepare(root, step, NUM_WRITERS)
            os.write(writing, b"." * NUM_WRITERS)
        elif os.read(reading, 1) == b"":
            return GAVE_UP
        portions = deal(tensors(step), NUM_WRITERS, seed=step)[writer.index]
        saving.save_part(root, step, portions, {"step": step}, keep=2, writer=writer, max_file_bytes=2**16)
    except CheckpointError:
        return GAVE_UP
    return 0


def die_at(operations: int) -> None:
    """Kills this process just before it has done so many operations on the file system."""
    left = [operations]

    def hook(event: str, arguments: Any) -> None:
        if event in EVENTS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def save(
    root: Path, step: int, deadline_s: float, victim: int | None, delay_s: float | None, operations: int | None
) -> list[int]:
    """Runs the writers, kills the victim if there is one, returns all exit codes."""
    prepared = os.pipe()
    children = []
    for index in range(NUM_WRITERS):
        child = os.fork()
        if child == 0:
            if operations is not None and index == victim:
                die_at(operations)
            os._exit(write(root, step, Writer(index=index, count=NUM_WRITERS, deadline_s=deadline_s), prepared))
        children.append(child)
    for end in prepared:
        os.close(end)
    if victim is not None and delay_s is not None:
        time.sleep(delay_s)
        os.kill(children[victim], signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> None:
    """Does what standard input says, until it ends."""
    for line in sys.stdin:
        root, step, deadline_s, *kill = line.split()
        victim = int(kill[0]) if kill else None
        operations = int(kill[1]) if kill and kill[1].isdigit() else None
        delay_s = float(kill[1]) if kill and operations is None else None
        print(*save(Path(root), int(step), float(deadline_s), victim, delay_s, operations), flush=True)


if __name__ == "__main__":
    main()
