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

from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.files import naming, remove, sync_folder, write_synced
from ascend_moe_train.checkpoint.folders import listing, prune, publish, temporary_of, tidy
from ascend_moe_train.checkpoint.layout import Manifest, TensorEntry
from ascend_moe_train.checkpoint.parts import MAX_WRITERS, OthersProblem, SharedSave, announce, join_save
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
        if not 0 <= self.index < self.count <= MAX_WRITERS:
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
        announce(temporary, num_writers)


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
    shared = _join(temporary, writer)
    if shared is not None and writer.index > 0:
        _hand_in(shared, folder, writer, write)
        return folder
    try:
        _put_together(temporary, step, write, meta, shared, writer.deadline_s)
        publish(temporary, folder)
    except BaseException as error:
        _give_up(root, shared, error)
        raise
    tidy(root)
    prune(root, step, keep)
    return folder


def _join(temporary: Path, writer: Writer) -> SharedSave | None:
    if writer.count == 1:
        return None
    return join_save(temporary, writer.count, writer.deadline_s if writer.index > 0 else 0.0)


def _hand_in(shared: SharedSave, folder: Path, writer: Writer, write: _Write) -> None:
    """Writes files, then the part that tells of them, or at once one that tells of the problem; then waits."""
    try:
        shared.hand_in(writer.index, write())
    except BaseException as error:
        with suppress(CheckpointError):
            shared.give_up(writer.index, error)
        raise
    try:
        shared.await_name(folder, writer.deadline_s)
    except OthersProblem:  # only now is it sure that nobody makes a checkpoint of these files
        with suppress(CheckpointError):
            shared.remove_files(writer.index)
        raise


def _put_together(
    temporary: Path,
    step: int,
    write: _Write,
    meta: Mapping[str, Any],
    shared: SharedSave | None,
    deadline_s: float,
) -> None:
    """Writes the own files, waits for those of the others, and completes the folder but for its name."""
    written = [write()]
    if shared is not None:
        written += shared.collect_parts(deadline_s)
    manifest = Manifest(step=step, tensors=merge_portions(written, str(temporary)), meta=dict(meta))
    text = layout.dump_manifest(manifest)
    if shared is not None:
        check_files(temporary, manifest)
    write_synced(temporary / layout.MANIFEST_NAME, text)
    if shared is not None:
        _remove_others(temporary, manifest)
    sync_folder(temporary)


def _give_up(root: Path, shared: SharedSave | None, error: BaseException) -> None:
    """Leaves nothing of a save that failed but, where there are other writers, what tells them why."""
    with suppress(CheckpointError):
        if shared is None:
            tidy(root)
        elif shared.is_there:
            try:
                shared.give_up(0, error)
            except CheckpointError:
                tidy(root)
                return
            tidy(root, but=shared.folder)


def _remove_others(temporary: Path, manifest: Manifest) -> None:
    """Removes what is not part of the checkpoint: the messages of its writers, and what else somebody left here."""
    kept = {layout.MANIFEST_NAME, *manifest.by_file()}
    for path in listing(temporary):
        if path.name not in kept:
            remove(path)
