"""What Python is doing inside ranks that hang, read from outside by py-spy where that is installed. Pure.

A rank writes its own stacks at SIGUSR1 (`as_rank`), unless it is stopped, or holds the interpreter in a library. py-spy
reads a process that does nothing by itself; the kernel allows that of one's own descendants.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ascend_moe_train.cluster.verdict import RankView

MOST_RANKS = 16
WITHIN_S = 10.0  # all together: a process in the kernel's hands cannot be read


def dump_stacks(views: Sequence[RankView]) -> dict[int, str]:
    """Stacks by rank, of the first views that have a process; nothing without py-spy."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    program = shutil.which("py-spy", path=path)
    if program is None:
        return {}
    readers = {
        view.rank: subprocess.Popen(
            [program, "dump", "--nonblocking", "--pid", str(view.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for view in [view for view in views if view.pid is not None][:MOST_RANKS]
    }
    until_s = time.monotonic() + WITHIN_S
    return {rank: _output(reader, until_s) for rank, reader in readers.items()}


def _output(reader: subprocess.Popen[bytes], until_s: float) -> str:
    with reader:
        try:
            said, _ = reader.communicate(timeout=max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            reader.kill()
            said, _ = reader.communicate()
    return said.decode(errors="replace")
