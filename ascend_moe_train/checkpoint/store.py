"""Saves and loads checkpoint folders, so that no kill, full disk or damaged file leaves a run without a good one.

A checkpoint is written to `.tmp-step-N`, by one process or by several at once, made durable file by file and then
renamed to `step-N`. There is no pointer to the newest one: the newest is the `step-N` with the highest N, and a folder
of that name is complete. `layout.py` describes what is in a folder, `folders.py` how folders come and go, `saving.py`
how one or several writers make one.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.files import naming, open_regular
from ascend_moe_train.checkpoint.folders import candidates, step_of_folder
from ascend_moe_train.checkpoint.layout import Manifest
from ascend_moe_train.checkpoint.piece_files import check_files
from ascend_moe_train.checkpoint.portion import whole
from ascend_moe_train.checkpoint.reshard import read_whole
from ascend_moe_train.checkpoint.saving import prepare, save_part
from ascend_moe_train.errors import CheckpointError

Array = np.ndarray[Any, Any]

CHECKPOINTS = "checkpoints"  # within the folder of a run


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that is known to be complete; its tensors have not been read."""

    path: Path
    step: int
    meta: dict[str, Any]
    names: tuple[str, ...]


def save(
    root: Path,
    step: int,
    tensors: Mapping[str, Array],
    meta: Mapping[str, Any],
    *,
    keep: int,
    max_file_bytes: int = layout.MAX_FILE_BYTES,
    max_piece_bytes: int = layout.MAX_PIECE_BYTES,
) -> Path:
    """Writes the checkpoint of a step into `root` and returns its folder once everything is on the disk.

    Then removes older checkpoints beyond the newest `keep`, this one included; later steps are left alone. Needs free
    space for one checkpoint more than `keep`, and memory for one piece that is not contiguous, else almost none.

    Args:
        root: folder of all checkpoints of a run, made when missing. One run at a time may write to it.
        step: optimizer steps done.
        tensors: name to array of one of `layout.DTYPES`; they must not change meanwhile.
        meta: JSON values (tuples come back as lists).
        keep: at least 1.
        max_file_bytes: data per file; a larger piece gets a file of its own.
        max_piece_bytes: larger tensors are cut.

    Raises:
        CheckpointError: a name, dtype or meta value that cannot be stored, a full disk, a folder that cannot be
            written. Nothing is left behind and the checkpoints that were there remain.
    """
    if not 0 <= step <= layout.MAX_STEP or keep < 1:
        raise ValueError(f"step {step} and keep {keep}: allowed are a step from 0 and keep from 1")
    portions = {name: whole(array) for name, array in tensors.items()}
    prepare(root, step)
    return save_part(
        root, step, portions, meta, keep=keep, max_file_bytes=max_file_bytes, max_piece_bytes=max_piece_bytes
    )


def newest(root: Path) -> Checkpoint | None:
    """The newest checkpoint, None when `root` is missing or holds none. Reads the manifest, not the tensors.

    Raises:
        CheckpointError: it is damaged as far as that shows without reading the tensors.
    """
    found = candidates(root)
    return open_checkpoint(found[0]) if found else None


def steps(root: Path) -> list[int]:
    """The steps of all folders with the name of a checkpoint, oldest first; they may be damaged."""
    found = map(step_of_folder, candidates(root))
    return sorted({step for step in found if step is not None})


def find(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest in a folder of checkpoints or in that of a run.

    Raises:
        CheckpointError: there is none, or the newest is damaged as far as that shows without reading the tensors.
    """
    if (path / layout.MANIFEST_NAME).exists():
        return path
    checkpoint = newest(path) or newest(path / CHECKPOINTS)
    if checkpoint is not None:
        return checkpoint.path
    advice = "name a folder step-... or a folder that holds some"
    if (path / "config.json").exists():
        advice = "a Hugging Face folder becomes one with amt convert import"
    raise CheckpointError(f"{path}: no checkpoint here; {advice}")


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads the manifest of one checkpoint folder and compares every file's size and header with it.

    Raises:
        CheckpointError: not a checkpoint, or damaged.
    """
    return _checkpoint(path, read_manifest(path))


def load(path: Path, *, select: Callable[[str], bool] | None = None) -> tuple[dict[str, Array], dict[str, Any]]:
    """Reads one checkpoint folder and verifies every byte that it returns.

    Args:
        path: the folder, such as `checkpoints/step-00000200`.
        select: which tensors to read, by name; all of them when None.

    Returns:
        The tensors, new arrays in order of name, and `meta`.

    Raises:
        CheckpointError: not a checkpoint, or damaged; one line with the file and, where there is one, the tensor.
    """
    manifest = read_manifest(path)
    return read_tensors(path, manifest, select), manifest.meta


def load_newest(root: Path, on_skip: Callable[[str], None]) -> tuple[Checkpoint, dict[str, Array]] | None:
    """Loads the newest checkpoint that is not damaged, None when there is no checkpoint at all.

    Args:
        root: folder of all checkpoints of a run.
        on_skip: called with one line for each damaged checkpoint that was passed over.

    Raises:
        CheckpointError: there are checkpoints and none can be read; starting afresh would be a silent loss.
    """
    found = candidates(root)
    for path in found:
        try:
            manifest = read_manifest(path)
            return _checkpoint(path, manifest), read_tensors(path, manifest, None)
        except CheckpointError as error:
            on_skip(f"checkpoint {path.name} skipped: {error}")
    if found:
        raise CheckpointError(f"{root}: none of {len(found)} checkpoints can be read; move them away to restart")
    return None


def read_manifest(path: Path) -> Manifest:
    """Reads a folder's manifest and compares every file's size and header with it.

    Raises:
        CheckpointError: not a checkpoint, or damaged as far as that shows without reading the tensors.
    """
    manifest_path = path / layout.MANIFEST_NAME
    with open_regular(manifest_path) as stream, naming("read", manifest_path):
        if os.fstat(stream.fileno()).st_size > layout.MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{manifest_path}: larger than {layout.MAX_MANIFEST_BYTES} bytes")
        text = stream.readall()
    manifest = layout.parse_manifest(text, str(manifest_path))
    step = step_of_folder(path)
    if step is not None and step != manifest.step:
        raise CheckpointError(f"{manifest_path}: step = {manifest.step}, but the folder is {path.name}")
    check_files(path, manifest)
    for name in manifest.extras:
        read_extra(path, manifest, name)
    return manifest


def read_extra(path: Path, manifest: Manifest, name: str) -> bytes:
    """Reads one file of EXTRAS_FOLDER and verifies it.

    Raises:
        CheckpointError: missing or damaged.
    """
    expected = manifest.extras[name]
    folder = path / layout.EXTRAS_FOLDER
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: a symbolic link, which is not followed")
    with open_regular(folder / name) as stream, naming("read", folder / name):
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes != expected.size_bytes:
            raise CheckpointError(f"{folder / name}: has {size_bytes} bytes, its manifest says {expected.size_bytes}")
        data = stream.readall()
    if hashlib.sha256(data).hexdigest() != expected.sha256:
        raise CheckpointError(f"{folder / name}: sha256 does not match the manifest: damaged")
    return data


def read_tensors(path: Path, manifest: Manifest, select: Callable[[str], bool] | None = None) -> dict[str, Array]:
    """As `load`, for a folder whose manifest has been read before."""
    return read_whole(path, manifest, [name for name in sorted(manifest.tensors) if select is None or select(name)])


def _checkpoint(path: Path, manifest: Manifest) -> Checkpoint:
    return Checkpoint(path=path, step=manifest.step, meta=manifest.meta, names=tuple(sorted(manifest.tensors)))
