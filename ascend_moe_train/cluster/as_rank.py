"""How a process that is one rank of many runs its work, and ends so that the launcher sees why. Pure.

A rank that fails ends at once, without the usual way out of a process: at its end MPI waits for the other ranks, which
wait for this one.
"""

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from ascend_moe_train.cluster.rank import Progress, progress
from ascend_moe_train.cluster.verdict import EXITS_STOPPED
from ascend_moe_train.errors import UserError

EXIT_FAILED = 1
GOOD_EXITS = (0, *EXITS_STOPPED)


def as_rank(work: Callable[[], tuple[int, str | None]]) -> int:
    """Runs `work`, which gives an exit code and, for a user's mistake, what was wrong; returns if all ranks are meant
    to end together: with 0, or stopped and saved."""
    # what Python is doing when a library crashes, and, for the launcher, when it hangs
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        watched = progress()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        _end(EXIT_FAILED)
    try:
        code, complaint = work()
    except SystemExit as error:
        code, complaint = (error.code if isinstance(error.code, int) else EXIT_FAILED if error.code else 0), None
    except BaseException as error:  # whatever it is, it ends this rank, and the others have to know
        _fail(watched, error)
    if complaint is not None:
        watched.fail(complaint, is_user_error=True)
        print(f"error: {complaint}", file=sys.stderr)
    if code not in GOOD_EXITS:
        _end(code)
    done(watched)
    return code


def done(watched: Progress) -> None:
    """This rank's work is done: a stop that comes now has nothing to end, but would leave the others waiting for this
    rank where MPI ends. Python resets a handler of its own on the way out, and leaves this."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watched.phase("done")


def _fail(watched: Progress, error: BaseException) -> NoReturn:
    message = next(iter(str(error).strip().splitlines()), "")
    watched.fail(f"{type(error).__name__}: {message}".removesuffix(": "), is_user_error=False)
    traceback.print_exception(error)
    _end(EXIT_FAILED)


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it any more
            continue
    os._exit(code)
