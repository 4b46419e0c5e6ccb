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
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
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


def find_save(folder: Path, num_writers: int, deadline_s: float) -> tuple[Save, Identity]:
    """The save that is made in `folder`, waiting for the first writer to announce it.

    Raises:
        CheckpointError: it does not before the deadline, has given up, or means another number of writers.
    """
    path = folder / SAVE_NAME
    for _ in _until(deadline_s):
        identity = identity_of(folder)
        if identity is not None and path.exists():
            save = _parse(path, Save, _SAVE_FORMAT)
            if save.num_writers != num_writers:
                raise CheckpointError(f"{path}: {save.num_writers} writers were announced, but there are {num_writers}")
            _check_given_up(folder, save)
            return save, identity
    raise CheckpointError(
        f"{path}: not there after {deadline_s:g} s: writer 0 has not begun, or does not share this folder"
    )


def hand_in(folder: Path, save: Save, writer: int, tensors: Mapping[str, TensorEntry]) -> None:
    """Makes a writer's part known, whose files are on the disk. Raises CheckpointError: it cannot be written."""
    _put_part(folder, WrittenPart(identity=save.identity, writer=writer, tensors=dict(tensors)))


def give_up(folder: Path, save: Save, writer: int, error: BaseException) -> None:
    """Tells the others that a writer does not hand in its part, and removes its files; the first one: everybody's.

    When the first one has given up, the save has failed. Raises CheckpointError: nothing can be written.
    """
    problem = str(error) or type(error).__name__
    if not isinstance(error, OthersProblem):
        problem = f"writer {writer} of {save.num_writers}: {problem}"
    remove_files(folder, save, writer)
    shown = " ".join(problem.split())[:_MAX_PROBLEM]
    _put_part(folder, WrittenPart(identity=save.identity, writer=writer, tensors={}, problem=shown))


def remove_files(folder: Path, save: Save, writer: int) -> None:
    """Removes the tensors that a writer wrote, for the first one what all wrote; what cannot be removed stays.

    The files by which writers tell each other are left: some may still be looking for them.
    """
    stem = layout.file_stem(writer, save.num_writers) if writer > 0 else layout.FILE_STEM
    for path in listing(folder):
        if path.name.startswith(stem) or (writer == 0 and path.name == layout.MANIFEST_NAME):
            with suppress(CheckpointError):
                remove(path)


def collect_parts(folder: Path, save: Save, deadline_s: float) -> list[dict[str, TensorEntry]]:
    """What every writer but the first has written, in their order, once all have.

    Raises:
        CheckpointError: a writer had a problem; parts are still missing at the deadline, the message names their
            writers; a part is damaged or of another save.
    """
    found: dict[int, dict[str, TensorEntry]] = {}
    for _ in _until(deadline_s):
        for writer in _present(folder, save.num_writers) - {0} - found.keys():
            found[writer] = _read_part(folder, save, writer).tensors
        if len(found) == save.num_writers - 1:
            return [found[writer] for writer in sorted(found)]
    missing = sorted(set(range(1, save.num_writers)) - found.keys())
    raise CheckpointError(f"{folder}: nothing from {_named(missing, save.num_writers)} after {deadline_s:g} s")


def await_folder(temporary: Path, folder: Path, identity: Identity, save: Save, deadline_s: float) -> None:
    """Returns once the first writer has given the folder its final name.

    Raises:
        OthersProblem: it has given up.
        CheckpointError: the folder is gone; or has not got its name at the deadline.
    """
    for _ in _until(deadline_s):
        if identity_of(folder) == identity:
            return
        if identity_of(temporary) == identity:
            _check_given_up(temporary, save)
        elif identity_of(folder) != identity:
            raise CheckpointError(f"{temporary}: was removed while it was being written")
    missing = sorted(set(range(1, save.num_writers)) - _present(temporary, save.num_writers)) or [0]
    raise CheckpointError(f"{temporary}: nothing from {_named(missing, save.num_writers)} after {deadline_s:g} s")


def identity_of(folder: Path) -> Identity | None:
    """Which folder has this name now; None when there is none."""
    try:
        status = folder.stat(follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _check_given_up(folder: Path, save: Save) -> None:
    if 0 in _present(folder, save.num_writers):
        _read_part(folder, save, 0)


def _read_part(folder: Path, save: Save, writer: int) -> WrittenPart:
    path = folder / _part_name(writer)
    part = _parse(path, WrittenPart, _PART_FORMAT)
    if part.identity != save.identity or part.writer != writer:
        raise CheckpointError(f"{path}: of another save: do two runs write here?")
    if part.problem is not None:
        raise OthersProblem(part.problem)
    return part


def _parse(path: Path, kind: type[_Message], format_name: str) -> _Message:
    content = parse_sealed(_read(path), "message", format_name, _VERSION, str(path))
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {layout.first_problem(error)}") from error


def _put_part(folder: Path, part: WrittenPart) -> None:
    _put(folder / _part_name(part.writer), dump_sealed(part.model_dump(), _PART_FORMAT, _VERSION))


def _put(path: Path, data: bytes) -> None:
    """Writes a file that others wait for: it is there with all its content or not at all."""
    aside = path.with_suffix(".tmp")
    write_synced(aside, data)
    with naming("rename", aside):
        aside.rename(path)


def _read(path: Path) -> bytes:
    with open_regular(path) as stream, naming("read", path):
        if os.fstat(stream.fileno()).st_size > layout.MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path}: larger than {layout.MAX_MANIFEST_BYTES} bytes")
        return stream.readall()


def _part_name(writer: int) -> str:
    return f"part-{writer:05d}.json"


def _present(folder: Path, num_writers: int) -> set[int]:
    """The writers whose parts are there."""
    names = {path.name for path in listing(folder)}
    return {writer for writer in range(num_writers) if _part_name(writer) in names}


def _named(writers: Collection[int], num_writers: int) -> str:
    shown = ", ".join(str(writer) for writer in list(writers)[:_MAX_NAMED])
    more = f" and {len(writers) - _MAX_NAMED} more" if len(writers) > _MAX_NAMED else ""
    return f"writer{'s' if len(writers) > 1 else ''} {shown}{more} of {num_writers}"


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
