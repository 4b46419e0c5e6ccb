"""A folder that appears complete or not at all, and whose making can be interrupted and taken up again. Pure.

It is made in `.NAME.partial` beside its place. The journal there says for which input it is made, and which files are
finished, with the checksum of each of their tensors. One process at a time holds the lock on it.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ascend_moe_train.checkpoint.files import naming, remove, sync_folder
from ascend_moe_train.errors import CheckpointError, UserError
from ascend_moe_train.part import Part

_JOURNAL = "journal.jsonl"
_MAX_JOURNAL_BYTES = 256 * 2**20


class _First(Part):
    made_from: str


class _Finished(Part):
    file: str
    digests: dict[str, Annotated[str, Field(max_length=128)]]


class Journal:
    """The files of a folder in the making that are finished."""

    def __init__(self, folder: Path, made_from: str) -> None:
        """Reads what an earlier process noted; nothing if it made the folder from something else."""
        self.folder = folder
        self._path = folder / _JOURNAL
        self.finished: dict[str, Mapping[str, str]] = {}
        lines = self._lines()
        try:
            if lines and _First.model_validate_json(lines[0]).made_from == made_from:
                for line in lines[1:]:
                    one = _Finished.model_validate_json(line)
                    self.finished[one.file] = one.digests
        except ValidationError:
            self.finished = {}
        self._made_from = made_from

    def start(self, finished: Mapping[str, Mapping[str, str]]) -> None:
        """Keeps these of the finished files, and removes everything else."""
        for path in sorted(self.folder.iterdir()):
            if path.name not in finished:
                remove(path)
        self.finished = dict(finished)
        lines = [_First(made_from=self._made_from).model_dump_json()]
        lines += [_Finished(file=file, digests=dict(digests)).model_dump_json() for file, digests in finished.items()]
        self._append("".join(f"{line}\n" for line in lines))
        sync_folder(self.folder)

    def add(self, file: str, digests: Mapping[str, str]) -> None:
        """Notes a file that is complete and durable."""
        self._append(_Finished(file=file, digests=dict(digests)).model_dump_json() + "\n")
        self.finished[file] = digests

    def close(self) -> None:
        """Removes the notes: the folder is complete."""
        remove(self._path)

    def _append(self, text: str) -> None:
        with naming("write", self._path), self._path.open("a", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())

    def _lines(self) -> list[str]:
        """Whole lines only: the last one may have been cut by a kill."""
        with naming("read", self._path):
            if not self._path.is_file() or self._path.stat().st_size > _MAX_JOURNAL_BYTES:
                return []
            return self._path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


@contextmanager
def resumable_folder(out: Path, made_from: str) -> Iterator[Journal]:
    """A folder to write into, which becomes `out` when the block ends well.

    When it ends with a mistake of the user's, the folder goes away; when it is interrupted, or the file system refuses,
    what is finished stays for the next run from the same `made_from`.

    Raises:
        CheckpointError: `out` is there already, another process makes it, or the file system refuses.
    """
    out = Path(os.path.realpath(out))
    refuse_existing(out)
    folder = out.with_name(f".{out.name}.partial")
    with naming("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _lock(descriptor, folder)
        journal = Journal(folder, made_from)
        try:
            yield journal
            journal.close()
            sync_folder(folder)
            refuse_existing(out)
            with naming("rename", folder):
                folder.rename(out)
            sync_folder(out.parent)
        except UserError as error:
            if not isinstance(error.__cause__, OSError) or not journal.finished:
                remove(folder)
                raise
            raise CheckpointError(
                f"{error}; {len(journal.finished)} finished files stay in {folder} for the same command"
            ) from error
    finally:
        os.close(descriptor)


def refuse_existing(out: Path) -> None:
    """Raises CheckpointError when something is where a folder is to appear."""
    if os.path.lexists(out):
        raise CheckpointError(f"{out}: is there already; choose another name, or remove it first")


def fingerprint(*facts: object) -> str:
    """A short text that is the same for the same facts (JSON values)."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(f"{folder}: another process is making it now") from error
    # The holder before may have finished or given up between the opening and the lock.
    if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
        raise CheckpointError(f"{folder}: another process has just ended making it; try again")
