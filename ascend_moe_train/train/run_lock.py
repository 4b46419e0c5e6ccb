"""One process at a time trains into a run's folder. Pure."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ascend_moe_train.errors import TrainingError


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Makes the folder and holds its lock; the system lets go of it when the process ends, however it ends.

    Afterwards the lock file is gone, and so are the folders made here in which nothing was written.
    Raises TrainingError: the folder cannot be made, or another process trains into it.
    """
    path = run_dir / ".lock"
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
                path.unlink()
                for folder in made:
                    folder.rmdir()


def _locked_file(path: Path) -> BinaryIO:
    """The lock file, open and locked. A file that its owner removed meanwhile locks nothing, so another is made."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # opening a pipe would wait for a reader
            raise TrainingError(f"{path}: is no regular file")
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except OSError:
            file.close()
            raise
        file.close()
