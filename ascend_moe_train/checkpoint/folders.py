"""The folders of a run's checkpoints: which there are, how one appears, how one goes. All steps survive a kill.

A checkpoint is made in `.tmp-step-N` and then renamed to `step-N`. A folder that is to go is renamed first, so that it
is never seen half removed. Saving a step again sets the old folder aside as `.replaced-step-N` for the moment between
two renames; readers know that name, so even then one can be loaded.
"""

import os
from pathlib import Path

from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.files import naming, remove, sync_folder

_TEMPORARY = ".tmp-"
_REPLACED = ".replaced-"


def temporary_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is made."""
    return root / f"{_TEMPORARY}{layout.folder_name(step)}"


def step_of_folder(path: Path) -> int | None:
    """The step of a complete checkpoint's folder, set aside or not; None when it has another name."""
    return layout.step_of(path.name.removeprefix(_REPLACED))


def candidates(root: Path) -> list[Path]:
    """Every folder with the name of a checkpoint, newest first; of one step, the one set aside comes second.

    None when `root` is missing. Raises CheckpointError: it cannot be read.
    """
    found = []
    for path in listing(root):
        step = step_of_folder(path)
        if step is not None:
            found.append((step, not path.name.startswith(_REPLACED), path))
    return [path for _, _, path in sorted(found, reverse=True)]


def publish(temporary: Path, folder: Path) -> None:
    """Gives a complete folder its name; the folder that had the name before is set aside for `tidy`."""
    with naming("rename", temporary):
        if os.path.lexists(folder):
            folder.rename(folder.with_name(f"{_REPLACED}{folder.name}"))
        temporary.rename(folder)
    sync_folder(folder.parent)


def prune(root: Path, step: int, keep: int) -> None:
    """Removes checkpoints beyond the newest `keep`; those of later steps than `step` are neither counted nor removed.

    A checkpoint of a later step is one that could not be loaded (the run would have gone on from it): counting it would
    push out a good one, removing it is not ours to decide. It is replaced when the run gets there.
    """
    for path in [path for path in candidates(root) if (layout.step_of(path.name) or 0) <= step][keep:]:
        _discard(path)


def tidy(root: Path, but: Path | None = None) -> None:
    """Ends what an interrupted save began: unfinished folders go, a folder set aside goes or gets its name back.

    An unfinished folder `but` stays.
    """
    for path in listing(root):
        unfinished = path.name.startswith(_TEMPORARY) and layout.step_of(path.name.removeprefix(_TEMPORARY)) is not None
        if unfinished and path != but:
            remove(path)
    for path in listing(root):
        name = path.name.removeprefix(_REPLACED)
        if name == path.name or layout.step_of(name) is None:
            continue
        if os.path.lexists(root / name):
            _discard(path)
        else:
            with naming("rename", path):
                path.rename(root / name)


def listing(root: Path) -> list[Path]:
    """What is in a folder, by name; nothing when there is no folder."""
    with naming("read", root):
        try:
            return sorted(root.iterdir())
        except FileNotFoundError:
            return []


def _discard(path: Path) -> None:
    hidden = path.with_name(f"{_TEMPORARY}{path.name.removeprefix(_REPLACED)}")
    with naming("rename", path):
        path.rename(hidden)
    sync_folder(path.parent)
    remove(hidden)
