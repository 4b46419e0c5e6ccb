"""How a rank ends."""

import signal
import subprocess
import sys

import pytest

# a stop that comes when the work is done, before or while Python takes itself down
LATE = """
import atexit, os, signal, sys
from ascend_moe_train.cluster.as_rank import as_rank
signal.signal(signal.SIGTERM, lambda number, frame: None)
class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
late = Late()
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
sys.exit(as_rank(lambda: (int(sys.argv[1]), None)))
"""


@pytest.mark.parametrize("code", [0, 130, 143])
def test_a_stop_that_comes_late_changes_nothing(code: int) -> None:
    command = [sys.executable, "-c", LATE, str(code)]
    assert subprocess.run(command, timeout=60, check=False, stdin=subprocess.DEVNULL).returncode == code


def test_a_stop_in_its_work_ends_a_rank() -> None:
    command = [sys.executable, "-c", LATE.replace("(int(sys.argv[1]), None)", "os.kill(os.getpid(), 15)")]
    command[2] = command[2].replace("signal.signal(signal.SIGTERM, lambda number, frame: None)", "")
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGTERM
