"""Makes checkpoint folders, with one writer or several at once: all of a checkpoint appears, or nothing does.

Each writer writes the pieces that it holds to files of its own. The first one puts everything together: it waits for
the others, proves that nothing is missing or there twice, writes the manifest and gives the folder its name.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ascend_moe_train.checkpoint import layout, parts
from ascend_moe_train.checkpoint.files import naming, remove, sync_folder, write_synced
from ascend_moe_train.checkpoint.folders import listing, prune, publish, temporary_of, tidy
from ascend_moe_train.checkpoint.layout import Manifest, TensorEntry
from ascend_moe_train.checkpoint.piece_files import check_files
from ascend_moe_train.checkpoint.portion import Portion, merge_portions, write_portions
from ascend_moe_train.errors import CheckpointError

_Write = Callable[[], dict[str, TensorEntry]]


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Which of the writers of a checkpoint, and how long it waits for the others once its own files are written."""

    index: int = 0
    count: int = 1
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        """Raises ValueError: there is no such writer."""
        if not 0 <= self.index < self.count <= parts.MAX_WRITERS:
            raise ValueError(f"writer {self.index} of {self.count}")


ONLY_WRITER = Writer()


def prepare(root: Path, step: int, num_writers: int = 1) -> None:
    """Makes the folder that the writers of a checkpoint write into, and ends what an interrupted save began.

    The first writer calls this while no other writes into `root`; each of them calls `save_part` afterwards. Only a
    save that all of them begin after this has returned is sure to succeed; whatever they do, none is mixed with
    another, or visible before it is complete.

    Raises:
        CheckpointError: a folder that cannot be written.
    """
    if not 0 <= step <= layout.MAX_STEP:
        raise ValueError(f"step {step}: allowed are 0 to {layout.MAX_STEP}")
    with naming("create", root):
        root.mkdir(parents=True, exist_ok=True)
    tidy(root)
    temporary = temporary_of(root, step)
    with naming("create", temporary):
        temporary.mkdir()
    if num_writers > 1:
        parts.announce(temporary, num_writers)


def save_part(
    root: Path,
    step: int,
    portions: Mapping[str, Portion],
    meta: Mapping[str, Any],
    *,
    keep: int,
    writer: Writer = ONLY_WRITER,
    max_file_bytes: int = layout.MAX_FILE_BYTES,
    max_piece_bytes: int = layout.MAX_PIECE_BYTES,
) -> Path:
    """Writes what one of several writers holds of a checkpoint; returns its folder once all of it has its final name.

    The first writer waits for the parts of the others, proves that every element of every tensor was written just once,
    writes the manifest, gives the folder its name and removes older checkpoints, as `save` does. The others wait for
    that. Memory as of `save`.

    Args:
        root: the same folder for all, on a file system that they share.
        step: optimizer steps done; `prepare` has been called with it.
        portions: what this writer is to write, views for example; they must not change meanwhile. Each element of a
            tensor belongs to one writer.
        meta: as of `save`; that of the first writer counts.
        keep: at least 1.
        writer: which one this is, of as many as `prepare` was told.
        max_file_bytes: data per file.
        max_piece_bytes: larger boxes are cut.

    Raises:
        CheckpointError: as of `save`, the problem of any writer is told to all; elements that nobody or more than one
            has written; the deadline, naming the writers that are missing. The checkpoints that were there remain, and
            no new one appears; what is left in a hidden folder goes with the next `prepare`.
    """
    if keep < 1:
        raise ValueError(f"keep {keep}: allowed are numbers from 1")
    temporary, folder = temporary_of(root, step), root / layout.folder_name(step)
    write = partial(
        write_portions,
        temporary,
        portions,
        writer=writer.index,
        num_writers=writer.count,
        max_file_bytes=max_file_bytes,
        max_piece_bytes=max_piece_bytes,
    )
    if writer.index > 0:
        _hand_in(temporary, folder, writer, write)
        return folder
    try:
        _put_together(temporary, step, writer, write, meta)
        publish(temporary, folder)
    except BaseException as error:
        with suppress(CheckpointError):
            tidy(root, but=_give_up(temporary, writer, error))
        raise
    tidy(root)
    prune(root, step, keep)
    return folder


def _hand_in(temporary: Path, folder: Path, writer: Writer, write: _Write) -> None:
    """Writes files, then the part that tells of them, or at once one that tells of the problem; then waits."""
    save, identity = parts.find_save(temporary, writer.count, writer.deadline_s)
    try:
        parts.hand_in(temporary, save, writer.index, write())
    except BaseException as error:
        with suppress(CheckpointError):
            parts.give_up(temporary, save, writer.index, error)
        raise
    try:
        parts.await_folder(temporary, folder, identity, save, writer.deadline_s)
    except parts.OthersProblem:  # only now is it sure that nobody makes a checkpoint of these files
        with suppress(CheckpointError):
            parts.remove_files(temporary, save, writer.index)
        raise


def _give_up(temporary: Path, writer: Writer, error: BaseException) -> Path | None:
    """Tells the other writers why no checkpoint comes of it; returns the folder that they find it in, if any."""
    if writer.count == 1:
        return None
    try:
        save, _ = parts.find_save(temporary, writer.count, 0.0)
        parts.give_up(temporary, save, writer.index, error)
    except CheckpointError:
        return None
    return temporary


def _put_together(temporary: Path, step: int, writer: Writer, write: _Write, meta: Mapping[str, Any]) -> None:
    """Writes the own files, waits for those of the others, and completes the folder but for its name."""
    if writer.count == 1:
        written = [write()]
    else:
        save, _ = parts.find_save(temporary, writer.count, 0.0)
        written = [write(), *parts.collect_parts(temporary, save, writer.deadline_s)]
    manifest = Manifest(step=step, tensors=merge_portions(written, str(temporary)), meta=dict(meta))
    text = layout.dump_manifest(manifest)
    if writer.count > 1:
        check_files(temporary, manifest)
        _remove_others(temporary, manifest)
    write_synced(temporary / layout.MANIFEST_NAME, text)
    sync_folder(temporary)


def _remove_others(temporary: Path, manifest: Manifest) -> None:
    """Removes what is not part of the checkpoint: the messages of its writers, and what else somebody left here."""
    files = manifest.by_file()
    for path in listing(temporary):
        if path.name not in files:
            remove(path)
