"""Writes a checkpoint whose tensors are produced piece by piece, in threads, resumably. Pure."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.convert import Check, num_workers
from ascend_moe_train.checkpoint.files import naming, sync_folder, write_synced
from ascend_moe_train.checkpoint.layout import TensorSpec
from ascend_moe_train.checkpoint.resumable import Journal, fingerprint, resumable_folder
from ascend_moe_train.checkpoint.stream_output import Job, Output, Progress


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint is to hold. `largest_block_bytes`: the most that one job holds of what it rearranges."""

    specs: Mapping[str, TensorSpec]
    jobs: Sequence[Job]
    meta: Mapping[str, Any]
    extras: Mapping[str, bytes] = field(default_factory=dict)
    step: int = 0
    largest_block_bytes: int = 0

    @property
    def sizes_bytes(self) -> dict[str, int]:
        """Of each tensor."""
        return {name: spec.size_bytes for name, spec in self.specs.items()}


def write_checkpoint(
    out: Path,
    contents: Contents,
    *,
    made_from: Sequence[object],
    max_file_bytes: int = layout.MAX_FILE_BYTES,
    progress: Progress,
    done: Callable[[Collection[str]], None] | None = None,
    check: Check | None = None,
) -> tuple[int, int]:
    """Writes the checkpoint folder `out`; returns its number of files, and how many were finished by an earlier run.

    Args:
        out: the folder, which must not exist yet.
        contents: what it holds.
        made_from: JSON values that are the same if and only if an interrupted run may be gone on with.
        max_file_bytes: data per file; a larger tensor gets a file of its own.
        progress: called with bytes done and bytes in all, in any thread.
        done: called after the jobs with the names of the tensors that an earlier run had finished.
        check: called with the complete folder before it gets its name.

    Raises:
        UserError: what a job, `done` or `check` raises; CheckpointError for what cannot be written. There is no `out`.
    """
    groups = layout.plan_files(contents.specs, max_file_bytes)
    files = {file: layout.file_layout({name: contents.specs[name] for name in names}) for file, names in groups.items()}
    headers = [[file, hashlib.sha256(made.header).hexdigest()] for file, made in files.items()]
    with resumable_folder(out, fingerprint(*made_from, headers)) as journal:
        output = Output(journal, files, contents.sizes_bytes, hashlib.sha256, progress)
        reused = output.reuse()
        before = frozenset(output.digests)
        output.run(contents.jobs, num_workers(contents.largest_block_bytes))
        if done is not None:
            done(before)
        _write_manifest(journal, contents, groups, output.digests)
        if check is not None:
            check(journal.folder)
    return len(files), reused


def _write_manifest(
    journal: Journal, contents: Contents, groups: Mapping[str, list[str]], digests: Mapping[str, str]
) -> None:
    if contents.extras:
        folder = journal.folder / layout.EXTRAS_FOLDER
        with naming("create", folder):
            folder.mkdir()
        for name, data in contents.extras.items():
            write_synced(folder / name, data)
        sync_folder(folder)
    manifest = layout.Manifest(
        step=contents.step,
        tensors={
            name: layout.TensorEntry(**contents.specs[name].model_dump(), file=file, sha256=digests[name])
            for file, names in groups.items()
            for name in names
        },
        extras={
            name: layout.ExtraFile(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in contents.extras.items()
        },
        meta=dict(contents.meta),
    )
    write_synced(journal.folder / layout.MANIFEST_NAME, layout.dump_manifest(manifest))
