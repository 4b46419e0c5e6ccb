"""Adapters added to the weights that they adapt: a checkpoint of whole weights. Pure."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.convert import Converted, summary
from ascend_moe_train.checkpoint.convert_target import DTYPES
from ascend_moe_train.checkpoint.convert_write import Contents, write_checkpoint
from ascend_moe_train.checkpoint.converted import ADAPTERS, CARRIED, MODEL, PADDING, model_meta
from ascend_moe_train.checkpoint.huggingface_weights import FLOATS
from ascend_moe_train.checkpoint.layout import Manifest, TensorEntry, TensorSpec
from ascend_moe_train.checkpoint.resumable import refuse_existing
from ascend_moe_train.checkpoint.starting import STARTED_FROM, Start, open_start, read_weights
from ascend_moe_train.checkpoint.stream_output import Chunk, Job, Progress
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.adapters import adapters


def merge_adapters(checkpoint: Path, out: Path, *, dtype: str | None = None, progress: Progress) -> Converted:
    """Makes the checkpoint `out` of a run that trained adapters: W + alpha / r * B A, with all other weights.

    Sums are taken in fp32, and rounded to `dtype` (of `convert_target.DTYPES`), else to the dtype of the weight. What
    the base keeps besides weights comes along, so that `out` exports as the base does.

    Raises:
        CheckpointError: no adapters, a base that is gone or has changed, or damage. There is no `out` then.
    """
    refuse_existing(out)
    start = open_start(checkpoint)
    if start.base is None or start.lora is None:
        raise CheckpointError(f"{start.path}: holds whole weights already, there are no adapters to merge")
    base = start.base.manifest
    weights = {MODEL + name: _spec(start.base, MODEL + name, dtype) for name in start.shapes}
    others = {name: _spec(start.base, name, None) for name in base.tensors if name.startswith((PADDING, CARRIED))}
    jobs = [_weight_job(start, name, spec) for name, spec in weights.items()]
    jobs += [_copy_job(start.base, name) for name in others]
    contents = Contents(
        specs=weights | others,
        jobs=jobs,
        meta=_meta(start, start.base),
        extras={name: store.read_extra(start.base.path, base, name) for name in base.extras},
        step=start.manifest.step,
        largest_block_bytes=max(spec.size_bytes for spec in weights.values()),
    )
    identity = ["merge", start.record.weights_sha256, start.base.record.weights_sha256, dtype]
    files = write_checkpoint(out, contents, made_from=identity, progress=progress)
    origin = model_meta(base.meta, str(start.base.path)).origin
    return summary(
        out,
        start.model,
        None if origin is None else origin.model_type,
        read=[entry.size_bytes for each in (base, start.manifest) for entry in _entries(each)],
        written=list(contents.sizes_bytes.values()),
        files=files,
        notes=[f"{len(adapters(start.model, start.lora))} weights of {start.base.path} have their adapters added"],
    )


def _entries(manifest: Manifest) -> Iterator[TensorEntry]:
    """What is read of a checkpoint: all but the optimizer's."""
    for name, entry in manifest.tensors.items():
        if name.startswith((MODEL, ADAPTERS, PADDING, CARRIED)):
            yield entry


def _spec(base: Start, name: str, dtype: str | None) -> TensorSpec:
    entry = base.manifest.tensors[name]
    return TensorSpec.model_validate(
        {"dtype": entry.dtype if dtype is None else DTYPES[dtype][0], "shape": entry.shape}
    )


def _weight_job(start: Start, name: str, spec: TensorSpec) -> Job:
    def chunks() -> Iterator[Chunk]:
        for _, weight in read_weights(start, [name.removeprefix(MODEL)]):
            yield Chunk(tensor=name, data=weight.astype(FLOATS[spec.dtype], copy=False))

    return Job(tensors=(name,), chunks=chunks)


def _copy_job(base: Start, name: str) -> Job:
    def chunks() -> Iterator[Chunk]:
        for tensor in store.read_tensors(base.path, base.manifest, name.__eq__).values():
            yield Chunk(tensor=name, data=tensor)

    return Job(tensors=(name,), chunks=chunks)


def _meta(start: Start, base: Start) -> dict[str, Any]:
    """That of the run, without adapters; and where the base came from, which decides what it exports to."""
    config = {**start.manifest.meta["config"], "lora": None}
    meta = {"config": config, STARTED_FROM: start.manifest.meta[STARTED_FROM]}
    origin = base.manifest.meta.get("origin")
    return meta if origin is None else {**meta, "origin": origin}
