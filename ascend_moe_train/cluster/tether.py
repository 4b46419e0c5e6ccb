"""A process that ends when its parent does, however that ends. Pure.

As a program, `python -m ascend_moe_train.cluster.tether PARENT_PID COMMAND...` becomes COMMAND, tied to the parent.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent ends; it outlives exec
EXIT_ORPHAN = 128 + signal.SIGKILL


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL comes to this process when its parent ends; if that has ended by now, this process ends here."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) or os.getppid() != parent_pid:
        os._exit(EXIT_ORPHAN)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
