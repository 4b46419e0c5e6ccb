"""File system steps of a checkpoint: open without following links, make durable, remove; failures name the path."""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from ascend_moe_train.errors import CheckpointError


@contextmanager
def naming(action: str, path: Path) -> Iterator[None]:
    """Turns a failure of the operating system into one line: what could not be done, to which path, why."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {action} {path}: {error.strerror or error}") from error


def open_regular(path: Path) -> FileIO:
    """Opens a file for reading, unbuffered. A symbolic link, pipe or device is refused and never waited for.

    Raises:
        CheckpointError: missing, not a regular file, or not readable.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except OSError as error:
        reason = "a symbolic link, which is not followed" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointError(f"{path}: {reason}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a regular file")
    return FileIO(descriptor, "r")


def sync_file(stream: BinaryIO) -> None:
    """Returns once the file's content is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Returns once the folder's list of names is on the disk."""
    with naming("write", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a folder with its content, or a file, or a symbolic link but not what it points at."""
    with naming("remove", path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_synced(path: Path, data: bytes) -> None:
    """Writes a new file and returns once it is on the disk."""
    with naming("write", path), path.open("xb") as stream:
        stream.write(data)
        sync_file(stream)
