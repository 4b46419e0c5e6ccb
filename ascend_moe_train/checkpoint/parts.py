"""How the writers of one checkpoint tell each other what they have written: files in the folder that they share.

    .tmp-step-00000200/
        save.json                      from the first writer: which save this is, of how many writers
        tensors-r00003-00000.safetensors
        part-00003.json                from writer 3, once its files are on the disk: what they hold; or what went wrong

Only the folder connects them: no collective runs while files are written, so a writer that dies blocks no other beyond
the deadline. A save has an identity made at random, which every part repeats: what an earlier save left behind, or
another run writes, is never taken for a part of this one.
"""

import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.files import naming, open_regular, write_synced
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

Identity = tuple[int, int]
"""Device and inode of a folder, which it keeps when it gets another name."""


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
        CheckpointError: it does not before the deadline, or means another number of writers.
    """
    path = folder / SAVE_NAME
    for _ in _until(deadline_s):
        identity = identity_of(folder)
        if identity is not None and path.exists():
            save = _parse_save(path)
            if save.num_writers != num_writers:
                raise CheckpointError(f"{path}: {save.num_writers} writers were announced, but there are {num_writers}")
            return save, identity
    raise CheckpointError(
        f"{path}: not there after {deadline_s:g} s: writer 0 has not begun, or does not share this folder"
    )


def write_part(
    folder: Path, save: Save, writer: int, tensors: Mapping[str, TensorEntry], problem: str | None = None
) -> None:
    """Makes a writer's part known, complete or not at all. Raises CheckpointError: it cannot be written."""
    shown = None if problem is None else " ".join(problem.split())[:_MAX_PROBLEM]
    part = WrittenPart(identity=save.identity, writer=writer, tensors=dict(tensors), problem=shown)
    _put(folder / _part_name(writer), dump_sealed(part.model_dump(), _PART_FORMAT, _VERSION))


def collect_parts(folder: Path, save: Save, deadline_s: float) -> list[dict[str, TensorEntry]]:
    """What every writer but the first has written, in their order, once all have.

    Raises:
        CheckpointError: a writer had a problem; parts are still missing at the deadline, the message names their
            writers; a part is damaged or of another save.
    """
    found: dict[int, dict[str, TensorEntry]] = {}
    for _ in _until(deadline_s):
        for writer in _present(folder, save.num_writers) - found.keys():
            part = _parse_part(folder / _part_name(writer))
            if part.identity != save.identity or part.writer != writer:
                raise CheckpointError(f"{folder / _part_name(writer)}: of another save: do two runs write here?")
            if part.problem is not None:
                raise CheckpointError(f"writer {writer} of {save.num_writers}: {part.problem}")
            found[writer] = part.tensors
        if len(found) == save.num_writers - 1:
            return [found[writer] for writer in sorted(found)]
    missing = sorted(set(range(1, save.num_writers)) - found.keys())
    raise CheckpointError(f"{folder}: nothing from {_named(missing, save.num_writers)} after {deadline_s:g} s")


def await_folder(temporary: Path, folder: Path, identity: Identity, save: Save, deadline_s: float) -> None:
    """Returns once the first writer has given the folder its final name.

    Raises:
        CheckpointError: it has removed the folder instead, or has done neither at the deadline.
    """
    for _ in _until(deadline_s):
        if identity_of(folder) == identity:
            return
        if identity_of(temporary) != identity and identity_of(folder) != identity:
            raise CheckpointError(f"{folder}: was given up by writer 0, whose message says why")
    missing = sorted(set(range(1, save.num_writers)) - _present(temporary, save.num_writers)) or [0]
    raise CheckpointError(f"{temporary}: nothing from {_named(missing, save.num_writers)} after {deadline_s:g} s")


def identity_of(folder: Path) -> Identity | None:
    """Which folder has this name now; None when there is none."""
    try:
        status = folder.stat(follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _parse_save(path: Path) -> Save:
    content = parse_sealed(_read(path), "save", _SAVE_FORMAT, _VERSION, str(path))
    try:
        return Save.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {layout.first_problem(error)}") from error


def _parse_part(path: Path) -> WrittenPart:
    content = parse_sealed(_read(path), "part", _PART_FORMAT, _VERSION, str(path))
    try:
        return WrittenPart.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {layout.first_problem(error)}") from error


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
    return {writer for writer in range(1, num_writers) if _part_name(writer) in names}


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
