"""A Hugging Face folder as a checkpoint of ours. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ascend_moe_train.checkpoint import layout
from ascend_moe_train.checkpoint.convert import Check, Converted, check_lines, summary
from ascend_moe_train.checkpoint.convert_write import Contents, write_checkpoint
from ascend_moe_train.checkpoint.converted import (
    CARRIED,
    MODEL,
    PADDING,
    VOCABULARY_TENSORS,
    Origin,
    converted_meta,
)
from ascend_moe_train.checkpoint.huggingface import (
    CONSTANT_ENDINGS,
    Entry,
    check_shapes,
    config_of_present,
    join_block,
    layout_of,
    name_table,
    split_block,
)
from ascend_moe_train.checkpoint.huggingface_config import model_config_from_hf
from ascend_moe_train.checkpoint.huggingface_folder import HuggingFaceFolder, open_folder
from ascend_moe_train.checkpoint.huggingface_names import repeated
from ascend_moe_train.checkpoint.huggingface_quantized import weights_of
from ascend_moe_train.checkpoint.huggingface_weights import FLOATS, Ledger, PlainWeight, Weight
from ascend_moe_train.checkpoint.layout import TensorSpec
from ascend_moe_train.checkpoint.resumable import refuse_existing
from ascend_moe_train.checkpoint.stream_output import Chunk, Job, Progress
from ascend_moe_train.errors import CheckpointError, ConfigError
from ascend_moe_train.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is to be written, by which jobs, and which tensors of the files each of ours comes from."""

    model: ModelConfig
    origin: Origin
    contents: Contents
    stored: Mapping[str, tuple[str, ...]]


def import_folder(
    source: Path,
    out: Path,
    *,
    vocab_size: int | None = None,
    allow_nonfinite: bool = False,
    max_file_bytes: int = layout.MAX_FILE_BYTES,
    max_piece_bytes: int = layout.MAX_PIECE_BYTES,
    progress: Progress,
    check: Check | None = None,
) -> Converted:
    """Makes the checkpoint `out` of the Hugging Face folder `source`, in the dtypes of the source.

    Args:
        source: the folder.
        out: the checkpoint's folder, which must not exist yet.
        vocab_size: rows of embedding and head that are the vocabulary; what is beyond them is padding, kept aside.
        allow_nonfinite: take infinities and NaN as they are.
        max_file_bytes: data per file; a larger piece gets a file of its own.
        max_piece_bytes: larger tensors are cut.
        progress: called with bytes done and bytes in all, in any thread.
        check: called with the complete folder before it gets its name.

    Raises:
        CheckpointError, ConfigError: the source cannot be used, or what was written is not what was read; one line that
            names file and tensor. There is no `out` then.
    """
    refuse_existing(out)
    folder = open_folder(source)
    ledger = Ledger(folder.places)
    plan = _plan(folder, weights_of(folder, ledger, finite=not allow_nonfinite), ledger, vocab_size)
    files = write_checkpoint(
        out,
        plan.contents,
        made_from=["import", [[name, *_facts(folder, name)] for name in folder.places], allow_nonfinite],
        max_file_bytes=max_file_bytes,
        max_piece_bytes=max_piece_bytes,
        progress=progress,
        done=lambda before: ledger.check(unread={name for tensor in before for name in plan.stored[tensor]}),
        check=check,
    )
    return summary(
        out,
        plan.model,
        plan.origin.model_type,
        read=[place.size_bytes for place in folder.places.values()],
        written=list(plan.contents.sizes_bytes.values()),
        files=files,
        notes=_notes(plan, folder),
    )


def _plan(folder: HuggingFaceFolder, weights: Mapping[str, Weight], ledger: Ledger, vocab_size: int | None) -> _Plan:
    model = _model(folder, vocab_size)
    body, carried, copies = _separate(weights, model)
    name_layout = layout_of(body, model)
    entries = name_table(model, name_layout)
    padded = None
    if vocab_size is not None:
        padded = _cut_vocabulary(body, carried, entries, ledger, vocab_size)
    _check_tensors(body, carried, entries, folder)
    jobs = [_job(entry, body) for entry in entries]
    jobs += [_verbatim_job(name, weight) for name, weight in carried.items()]
    jobs += [_comparison(weights[name], weights[original]) for name, original in copies.items()]
    stored = {MODEL + entry.ours: tuple(_stored(entry, body)) for entry in entries}
    stored |= {name: weight.stored for name, weight in carried.items()}
    specs = {MODEL + entry.ours: _spec(entry.shape, body[entry.sources(0)[0].name].dtype) for entry in entries}
    specs |= {name: _spec(weight.shape, weight.dtype) for name, weight in carried.items()}
    blocks = [specs[MODEL + entry.ours].size_bytes // entry.num_blocks for entry in entries if not entry.verbatim]
    origin = Origin(
        model_type=folder.config["model_type"],
        layout=name_layout,
        decoded=any(len(weight.stored) > 1 for weight in body.values()),
        tied_copies=tuple(copies),
        padded_vocab_size=padded,
    )
    contents = Contents(
        specs=specs,
        jobs=jobs,
        meta=converted_meta(model, origin),
        extras=folder.extras,
        largest_block_bytes=max(blocks, default=0),
    )
    return _Plan(model=model, origin=origin, contents=contents, stored=stored)


def _model(folder: HuggingFaceFolder, vocab_size: int | None) -> ModelConfig:
    try:
        model = config_of_present(model_config_from_hf(folder.config), folder.places)
    except ConfigError as error:
        raise ConfigError(f"{folder.path}/{error}") from error
    return model if vocab_size is None else model.model_copy(update={"vocab_size": vocab_size})


def _separate(
    weights: Mapping[str, Weight], model: ModelConfig
) -> tuple[dict[str, Weight], dict[str, Weight], dict[str, str]]:
    """The model's tensors; those that are only kept, under our names; and repeated ones with what they repeat."""
    copies = {name: original for name, original in repeated(model).items() if name in weights and original in weights}
    carried = {CARRIED + name: weight for name, weight in weights.items() if name.endswith(CONSTANT_ENDINGS)}
    body = {
        name: weight for name, weight in weights.items() if name not in copies and not name.endswith(CONSTANT_ENDINGS)
    }
    return body, carried, copies


def _cut_vocabulary(
    body: dict[str, Weight], carried: dict[str, Weight], entries: list[Entry], ledger: Ledger, vocab_size: int
) -> int | None:
    """Leaves `vocab_size` rows of embedding and head in `body`, the rest in `carried`; returns the rows there were."""
    padded = None
    for entry in entries:
        name = entry.sources(0)[0].name
        weight = body.get(name)
        if entry.ours not in VOCABULARY_TENSORS or not isinstance(weight, PlainWeight) or not weight.shape:
            continue
        rows = weight.shape[0]
        if rows < vocab_size:
            raise CheckpointError(
                f"{weight.place.path}: tensor {name!r} has {rows} rows: --vocab-size {vocab_size} is more"
            )
        if rows > vocab_size:
            padded = rows
            body[name] = replace(weight, place=weight.place.rows(0, vocab_size))
            carried[PADDING + entry.ours] = replace(weight, place=weight.place.rows(vocab_size, rows))
    return padded


def _check_tensors(
    body: Mapping[str, Weight], carried: Mapping[str, Weight], entries: list[Entry], folder: HuggingFaceFolder
) -> None:
    def where(name: str) -> str:
        place = folder.places.get(name)
        return f"{place.path if place is not None else folder.path}: tensor "

    expected = {name: piece.shape for entry in entries for piece in entry.pieces for name in piece.names}
    check_shapes({name: weight.shape for name, weight in body.items()}, expected, where)
    for name, weight in (*body.items(), *carried.items()):
        if weight.dtype not in FLOATS:
            raise CheckpointError(f"{where(weight.stored[0])}{name!r} is {weight.dtype}; allowed: {', '.join(FLOATS)}")
    for entry in entries:
        first, *others = [name for piece in entry.pieces for name in piece.names]
        for name in others:
            if body[name].dtype != body[first].dtype:
                raise CheckpointError(
                    f"{where(name)}{name!r} is {body[name].dtype} but {first!r} is {body[first].dtype}: parts of "
                    f"{entry.ours} must share a dtype"
                )


def _spec(shape: tuple[int, ...], dtype: str) -> TensorSpec:
    return TensorSpec.model_validate({"dtype": dtype, "shape": shape})


def _stored(entry: Entry, body: Mapping[str, Weight]) -> Iterator[str]:
    for piece in entry.pieces:
        for name in piece.names:
            yield from body[name].stored


def _job(entry: Entry, body: Mapping[str, Weight]) -> Job:
    tensor = MODEL + entry.ours
    inner = entry.stacked and not entry.by_expert

    def verbatim() -> Iterator[Chunk]:
        for index in range(entry.num_blocks):
            for source in entry.sources(index):
                for piece in body[source.name].pieces(index if inner else None):
                    yield Chunk(tensor=tensor, data=piece)

    def rearranged() -> Iterator[Chunk]:
        for index in range(entry.num_blocks):
            sources = entry.sources(index)
            parts = [body[source.name].read(index if inner else None) for source in sources]
            block = np.empty(entry.shape[1:] if entry.stacked else entry.shape, parts[0].dtype)
            join_block(entry, parts, block)
            check_lines(parts, split_block(entry, block), [body[source.name].where for source in sources])
            yield Chunk(tensor=tensor, data=block)

    return Job(tensors=(tensor,), chunks=verbatim if entry.verbatim else rearranged)


def _verbatim_job(tensor: str, weight: Weight) -> Job:
    return Job(tensors=(tensor,), chunks=lambda: (Chunk(tensor=tensor, data=piece) for piece in weight.pieces()))


def _comparison(weight: Weight, original: Weight) -> Job:
    """Writes nothing: makes sure that a tensor repeats another one."""
    again = replace(original, ledger=Ledger({})) if isinstance(original, PlainWeight) else original

    def chunks() -> Iterator[Chunk]:
        same = weight.dtype == original.dtype and weight.shape == original.shape
        if not same or not all(
            np.array_equal(one, other) for one, other in zip(weight.pieces(), again.pieces(), strict=True)
        ):
            raise CheckpointError(f"{weight.where} differs from {original.stored[0]!r}, but the config ties them")
        yield from ()

    return Job(tensors=(), chunks=chunks)


def _facts(folder: HuggingFaceFolder, name: str) -> tuple[object, ...]:
    place = folder.places[name]
    stamp = place.stamp
    return (str(place.path), stamp.size_bytes, stamp.changed_ns, place.dtype, place.shape, place.start_bytes)


def _notes(plan: _Plan, folder: HuggingFaceFolder) -> Iterator[str]:
    if plan.origin.decoded:
        yield "quantised weights were decoded to bfloat16"
    if plan.origin.padded_vocab_size is not None:
        rows = plan.origin.padded_vocab_size - plan.model.vocab_size
        yield f"{rows} rows beyond the vocabulary of {plan.model.vocab_size} are kept aside"
    if plan.origin.tied_copies:
        yield f"{', '.join(plan.origin.tied_copies)} repeats a tied tensor: left out, an export has it again"
    if folder.ignored:
        yield f"not taken over: {', '.join(folder.ignored)}"
