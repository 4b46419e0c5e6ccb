"""New models from old ones: another vocabulary, experts from one dense feed-forward. Pure.

Checkpoints to checkpoints, tensor by tensor; shape letters: D hidden, F ffn, E experts, V vocabulary.
"""

import hashlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ascend_moe_train.checkpoint import layout, store
from ascend_moe_train.checkpoint.convert import Converted, summary
from ascend_moe_train.checkpoint.convert_source import CheckpointSource, VerifiedTensor, open_source
from ascend_moe_train.checkpoint.convert_write import Contents, write_checkpoint
from ascend_moe_train.checkpoint.converted import (
    CARRIED,
    MODEL,
    PADDING,
    VOCABULARY_TENSORS,
    Origin,
    converted_meta,
    model_meta,
    weight_shapes,
)
from ascend_moe_train.checkpoint.huggingface import check_shapes, copy_across, tensor_shapes
from ascend_moe_train.checkpoint.huggingface_families import FAMILIES
from ascend_moe_train.checkpoint.huggingface_folder import CONFIG, dump_config, read_config
from ascend_moe_train.checkpoint.huggingface_weights import FLOATS
from ascend_moe_train.checkpoint.huggingface_write import family_of, write_config
from ascend_moe_train.checkpoint.layout import MANIFEST_NAME, TensorSpec
from ascend_moe_train.checkpoint.resumable import refuse_existing
from ascend_moe_train.checkpoint.safetensors_stream import ITEM_BYTES, Array, raw_dtype
from ascend_moe_train.checkpoint.stream_output import Chunk, Job, Progress
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.config import ModelConfig, MoEConfig

# What is read; the rest of a training run's checkpoint is its own.
_READ = (MODEL, PADDING, CARRIED)
_ROWS_BYTES = 4 * 2**20  # of rows at once
_DENSE_W13, _DENSE_W2 = "ffn.w13.weight", "ffn.w2.weight"


@dataclass(frozen=True, kw_only=True)
class _Old:
    """The checkpoint that is read, its model, and where that came from."""

    source: CheckpointSource
    model: ModelConfig
    origin: Origin | None

    def dtype(self, name: str) -> str:
        """Of one of the weights."""
        return self.source.manifest.tensors[MODEL + name].dtype


def resize_vocabulary(checkpoint: Path, out: Path, *, vocab_size: int, progress: Progress) -> Converted:
    """Makes a checkpoint with `vocab_size` rows of embedding and head: rows are cut at the end, or added there.

    An added row is the mean of the old ones, so that a new token starts as an average one and takes its share of
    probability from none of the others (Hewitt, 2021, "Initializing New Word Embeddings").

    Raises:
        CheckpointError: no checkpoint of a whole model, or damaged. There is no `out` then.
    """
    old = _open(checkpoint, out)
    model = old.model.model_copy(update={"vocab_size": vocab_size})
    rows = vocab_size - old.model.vocab_size
    jobs, specs = _copied(old, without=VOCABULARY_TENSORS)
    for name in VOCABULARY_TENSORS:
        shape = tensor_shapes(model).get(name)
        if shape is not None:
            specs[MODEL + name] = _spec(shape, old.dtype(name))
            jobs.append(_job(MODEL + name, partial(_resized, old, name, shape)))
    word = f"{rows} rows added, each the mean of the old ones" if rows >= 0 else f"the last {-rows} rows cut"
    made_from = ["resize", vocab_size]
    return _write(old, model, out, specs, jobs, made_from, [f"vocabulary of {vocab_size}: {word}"], progress)


def upcycle(
    checkpoint: Path, out: Path, *, num_experts: int, top_k: int, noise: float, seed: int, progress: Progress
) -> Converted:
    """Makes a Mixture of Experts of a dense checkpoint (Komatsuzaki et al., 2022, arXiv 2212.05055).

    Every expert of a layer is a copy of its feed-forward. The router is drawn with the model's init_std, so that tokens
    spread; the gates of the chosen experts sum to 1, so that without `noise` the first logits are those of the dense
    model whatever it chooses. `noise` makes the copies differ: each number changes by a normal one with this share of
    the standard deviation of its tensor.

    Raises:
        CheckpointError: no checkpoint of a whole dense model, or damaged. There is no `out` then.
    """
    old = _open(checkpoint, out)
    if old.model.moe is not None:
        raise CheckpointError(
            f"{old.source.path}: has {old.model.moe.num_experts} experts already: upcycle a dense model"
        )
    if top_k > num_experts:
        raise CheckpointError(f"--top-k {top_k} is more than --experts {num_experts}")
    moe = MoEConfig(num_experts=num_experts, top_k=top_k, ffn=old.model.ffn, normalize_topk=True)
    model = old.model.model_copy(update={"moe": moe})
    dense = [name for name in tensor_shapes(old.model) if name.endswith((_DENSE_W13, _DENSE_W2))]
    jobs, specs = _copied(old, without=dense)
    shapes = tensor_shapes(model)
    for name in dense:
        expert = name.replace("ffn.w", "moe.experts.w").removesuffix(".weight")
        specs[MODEL + expert] = _spec(shapes[expert], old.dtype(name))
        jobs.append(_job(MODEL + expert, partial(_experts, old, name, num_experts, noise, seed)))
        if name.endswith(_DENSE_W13):
            router = name.replace(_DENSE_W13, "moe.router.weight")
            specs[MODEL + router] = _spec(shapes[router], old.dtype(name))
            jobs.append(_job(MODEL + router, partial(_router, old, router, specs[MODEL + router], seed)))
    made_from = ["upcycle", num_experts, top_k, noise, seed]
    word = f"differ by {noise:g} of their spread" if noise else "are equal: the first logits are the dense model's"
    return _write(old, model, out, specs, jobs, made_from, [f"{num_experts} experts a layer, {word}"], progress)


def _open(checkpoint: Path, out: Path) -> _Old:
    refuse_existing(out)
    source = open_source(checkpoint)
    meta = model_meta(source.manifest.meta, str(source.path / MANIFEST_NAME))
    shapes = tensor_shapes(meta.model)
    check_shapes(weight_shapes(source.manifest), shapes, lambda name: f"{source.path}: tensor ")
    return _Old(source=source, model=meta.model, origin=meta.origin)


def _copied(old: _Old, *, without: Collection[str]) -> tuple[list[Job], dict[str, TensorSpec]]:
    """Jobs that copy what stays as it is; rows beyond the vocabulary go with the vocabulary's tensors."""
    jobs: list[Job] = []
    specs: dict[str, TensorSpec] = {}
    for name, entry in old.source.manifest.tensors.items():
        for prefix in (MODEL, PADDING, CARRIED):
            if name.startswith(prefix) and name.removeprefix(prefix) not in without:
                specs[name] = TensorSpec(dtype=entry.dtype, shape=entry.shape)
                jobs.append(_job(name, partial(_verbatim, old, name)))
    return jobs, specs


def _verbatim(old: _Old, name: str) -> Iterator[Array]:
    tensor = VerifiedTensor(old.source, name)
    yield from tensor.pieces(old.source.manifest.tensors[name].shape)
    tensor.check()


def _resized(old: _Old, name: str, shape: tuple[int, ...]) -> Iterator[Array]:
    """The old rows, as many as there is room for; then their mean."""
    tensor = VerifiedTensor(old.source, MODEL + name)
    width, left = shape[1], shape[0]
    total_D = np.zeros(width)
    for piece in _whole_rows(tensor, old.model.vocab_size, width):
        total_D += piece.view(FLOATS[tensor.dtype]).astype(np.float32).sum(axis=0, dtype=np.float64)
        if left:
            yield piece[:left]
        left -= min(left, len(piece))
    tensor.check()
    mean_D = (total_D / old.model.vocab_size).astype(FLOATS[tensor.dtype]).view(raw_dtype(tensor.dtype))
    for _ in range(left):
        yield mean_D


def _whole_rows(tensor: VerifiedTensor, rows: int, width: int) -> Iterator[Array]:
    at_once = max(1, _ROWS_BYTES // (width * ITEM_BYTES[tensor.dtype]))
    for start in range(0, rows, at_once):
        yield tensor.block((min(at_once, rows - start), width))


def _experts(old: _Old, name: str, num_experts: int, noise: float, seed: int) -> Iterator[Array]:
    """The transposed weight ([out, in] to [in, out]), once for each expert."""
    tensor = VerifiedTensor(old.source, MODEL + name)
    dense = tensor.block(old.source.manifest.tensors[MODEL + name].shape)
    tensor.check()
    expert = np.empty(dense.shape[::-1], dense.dtype)
    copy_across(expert, dense.T)
    if not noise:
        for _ in range(num_experts):
            yield expert
        return
    values = expert.view(FLOATS[tensor.dtype]).astype(np.float32)
    size = noise * float(values.std())
    for index in range(num_experts):
        changed = values + size * _random(seed, name, index).standard_normal(values.shape, np.float32)
        yield changed.astype(FLOATS[tensor.dtype]).view(dense.dtype)


def _router(old: _Old, name: str, spec: TensorSpec, seed: int) -> Iterator[Array]:
    values = _random(seed, name, 0).standard_normal(spec.shape, np.float32) * old.model.init_std
    yield values.astype(FLOATS[spec.dtype]).view(raw_dtype(spec.dtype))


def _random(seed: int, name: str, index: int) -> np.random.Generator:
    """A stream of its own for each (seed, name, index), so that no order of work changes a number."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), index])


def _job(tensor: str, pieces: Callable[[], Iterator[Array]]) -> Job:
    return Job(tensors=(tensor,), chunks=lambda: (Chunk(tensor=tensor, data=piece) for piece in pieces()))


def _spec(shape: tuple[int, ...], dtype: str) -> TensorSpec:
    return TensorSpec.model_validate({"dtype": dtype, "shape": shape})


def _write(
    old: _Old,
    model: ModelConfig,
    out: Path,
    specs: Mapping[str, TensorSpec],
    jobs: list[Job],
    made_from: list[object],
    notes: list[str],
    progress: Progress,
) -> Converted:
    manifest_sha256 = hashlib.sha256(layout.dump_manifest(old.source.manifest)).hexdigest()
    origin, extras = _origin(old, model, notes)
    contents = Contents(
        specs=specs,
        jobs=jobs,
        meta=converted_meta(model, origin),
        extras=extras,
        largest_block_bytes=max(entry.size_bytes for entry in old.source.manifest.tensors.values()),
    )
    files = write_checkpoint(out, contents, made_from=[*made_from, manifest_sha256], progress=progress)
    return summary(
        out,
        model,
        origin.model_type if origin is not None else None,
        read=[entry.size_bytes for name, entry in old.source.manifest.tensors.items() if name.startswith(_READ)],
        written=list(contents.sizes_bytes.values()),
        files=files,
        notes=notes,
    )


def _origin(old: _Old, model: ModelConfig, notes: list[str]) -> tuple[Origin | None, dict[str, bytes]]:
    """The files from Hugging Face with a config.json of the new model, as an export will want them."""
    source = old.source
    extras = {name: store.read_extra(source.path, source.manifest, name) for name in source.manifest.extras}
    if old.origin is None or CONFIG not in extras:
        return None, extras
    same_kind = (model.moe is None) == (old.model.moe is None)
    padded = old.origin.padded_vocab_size if model.vocab_size == old.model.vocab_size else None
    try:
        model_type = old.origin.model_type if same_kind else family_of(model)
        wanted = model.model_copy(update={"vocab_size": padded or model.vocab_size})
        config = write_config(wanted, model_type, read_config(extras[CONFIG], str(source.path / CONFIG)))
    except CheckpointError as error:
        notes.append(f"{CONFIG} is left out: {error}")
        return None, {name: data for name, data in extras.items() if name != CONFIG}
    origin = Origin(
        model_type=model_type,
        layout=old.origin.layout if same_kind else FAMILIES[model_type].layout,
        tied_copies=old.origin.tied_copies,
        padded_vocab_size=padded,
        decoded=old.origin.decoded,
    )
    return origin, {**extras, CONFIG: dump_config(config)}
