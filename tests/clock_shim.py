"""A process whose clock is ahead of its host's, as on a host whose clock nobody has set: a small library in C between
it and the system's functions for the time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

_AHEAD = "CLOCK_AHEAD_S"
_SOURCE = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) { const char *text = getenv("CLOCK_AHEAD_S"); return text ? atol(text) : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = (int)syscall(SYS_clock_gettime, clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    if (clock_gettime(CLOCK_REALTIME, &found)) return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *kept) {
    struct timespec found;
    if (clock_gettime(CLOCK_REALTIME, &found)) return -1;
    if (kept) *kept = found.tv_sec;
    return found.tv_sec;
}
"""


def has_compiler() -> bool:
    """Whether such a library can be made here."""
    return shutil.which("cc") is not None


def set_clock_ahead(seconds: int, folder: Path) -> None:
    """Starts this process anew with the same words, under the same number, and with its clock ahead; returns where it
    is so already. The library is left in the folder."""
    if _AHEAD in os.environ:
        return
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    os.execve(sys.executable, sys.orig_argv, {**os.environ, _AHEAD: str(seconds), "LD_PRELOAD": str(library)})
