"""One process at a time trains into a run's folder. Pure."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from ascend_moe_train.cluster.variables import RUN_ID
from ascend_moe_train.errors import TrainingError

_LOCK = ".lock"
_MAX_ID_BYTES = 256


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Makes the folder and holds its lock; the system lets go of it when the process ends, however it ends.

    Afterwards the lock file is gone, and so are the folders made here in which nothing was written. In it is the
    launcher's name of this start, if there is a launcher.
    Raises TrainingError: the folder cannot be made, or another process trains into it.
    """
    path = run_dir / _LOCK
    try:
        made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
        file = _locked_file(path)
    except BlockingIOError:
        raise TrainingError(f"run.dir {run_dir}: another process is training into it") from None
    except OSError as error:
        raise TrainingError(f"run.dir {run_dir}: {error.strerror or error}") from None
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # nobody took it from this process
                    path.unlink()
                for folder in made:
                    folder.rmdir()


def unlock(run_dir: Path, start: str) -> None:
    """Takes the lock from a launcher's start that has been given up: a process of it may still be there, on a host that
    does not answer, and would hold the lock for as long.

    Such a process does no harm: a start that follows replaces the file of metrics and the folder of a checkpoint that
    is in the making, and what it still writes goes into those that were there before.
    """
    path = run_dir / _LOCK
    with suppress(OSError):
        if not path.is_file():
            return
        with path.open("rb") as file:
            holder = file.read(_MAX_ID_BYTES)
        if holder == start.encode():
            path.unlink()


def _locked_file(path: Path) -> FileIO:
    """The lock file, open and locked. A file that its owner removed meanwhile locks nothing, so another is made."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # opening a pipe would wait for a reader
            raise TrainingError(f"{path}: is no regular file")
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                file.write(os.environ.get(RUN_ID, "").encode()[:_MAX_ID_BYTES])
                return file
        except FileNotFoundError:
            pass
        except OSError:
            file.close()
            raise
        file.close()
