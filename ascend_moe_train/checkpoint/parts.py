"""How the writers of one checkpoint tell each other what they have written: files in the folder that they share.

    .tmp-step-00000200/
        save.json                      from the first writer: which save this is, of how many writers
        tensors-r00003-00000.safetensors
        part-00003.json                from writer 3, once its files are on the disk: what they hold; or what went wrong
        part-00000.json                from the first writer, only where something went wrong: no checkpoint comes of it

Only the folder connects them: no collective runs while files are written, so a writer that dies blocks no other beyond
the deadline. A save has an identity made at random, which every part repeats: what an earlier save left behind, or
another run writes, is never taken for a part of this one.
"""

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.files import naming, open_regular, remove, write_synced
from ascend_moe_train.checkpoint.folders import listing
from ascend_moe_train.checkpoint.layout import TensorEntry
from ascend_moe_train.checkpoint.sealed import dump_sealed, parse_sealed
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.part import Part

SAVE_NAME = "save.json"
_SAVE_FORMAT, _PART_FORMAT, _VERSION = "amt-checkpoint-save", "amt-checkpoint-part", 1
MAX_WRITERS = 100_000
_MAX_PROBLEM = 1000
_MAX_NAMED = 8
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.005, 0.2

_Message = TypeVar("_Message", bound=Part)
Identity = tuple[int, int]
"""Device and inode of a folder, which it keeps when it gets another name."""


class OthersProblem(CheckpointError):
    """What kept another writer from its part, in its own words."""


class Save(Part):
    """A save of several writers, as its first one announces it."""

    identity: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    num_writers: Annotated[int, Field(ge=2, le=MAX_WRITERS)]


class WrittenPart(Part):
    """What one writer has written, or the problem that kept it from that."""

    identity: str
    writer: int
    tensors: dict[str, TensorEntry]
    problem: Annotated[str, Field(max_length=_MAX_PROBLEM)] | None = None


def announce(folder: Path, num_writers: int) -> None:
    """Tells the other writers of a save that is to be made in `folder`. Raises CheckpointError."""
    save = Save(identity=secrets.token_hex(16), num_writers=num_writers)
    _put(folder / SAVE_NAME, dump_sealed(save.model_dump(), _SAVE_FORMAT, _VERSION))


def join_save(folder: Path, num_writers: int, deadline_s: float) -> "SharedSave":
    """The save that is made in `folder`, waiting for the first writer to announce it.

    Raises:
        CheckpointError: it does not before the deadline, has given up, or means another number of writers.
    """
    path = folder / SAVE_NAME
    for _ in _until(deadline_s):
        place = identity_of(folder)
        if place is not None and path.exists():
            save = _parse(path, Save, _SAVE_FORMAT)
            if save.num_writers != num_writers:
                raise CheckpointError(f"{path}: {save.num_writers} writers were announced, but there are {num_writers}")
            joined = SharedSave(folder=folder, place=place, identity=save.identity, num_writers=num_writers)
            joined.check_given_up()
            return joined
    raise CheckpointError(
        f"{path}: not there after {deadline_s:g} s: writer 0 has not begun, or does not share this folder"
    )


@dataclass(frozen=True, kw_only=True)
class SharedSave:
    """A save as one of its writers sees it. All methods raise CheckpointError for what cannot be read or written.

    `place` is which folder it was when this writer joined: what may have come in its place since is not touched.
    """

    folder: Path
    place: Identity
    identity: str
    num_writers: int

    @property
    def is_there(self) -> bool:
        """Whether the folder is still the one that this writer joined, under its first name."""
        if identity_of(self.folder) != self.place:
            return False
        try:  # a new folder may have got the number of one that was removed
            return _parse(self.folder / SAVE_NAME, Save, _SAVE_FORMAT).identity == self.identity
        except CheckpointError:
            return True  # the announcement goes when all is complete, just before the folder gets its name

    def hand_in(self, writer: int, tensors: Mapping[str, TensorEntry], problem: str | None = None) -> None:
        """Makes a writer's part known, whose files are on the disk; or the problem that it has."""
        if not self.is_there:
            raise CheckpointError(f"{self.folder}: was removed while it was being written")
        part = WrittenPart(identity=self.identity, writer=writer, tensors=dict(tensors), problem=problem)
        _put(self.folder / _part_name(writer), dump_sealed(part.model_dump(), _PART_FORMAT, _VERSION))

    def give_up(self, writer: int, error: BaseException) -> None:
        """Tells the others that a writer does not hand in its part, and removes its files; the first one: everybody's.

        When the first one has given up, the save has failed.
        """
        problem = str(error) or type(error).__name__
        if not isinstance(error, OthersProblem):
            problem = f"writer {writer} of {self.num_writers}: {problem}"
        self.remove_files(writer)
        self.hand_in(writer, {}, " ".join(problem.split())[:_MAX_PROBLEM])

    def remove_files(self, writer: int) -> None:
        """Removes the tensors that a writer wrote, for the first one what all wrote; what cannot be removed stays.

        The files by which writers tell each other are left: some may still be looking for them.
        """
        stem = layout.file_stem(writer, self.num_writers) if writer > 0 else layout.FILE_STEM
        for path in listing(self.folder) if self.is_there else []:
            if path.name.startswith(stem) or (writer == 0 and path.name == layout.MANIFEST_NAME):
                with suppress(CheckpointError):
                    remove(path)

    def collect_parts(self, deadline_s: float) -> list[dict[str, TensorEntry]]:
        """What every writer but the first has written, in their order, once all have.

        Raises:
            CheckpointError: a writer had a problem; parts are still missing at the deadline, the message names their
                writers; a part is damaged or of another save.
        """
        found: dict[int, dict[str, TensorEntry]] = {}
        for _ in _until(deadline_s):
            for writer in self._present() - found.keys():
                found[writer] = self._read_part(writer).tensors
            if len(found) == self.num_writers - 1:
                return [found[writer] for writer in sorted(found)]
        raise self._nothing_from(set(range(1, self.num_writers)) - found.keys(), deadline_s)

    def await_name(self, final: Path, deadline_s: float) -> None:
        """Returns once the first writer has given the folder its final name.

        Raises:
            OthersProblem: it has given up.
            CheckpointError: the folder is gone; or has not got its name at the deadline.
        """
        for _ in _until(deadline_s):
            if identity_of(final) == self.place:
                return
            if self.is_there:
                self.check_given_up()
            elif identity_of(final) != self.place:
                raise CheckpointError(f"{self.folder}: was removed while it was being written")
        raise self._nothing_from(set(range(1, self.num_writers)) - self._present() or {0}, deadline_s)

    def check_given_up(self) -> None:
        """Raises OthersProblem if the first writer has given up."""
        if (self.folder / _part_name(0)).exists():
            self._read_part(0)

    def _present(self) -> set[int]:
        """The writers whose parts are there."""
        names = {path.name for path in listing(self.folder)}
        return {writer for writer in range(1, self.num_writers) if _part_name(writer) in names}

    def _read_part(self, writer: int) -> WrittenPart:
        path = self.folder / _part_name(writer)
        part = _parse(path, WrittenPart, _PART_FORMAT)
        if part.identity != self.identity or part.writer != writer:
            raise CheckpointError(f"{path}: of another save: do two runs write here?")
        if part.problem is not None:
            raise OthersProblem(part.problem)
        return part

    def _nothing_from(self, missing: Set[int], deadline_s: float) -> CheckpointError:
        shown = ", ".join(str(writer) for writer in sorted(missing)[:_MAX_NAMED])
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        writers = f"writer{'s' if len(missing) > 1 else ''} {shown}{more} of {self.num_writers}"
        return CheckpointError(f"{self.folder}: nothing from {writers} after {deadline_s:g} s")


def identity_of(folder: Path) -> Identity | None:
    """Which folder has this name now; None when there is none."""
    try:
        status = folder.stat(follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _parse(path: Path, kind: type[_Message], format_name: str) -> _Message:
    content = parse_sealed(_read(path), "message", format_name, _VERSION, str(path))
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {layout.first_problem(error)}") from error


def _put(path: Path, data: bytes) -> None:
    """Writes a file that others wait for: it is there with all its content or not at all."""
    aside = path.with_suffix(".tmp")
    try:
        write_synced(aside, data)
    except BaseException:
        with suppress(CheckpointError):
            remove(aside)
        raise
    with naming("rename", aside):
        aside.rename(path)


def _read(path: Path) -> bytes:
    with open_regular(path) as stream, naming("read", path):
        if os.fstat(stream.fileno()).st_size > layout.MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path}: larger than {layout.MAX_MANIFEST_BYTES} bytes")
        return stream.readall()


def _part_name(writer: int) -> str:
    return f"part-{writer:05d}.json"


def _until(deadline_s: float) -> Iterator[None]:
    """A look now and then, the last one at the deadline."""
    end_s = time.monotonic() + deadline_s
    pause_s = _FIRST_PAUSE_S
    while True:
        yield
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
