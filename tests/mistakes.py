"""What goes wrong in a process for a reason outside of its program, made to happen by what the system has for that.

Needs neither MindSpore nor MPI: ranks of all launchers use it.
"""

import importlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.clock_shim import set_clock_ahead

Fault = Mapping[str, Any]

MORE_BYTES = 2**28  # than a process has, which it may take before it is refused any
FULL_DISK = Path("/dev/full")  # takes no byte, for want of space


def kill(fault: Fault) -> None:
    """As the kernel does when memory is short, or an operator."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(fault: Fault) -> None:
    """As an operator or a batch system does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def want_memory(fault: Fault) -> None:
    """Takes arrays until the system, by a limit on this process, has no more."""
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MORE_BYTES, resource.RLIM_INFINITY))
    kept = []
    while True:
        kept.append(np.ones(MORE_BYTES // 16))


def bind_taken(fault: Fault) -> None:
    """A server, as for metrics or a debugger, at an address that another process has."""
    server = socket.socket()
    server.bind(("127.0.0.1", fault["port"]))


def write_to_full_disk(fault: Fault) -> None:
    """Something to keep, and no room for it."""
    with FULL_DISK.open("wb") as file:
        np.save(file, np.ones(10**6))


def import_missing(fault: Fault) -> None:
    """A package that is not installed here."""
    importlib.import_module("a_package_that_this_host_has_not")


def sleep(fault: Fault) -> None:
    """Slow storage, or a host that does other work."""
    time.sleep(fault["seconds"])


def leave(fault: Fault) -> None:
    """The end of its data, before those of the others, and not a word about it."""
    sys.exit(0)


def skew(fault: Fault) -> None:
    """The clock of another host, which nobody has set."""
    set_clock_ahead(fault["seconds"], Path(fault["folder"]))


MISTAKES: Mapping[str, Callable[[Fault], None]] = {
    each.__name__: each
    for each in (kill, stop, want_memory, bind_taken, write_to_full_disk, import_missing, sleep, leave, skew)
}
# before anything else: what is imported, and by which clock
AT_START = ("import_missing", "skew")
