"""A checkpoint of ours as a Hugging Face folder. Pure."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.convert import Check, Converted, check_lines, num_workers, summary
from ascend_moe_train.checkpoint.convert_source import CheckpointSource, VerifiedTensor, open_source
from ascend_moe_train.checkpoint.convert_target import DTYPES, ExportOptions, Target, target_of
from ascend_moe_train.checkpoint.converted import CARRIED, MODEL, PADDING, VOCABULARY_TENSORS
from ascend_moe_train.checkpoint.files import write_synced
from ascend_moe_train.checkpoint.huggingface import Entry, check_shapes, contiguous, name_table, split_block
from ascend_moe_train.checkpoint.huggingface_folder import INDEX, SINGLE
from ascend_moe_train.checkpoint.huggingface_weights import FLOATS, check_finite
from ascend_moe_train.checkpoint.layout import FileLayout, TensorSpec
from ascend_moe_train.checkpoint.resumable import Journal, fingerprint, refuse_existing, resumable_folder
from ascend_moe_train.checkpoint.safetensors_stream import (
    Array,
    raw_dtype,
)
from ascend_moe_train.checkpoint.stream_output import Chunk, Crc32, Job, Output, Progress
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.counts import buffer_shapes

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True)
class _Writing:
    """How tensors are to be written: `specs` of all of theirs in order, and whether non-finite values are refused."""

    path: Path
    specs: Mapping[str, TensorSpec]
    copies: Mapping[str, tuple[str, ...]]
    finite: bool

    def chunks(self, name: str, data: Array, dtype: str) -> Iterator[Chunk]:
        """The next data of a tensor, in its dtype, for it and for those that repeat it."""
        wanted = self.specs[name].dtype
        if wanted != dtype:
            with np.errstate(over="ignore"):  # what is too large becomes an infinity, which is refused below
                data = data.view(FLOATS[dtype]).astype(FLOATS[wanted]).view(raw_dtype(wanted))
        if self.finite:
            check_finite(data, wanted, f"{self.path}: tensor {name!r} as {wanted}")
        for each in (name, *self.copies.get(name, ())):
            yield Chunk(tensor=each, data=data)


def export_folder(
    checkpoint: Path,
    out: Path,
    options: ExportOptions,
    *,
    allow_nonfinite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress,
    check: Check | None = None,
) -> Converted:
    """Makes the Hugging Face folder `out` of a checkpoint, in the dtypes of the checkpoint unless `options` say else.

    Args:
        checkpoint: folder of a checkpoint, or of several: then the newest.
        out: the folder, which must not exist yet.
        options: see ExportOptions.
        allow_nonfinite: write infinities and NaN as they are.
        max_shard_bytes: data per file; a larger tensor gets a file of its own.
        progress: called with bytes done and bytes in all, in any thread.
        check: called with the complete folder before it gets its name.

    Raises:
        CheckpointError, ConfigError: see `import_folder`. There is no `out` then.
    """
    refuse_existing(out)
    source = open_source(checkpoint)
    target = target_of(source.path, source.manifest, options)
    entries = name_table(target.model, target.layout)
    _check(source, entries)
    writing = _writing(source, target, entries, options.dtype, finite=not allow_nonfinite)
    files, index = _plan_files(writing.specs, max_shard_bytes)
    sizes = {name: spec.size_bytes for name, spec in writing.specs.items()}
    jobs = [_job(entry, source, target, writing) for entry in entries]
    jobs += [_carried_job(name, source, writing) for name in source.manifest.tensors if name.startswith(CARRIED)]
    blocks = [source.manifest.tensors[MODEL + e.ours].size_bytes // e.num_blocks for e in entries if not e.verbatim]
    made_from = fingerprint(
        "export",
        hashlib.sha256(layout.dump_manifest(source.manifest)).hexdigest(),
        [[file, hashlib.sha256(made.header).hexdigest()] for file, made in files.items()],
        allow_nonfinite,
    )
    with resumable_folder(out, made_from) as journal:
        output = Output(journal, files, sizes, Crc32, progress)
        reused = output.reuse()
        output.run(jobs, num_workers(max(blocks, default=0)))
        _write_rest(journal, target.extras, index)
        if check is not None:
            check(journal.folder)
    kept = [name for name in source.manifest.tensors if name.startswith((MODEL, PADDING, CARRIED))]
    return summary(
        out,
        target.model,
        target.model_type,
        read=[source.manifest.tensors[name].size_bytes for name in kept],
        written=list(sizes.values()),
        files=(len(files), reused),
        notes=_notes(source, target),
    )


def _check(source: CheckpointSource, entries: list[Entry]) -> None:
    weights = {name: entry for name, entry in source.manifest.tensors.items() if name.startswith(MODEL)}
    check_shapes(
        {name.removeprefix(MODEL): entry.shape for name, entry in weights.items()},
        {entry.ours: entry.shape for entry in entries},
        lambda name: f"{source.path}: tensor ",
    )
    for name, entry in weights.items():
        if entry.dtype not in FLOATS:
            raise CheckpointError(f"{source.path}: tensor {name} is {entry.dtype}; allowed: {', '.join(FLOATS)}")


def _writing(
    source: CheckpointSource, target: Target, entries: list[Entry], dtype: str | None, *, finite: bool
) -> _Writing:
    """Their tensors in the order of the layers and experts, with what repeats them beside them."""
    copies: dict[str, tuple[str, ...]] = {}
    for copy, original in target.copies.items():
        copies[original] = (*copies.get(original, ()), copy)
    fixed = buffer_shapes(target.model)
    specs: dict[str, TensorSpec] = {}
    for entry in entries:
        own = source.manifest.tensors[MODEL + entry.ours].dtype
        wanted = own if dtype is None or entry.ours in fixed else DTYPES[dtype][0]
        shapes = {name: piece.shape for piece in entry.pieces for name in piece.names}
        for number in range(entry.num_blocks):
            for part in entry.sources(number):
                shape = shapes[part.name]
                if entry.ours in VOCABULARY_TENSORS:
                    shape = (target.rows, *shape[1:])
                for name in (part.name, *copies.get(part.name, ())):
                    specs[name] = TensorSpec.model_validate({"dtype": wanted, "shape": shape})
    for name, kept in source.manifest.tensors.items():
        if name.startswith(CARRIED):
            specs[name.removeprefix(CARRIED)] = TensorSpec(dtype=kept.dtype, shape=kept.shape)
    return _Writing(path=source.path, specs=specs, copies=copies, finite=finite)


def _plan_files(
    specs: Mapping[str, TensorSpec], max_shard_bytes: int
) -> tuple[dict[str, FileLayout], dict[str, Any] | None]:
    """The files, as transformers names and fills them, and the index if there is more than one."""
    shards: list[dict[str, TensorSpec]] = [{}]
    room_bytes = max_shard_bytes
    for name, spec in specs.items():
        if spec.size_bytes > room_bytes and shards[-1]:
            shards.append({})
            room_bytes = max_shard_bytes
        shards[-1][name] = spec
        room_bytes -= spec.size_bytes
    if len(shards) == 1:
        return {SINGLE: _file_layout(shards[0])}, None
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    metadata = {
        "total_parameters": sum(spec.elements for spec in specs.values()),
        "total_size": sum(spec.size_bytes for spec in specs.values()),
    }
    places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    files = {file: _file_layout(shard) for file, shard in zip(names, shards, strict=True)}
    return files, {"metadata": metadata, "weight_map": dict(sorted(places.items()))}


def _file_layout(specs: Mapping[str, TensorSpec]) -> FileLayout:
    """Wide items first, so that all are aligned; `format` is what transformers asks for."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(specs, key=lambda name: -layout.DTYPES[specs[name].dtype].itemsize):
        starts[name], end = end, end + specs[name].size_bytes
        header[name] = {
            "dtype": specs[name].dtype,
            "shape": specs[name].shape,
            "data_offsets": [starts[name], end],
        }
    first_bytes = layout.header_bytes(header)
    return FileLayout(
        header=first_bytes,
        offsets_bytes={name: len(first_bytes) + start for name, start in starts.items()},
        total_bytes=len(first_bytes) + end,
    )


def _job(entry: Entry, source: CheckpointSource, target: Target, writing: _Writing) -> Job:
    names = [name for piece in entry.pieces for name in piece.names]

    def chunks() -> Iterator[Chunk]:
        tensor = VerifiedTensor(source, MODEL + entry.ours)
        yield from (_verbatim if entry.verbatim else _rearranged)(entry, tensor, writing)
        tensor.check()
        if entry.ours in VOCABULARY_TENSORS:
            yield from _padding(entry, source, target, writing)

    tensors = tuple(each for name in names for each in (name, *writing.copies.get(name, ())))
    return Job(tensors=tensors, chunks=chunks)


def _verbatim(entry: Entry, tensor: VerifiedTensor, writing: _Writing) -> Iterator[Chunk]:
    for index in range(entry.num_blocks):
        for part in entry.sources(index):
            for piece in tensor.pieces(part.shape):
                yield from writing.chunks(part.name, piece, tensor.dtype)


def _rearranged(entry: Entry, tensor: VerifiedTensor, writing: _Writing) -> Iterator[Chunk]:
    for index in range(entry.num_blocks):
        block = tensor.block(entry.shape[1:] if entry.stacked else entry.shape)
        parts = entry.sources(index)
        for part, view in zip(parts, split_block(entry, block), strict=True):
            data = contiguous(view)
            check_lines([data], [view], [f"{tensor.where}: {part.name!r}"])
            yield from writing.chunks(part.name, data, tensor.dtype)


def _padding(entry: Entry, source: CheckpointSource, target: Target, writing: _Writing) -> Iterator[Chunk]:
    """The rows beyond the vocabulary: those that were there, else zeros."""
    name, rows = entry.sources(0)[0].name, target.rows - entry.shape[0]
    dtype = source.manifest.tensors[MODEL + entry.ours].dtype
    kept = source.manifest.tensors.get(PADDING + entry.ours)
    if kept is not None and kept.shape == (rows, *entry.shape[1:]):
        tensor = VerifiedTensor(source, PADDING + entry.ours)
        for piece in tensor.pieces(kept.shape):
            yield from writing.chunks(name, piece, tensor.dtype)
        tensor.check()
        return
    row = np.zeros(entry.shape[1:], raw_dtype(dtype))
    for _ in range(rows):
        yield from writing.chunks(name, row, dtype)


def _carried_job(name: str, source: CheckpointSource, writing: _Writing) -> Job:
    theirs = name.removeprefix(CARRIED)

    def chunks() -> Iterator[Chunk]:
        tensor = VerifiedTensor(source, name)
        for piece in tensor.pieces(source.manifest.tensors[name].shape):
            yield from writing.chunks(theirs, piece, tensor.dtype)
        tensor.check()

    return Job(tensors=(theirs,), chunks=chunks)


def _write_rest(journal: Journal, extras: Mapping[str, bytes], index: Mapping[str, Any] | None) -> None:
    for name, data in extras.items():
        write_synced(journal.folder / name, data)
    if index is not None:
        write_synced(journal.folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _notes(source: CheckpointSource, target: Target) -> Iterator[str]:
    others = [name for name in source.manifest.tensors if not name.startswith((MODEL, PADDING, CARRIED))]
    if others:
        yield f"{len(others)} tensors of the training state are not part of a model: left out"
    rows = target.rows - target.model.vocab_size
    if rows:
        kept = any(name.startswith(PADDING) for name in source.manifest.tensors)
        yield f"{rows} rows beyond the vocabulary of {target.model.vocab_size}: {'as they were' if kept else 'zeros'}"
