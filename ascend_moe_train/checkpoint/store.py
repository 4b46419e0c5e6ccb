"""Saves and loads checkpoint folders, so that no kill, full disk or damaged file leaves a run without a good one.

A checkpoint is written to `.tmp-step-N`, made durable file by file and then renamed to `step-N`. There is no pointer
to the newest one: the newest is the `step-N` with the highest N, and a folder of that name is complete. A folder that
is to go is renamed first, so that it is never seen half removed. Saving a step again sets the old folder aside as
`.replaced-step-N` for the moment between two renames; readers know that name, so even then one can be loaded.
`layout.py` describes what is in a folder.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.files import naming, open_regular, remove, sync_file, sync_folder
from ascend_moe_train.checkpoint.layout import Manifest, TensorEntry
from ascend_moe_train.errors import CheckpointError

Array = np.ndarray[Any, Any]

CHECKPOINTS = "checkpoints"  # within the folder of a run
_TEMPORARY = ".tmp-"
_REPLACED = ".replaced-"
# Hashing and writing alternate on pieces that stay in the CPU's cache.
_PIECE_BYTES = 2**20


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
) -> Path:
    """Writes the checkpoint of a step into `root` and returns its folder once everything is on the disk.

    Then removes older checkpoints beyond the newest `keep`, this one included; later steps are left alone. Needs free
    space for one checkpoint more than `keep`, and memory for one tensor that is not contiguous, else almost none.

    Args:
        root: folder of all checkpoints of a run, made when missing. One run at a time may write to it.
        step: optimizer steps done.
        tensors: name to array of one of `layout.DTYPES`; they must not change meanwhile.
        meta: JSON values (tuples come back as lists).
        keep: at least 1.
        max_file_bytes: data per file; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: a name, dtype or meta value that cannot be stored, a full disk, a folder that cannot be
            written. Nothing is left behind and the checkpoints that were there remain.
    """
    if not 0 <= step <= layout.MAX_STEP or keep < 1:
        raise ValueError(f"step {step} and keep {keep}: allowed are a step from 0 and keep from 1")
    specs = layout.tensor_specs(tensors)
    with naming("create", root):
        root.mkdir(parents=True, exist_ok=True)
    _tidy(root)
    folder = root / layout.folder_name(step)
    temporary = root / f"{_TEMPORARY}{folder.name}"
    try:
        with naming("create", temporary):
            temporary.mkdir()
        entries: dict[str, TensorEntry] = {}
        for file, names in layout.plan_files(specs, max_file_bytes).items():
            part = {name: specs[name] for name in names}
            digests = _write_file(temporary / file, layout.file_layout(part).header, {n: tensors[n] for n in names})
            for name, spec in part.items():
                entries[name] = TensorEntry(dtype=spec.dtype, shape=spec.shape, file=file, sha256=digests[name])
        manifest = Manifest(step=step, tensors=entries, meta=dict(meta))
        _write_file(temporary / layout.MANIFEST_NAME, layout.dump_manifest(manifest), {})
        sync_folder(temporary)
        _publish(temporary, folder)
    except BaseException:
        with suppress(CheckpointError):
            _tidy(root)
        raise
    _tidy(root)
    _prune(root, step, keep)
    return folder


def newest(root: Path) -> Checkpoint | None:
    """The newest checkpoint, None when `root` is missing or holds none. Reads the manifest, not the tensors.

    Raises:
        CheckpointError: it is damaged as far as that shows without reading the tensors.
    """
    candidates = _candidates(root)
    return open_checkpoint(candidates[0]) if candidates else None


def steps(root: Path) -> list[int]:
    """The steps of all folders with the name of a checkpoint, oldest first; they may be damaged."""
    found = (layout.step_of(path.name.removeprefix(_REPLACED)) for path in _candidates(root))
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
    candidates = _candidates(root)
    for path in candidates:
        try:
            manifest = read_manifest(path)
            return _checkpoint(path, manifest), read_tensors(path, manifest, None)
        except CheckpointError as error:
            on_skip(f"checkpoint {path.name} skipped: {error}")
    if candidates:
        raise CheckpointError(f"{root}: none of {len(candidates)} checkpoints can be read; move them away to restart")
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
    step = layout.step_of(path.name.removeprefix(_REPLACED))
    if step is not None and step != manifest.step:
        raise CheckpointError(f"{manifest_path}: step = {manifest.step}, but the folder is {path.name}")
    for file, entries in manifest.by_file().items():
        with open_regular(path / file) as stream:
            _check_file(stream, path / file, layout.file_layout(entries))
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
    tensors: dict[str, Array] = {}
    for file, entries in manifest.by_file().items():
        expected = layout.file_layout(entries)
        with open_regular(path / file) as stream:
            _check_file(stream, path / file, expected)
            for name, start_bytes in expected.offsets_bytes.items():
                if select is None or select(name):
                    stream.seek(start_bytes)
                    tensors[name] = _read_tensor(stream, entries[name], f"{path / file}: tensor {name!r}")
    return {name: tensors[name] for name in sorted(tensors)}


def _checkpoint(path: Path, manifest: Manifest) -> Checkpoint:
    return Checkpoint(path=path, step=manifest.step, meta=manifest.meta, names=tuple(sorted(manifest.tensors)))


def _check_file(stream: FileIO, path: Path, expected: layout.FileLayout) -> None:
    with naming("read", path):
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes != expected.total_bytes:
            raise CheckpointError(f"{path}: has {size_bytes} bytes, its manifest says {expected.total_bytes}")
        if stream.read(len(expected.header)) != expected.header:
            raise CheckpointError(f"{path}: header does not match the manifest: damaged or edited")


def _read_tensor(stream: FileIO, entry: TensorEntry, where: str) -> Array:
    try:
        array: Array = np.empty(entry.shape, layout.DTYPES[entry.dtype])
    except (MemoryError, ValueError) as error:
        raise CheckpointError(f"{where}: no memory for {entry.size_bytes} bytes of shape {entry.shape}") from error
    digest = hashlib.sha256()
    for piece in _pieces(array):
        done_bytes = 0
        while done_bytes < len(piece):
            try:
                count = stream.readinto(piece[done_bytes:])
            except OSError as error:
                raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from error
            if not count:
                raise CheckpointError(f"{where}: the file ends too early")
            done_bytes += count
        digest.update(piece)
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(f"{where}: sha256 does not match the manifest: damaged")
    if entry.dtype == "BOOL" and array.size and array.view(np.uint8).max() > 1:
        raise CheckpointError(f"{where}: a bool is stored as a byte above 1")
    return array


def _write_file(path: Path, header: bytes, tensors: Mapping[str, Array]) -> dict[str, str]:
    """Writes a new file, makes it durable and returns the sha256 of each tensor's bytes."""
    digests = {}
    with naming("write", path), path.open("xb") as stream:
        stream.write(header)
        for name, array in tensors.items():
            digest = hashlib.sha256()
            for piece in _pieces(np.asarray(array, order="C")):
                stream.write(piece)
                digest.update(piece)
            digests[name] = digest.hexdigest()
        sync_file(stream)
    return digests


def _pieces(array: Array) -> Iterator[memoryview]:
    data = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


def _publish(temporary: Path, folder: Path) -> None:
    """Gives a complete folder its name; the folder that had the name before is set aside for `_tidy`."""
    with naming("rename", temporary):
        if os.path.lexists(folder):
            folder.rename(folder.with_name(f"{_REPLACED}{folder.name}"))
        temporary.rename(folder)
    sync_folder(folder.parent)


def _prune(root: Path, step: int, keep: int) -> None:
    # A checkpoint of a later step is one that could not be loaded (the run would have gone on from it): counting it
    # would push out a good one, removing it is not ours to decide. It is replaced when the run gets there.
    for path in [path for path in _candidates(root) if (layout.step_of(path.name) or 0) <= step][keep:]:
        _discard(path)


def _discard(path: Path) -> None:
    hidden = path.with_name(f"{_TEMPORARY}{path.name.removeprefix(_REPLACED)}")
    with naming("rename", path):
        path.rename(hidden)
    sync_folder(path.parent)
    remove(hidden)


def _tidy(root: Path) -> None:
    """Ends what an interrupted save began: unfinished folders go, a folder set aside goes or gets its name back."""
    for path in _listing(root):
        if path.name.startswith(_TEMPORARY) and layout.step_of(path.name.removeprefix(_TEMPORARY)) is not None:
            remove(path)
    for path in _listing(root):
        name = path.name.removeprefix(_REPLACED)
        if name == path.name or layout.step_of(name) is None:
            continue
        if os.path.lexists(root / name):
            _discard(path)
        else:
            with naming("rename", path):
                path.rename(root / name)


def _candidates(root: Path) -> list[Path]:
    """Every folder with the name of a checkpoint, newest first; of one step, the one set aside comes second."""
    found = []
    for path in _listing(root):
        step = layout.step_of(path.name.removeprefix(_REPLACED))
        if step is not None:
            found.append((step, not path.name.startswith(_REPLACED), path))
    return [path for _, _, path in sorted(found, reverse=True)]


def _listing(root: Path) -> list[Path]:
    with naming("read", root):
        try:
            return sorted(root.iterdir())
        except FileNotFoundError:
            return []
