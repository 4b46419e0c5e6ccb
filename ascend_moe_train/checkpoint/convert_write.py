"""Writes a checkpoint whose tensors are produced piece by piece, in threads, resumably. Pure."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ascend_moe_train.boxes import Box, box_shape
from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.convert import Check, num_workers
from ascend_moe_train.checkpoint.files import naming, sync_folder, write_synced
from ascend_moe_train.checkpoint.layout import PieceEntry, TensorEntry, TensorSpec
from ascend_moe_train.checkpoint.resumable import Journal, fingerprint, resumable_folder
from ascend_moe_train.checkpoint.stream_output import Chunk, Job, Output, Progress
from ascend_moe_train.errors import CheckpointError


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


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """What the tensors are stored as: of each its pieces in order, and the type and shape of every piece."""

    boxes: Mapping[str, Mapping[str, Box]]
    specs: Mapping[str, TensorSpec]

    def job(self, job: Job) -> Job:
        """The same job, with its chunks cut where pieces end."""
        if all(list(self.boxes[name]) == [name] for name in job.tensors):
            return job

        def chunks() -> Iterator[Chunk]:
            rooms = {name: self._rooms(name) for name in job.tensors}
            for chunk in job.chunks():
                data = chunk.data.reshape(-1).view(np.uint8)
                room = rooms[chunk.tensor]
                while data.size:
                    piece, left_bytes = room[-1]
                    # the last piece gets what there is no room for, which the output refuses
                    taken = data[:left_bytes] if len(room) > 1 else data
                    yield Chunk(tensor=piece, data=taken)
                    data = data[taken.size :]
                    room[-1] = (piece, left_bytes - taken.size)
                    if taken.size == left_bytes and len(room) > 1:
                        room.pop()

        return Job(tensors=tuple(piece for name in job.tensors for piece in self.boxes[name]), chunks=chunks)

    def _rooms(self, name: str) -> list[tuple[str, int]]:
        """The pieces of a tensor with their sizes in bytes, the last one first."""
        return [(piece, self.specs[piece].size_bytes) for piece in self.boxes[name]][::-1]


def write_checkpoint(
    out: Path,
    contents: Contents,
    *,
    made_from: Sequence[object],
    max_file_bytes: int = layout.MAX_FILE_BYTES,
    max_piece_bytes: int = layout.MAX_PIECE_BYTES,
    progress: Progress,
    done: Callable[[Collection[str]], None] | None = None,
    check: Check | None = None,
) -> tuple[int, int]:
    """Writes the checkpoint folder `out`; returns its number of files, and how many were finished by an earlier run.

    Args:
        out: the folder, which must not exist yet.
        contents: what it holds.
        made_from: JSON values that are the same if and only if an interrupted run may be gone on with.
        max_file_bytes: data per file; a larger piece gets a file of its own.
        max_piece_bytes: larger tensors are cut.
        progress: called with bytes done and bytes in all, in any thread.
        done: called after the jobs with the names of the tensors that an earlier run had finished.
        check: called with the complete folder before it gets its name.

    Raises:
        UserError: what a job, `done` or `check` raises; CheckpointError for what cannot be written. There is no `out`.
    """
    pieces = _cut(contents.specs, max_piece_bytes)
    groups = layout.plan_files(pieces.specs, max_file_bytes)
    files = {file: layout.file_layout({name: pieces.specs[name] for name in names}) for file, names in groups.items()}
    headers = [[file, hashlib.sha256(made.header).hexdigest()] for file, made in files.items()]
    with resumable_folder(out, fingerprint(*made_from, headers)) as journal:
        sizes_bytes = {name: spec.size_bytes for name, spec in pieces.specs.items()}
        output = Output(journal, files, sizes_bytes, hashlib.sha256, progress)
        reused = output.reuse()
        before = frozenset(name for name, boxes in pieces.boxes.items() if boxes.keys() <= output.digests.keys())
        output.run([pieces.job(job) for job in contents.jobs], num_workers(contents.largest_block_bytes))
        if done is not None:
            done(before)
        _write_manifest(journal, contents, pieces, groups, output.digests)
        if check is not None:
            check(journal.folder)
    return len(files), reused


def _cut(specs: Mapping[str, TensorSpec], max_piece_bytes: int) -> _Pieces:
    boxes = {name: layout.cut_whole(name, spec, max_piece_bytes) for name, spec in specs.items()}
    cut: dict[str, TensorSpec] = {}
    for name, pieces in boxes.items():
        for piece, box in pieces.items():
            if piece in cut:
                raise CheckpointError(f"checkpoint: two pieces have the name {piece!r}")
            cut[piece] = TensorSpec(dtype=specs[name].dtype, shape=box_shape(box))
    return _Pieces(boxes=boxes, specs=cut)


def _write_manifest(
    journal: Journal,
    contents: Contents,
    pieces: _Pieces,
    groups: Mapping[str, list[str]],
    digests: Mapping[str, str],
) -> None:
    if contents.extras:
        folder = journal.folder / layout.EXTRAS_FOLDER
        with naming("create", folder):
            folder.mkdir()
        for name, data in contents.extras.items():
            write_synced(folder / name, data)
        sync_folder(folder)
    file_of = {piece: file for file, names in groups.items() for piece in names}
    manifest = layout.Manifest(
        step=contents.step,
        tensors={
            name: TensorEntry(
                dtype=spec.dtype,
                shape=spec.shape,
                pieces=tuple(
                    PieceEntry(file=file_of[piece], box=box, sha256=digests[piece])
                    for piece, box in pieces.boxes[name].items()
                ),
            )
            for name, spec in contents.specs.items()
        },
        extras={
            name: layout.ExtraFile(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in contents.extras.items()
        },
        meta=dict(contents.meta),
    )
    write_synced(journal.folder / layout.MANIFEST_NAME, layout.dump_manifest(manifest))
