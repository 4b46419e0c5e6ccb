"""A folder that appears complete or not at all. Pure."""

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ascend_moe_train.errors import DataError


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out` to write into; it becomes `out` when the block ends well, and goes away otherwise.

    An `out` that is there gives way: the caller has asked for that, and made sure that nothing of the user's is lost.
    What a killed process left behind is removed. Raises DataError or OSError.
    """
    out = Path(os.path.realpath(out))
    made = _make_parents(out.parent)
    _remove_stale(out)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
        folder.chmod(0o777 & ~_umask())
        os.fsync(descriptor)
        if occupied(out):
            _swap(folder, out)
        else:
            folder.rename(out)
        _sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
    finally:
        os.close(descriptor)


def occupied(path: Path) -> bool:
    """Whether something is there that must not be overwritten: anything but an empty folder."""
    return os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _swap(folder: Path, out: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    out.rename(old / out.name)
    try:
        folder.rename(out)
    except BaseException:
        (old / out.name).rename(out)
        old.rmdir()
        raise
    shutil.rmtree(old)


def _make_parents(parent: Path) -> list[Path]:
    """Create a folder with its parents; returns those that were not there, the innermost first."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_stale(out: Path) -> None:
    """Remove the folders of killed processes: a live one holds a lock on its own."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"--out {out}: another process is preparing it now, in {folder}") from error
        else:
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
