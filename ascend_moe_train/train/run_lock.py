"""One process at a time trains into a run's folder. Pure."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ascend_moe_train.errors import TrainingError


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Makes the folder and holds its lock; the system lets go of it when the process ends, however it ends.

    Raises TrainingError: the folder cannot be made, or another process trains into it.
    """
    path = run_dir / ".lock"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise TrainingError(f"run.dir {run_dir}: {error.strerror or error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(f"run.dir {run_dir}: another process is training into it") from None
        yield
