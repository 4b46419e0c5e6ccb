"""What a checkpoint becomes as a Hugging Face folder: its config.json, the files beside it, the layout. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.converted import PADDING, Origin, model_meta, output_differences
from ascend_moe_train.checkpoint.huggingface_config import model_config_from_hf
from ascend_moe_train.checkpoint.huggingface_families import FAMILIES
from ascend_moe_train.checkpoint.huggingface_folder import CONFIG, dump_config, open_folder, read_config
from ascend_moe_train.checkpoint.huggingface_names import repeated
from ascend_moe_train.checkpoint.huggingface_write import family_of, with_dtype, write_config
from ascend_moe_train.checkpoint.layout import MANIFEST_NAME, Manifest
from ascend_moe_train.checkpoint.starting import started_from
from ascend_moe_train.errors import CheckpointError, ConfigError
from ascend_moe_train.model.config import ModelConfig

# What a user calls a dtype, safetensors', and config.json's.
DTYPES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"fp32": ("F32", "float32"), "bf16": ("BF16", "bfloat16"), "fp16": ("F16", "float16")}
)
_POSITIONS = "max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What the caller wants: the files of another folder (`like`), a family, a dtype, rows of embedding and head.

    `extras` are used where neither the checkpoint nor `like` has a file of that name.
    """

    model_type: str | None = None
    like: Path | None = None
    dtype: str | None = None
    vocab_size: int | None = None
    extras: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Target:
    """`rows` are those of embedding and head, `copies` repeated tensors with what they repeat."""

    model: ModelConfig
    model_type: str
    layout: str
    rows: int
    copies: Mapping[str, str]
    extras: Mapping[str, bytes]


def target_of(path: Path, manifest: Manifest, options: ExportOptions) -> Target:
    """Decides what the checkpoint at `path` becomes.

    Raises:
        CheckpointError, ConfigError: it holds no model, its model is not that of `like`, or no family computes it.
    """
    meta = model_meta(manifest.meta, str(path / MANIFEST_NAME))
    like = options.like or _start(path, manifest)
    base, extras, origin = _base(path, manifest, meta.origin, like)
    rows = _rows(meta.model, manifest, base, origin, options, like)
    wanted = meta.model.model_copy(update={"vocab_size": rows})
    model_type = options.model_type or (base["model_type"] if base else family_of(wanted))
    config = base
    if not base or model_type != base["model_type"] or not _fits(wanted, base, origin, rows, like):
        config = write_config(wanted, model_type, base)
    if not base:
        config = _positions(manifest) | config
    dtype = DTYPES[options.dtype][0] if options.dtype is not None else _dtype_of(manifest)
    as_before = base and options.dtype is None and like is None
    if not as_before or (origin is not None and origin.decoded):
        config = with_dtype(config, next(theirs for ours, theirs in DTYPES.values() if ours == dtype))
    same = config == base and CONFIG in extras
    kept = origin is not None and origin.model_type == model_type
    return Target(
        model=meta.model,
        model_type=model_type,
        layout=origin.layout if origin is not None and kept else FAMILIES[model_type].layout,
        rows=rows,
        copies=_copies(meta.model, origin) if origin is not None and kept else {},
        extras={**options.extras, **extras, CONFIG: extras[CONFIG] if same else dump_config(config)},
    )


def _start(path: Path, manifest: Manifest) -> Path | None:
    """The checkpoint that a run started from, if it came from a Hugging Face folder and this one has nothing of it."""
    record = started_from(manifest.meta, path)
    if manifest.extras or record is None or not (Path(record.path) / MANIFEST_NAME).exists():
        return None
    return Path(record.path) if CONFIG in store.read_manifest(Path(record.path)).extras else None


def _base(
    path: Path, manifest: Manifest, origin: Origin | None, like: Path | None
) -> tuple[dict[str, Any], dict[str, bytes], Origin | None]:
    """The config.json to start from, the files beside it, and what is known of the tensors that belong to them."""
    if like is None:
        extras = {name: store.read_extra(path, manifest, name) for name in manifest.extras}
        config = read_config(extras[CONFIG], str(path / CONFIG)) if CONFIG in extras else {}
        return config, extras, origin
    if (like / MANIFEST_NAME).exists():
        other = store.read_manifest(like)
        if CONFIG not in other.extras:
            raise CheckpointError(f"{like}: holds no {CONFIG}: name a Hugging Face folder, or what was made of one")
        return _base(like, other, model_meta(other.meta, str(like / MANIFEST_NAME)).origin, None)
    folder = open_folder(like)
    return folder.config, dict(folder.extras), origin


def _rows(
    model: ModelConfig,
    manifest: Manifest,
    base: Mapping[str, Any],
    origin: Origin | None,
    options: ExportOptions,
    like: Path | None,
) -> int:
    """Rows of embedding and head: as asked for, as they were, or as the other folder says."""
    if options.vocab_size is not None:
        if options.vocab_size < model.vocab_size:
            raise CheckpointError(
                f"--vocab-size {options.vocab_size} is less than the model's vocabulary of {model.vocab_size}: "
                "amt convert resize cuts it"
            )
        return options.vocab_size
    if origin is not None and any(name.startswith(PADDING) for name in manifest.tensors):
        return origin.padded_vocab_size or model.vocab_size
    theirs = base.get("vocab_size")
    return (
        theirs if options.like is not None and type(theirs) is int and theirs > model.vocab_size else model.vocab_size
    )


def _fits(wanted: ModelConfig, base: dict[str, Any], origin: Origin | None, rows: int, like: Path | None) -> bool:
    """Whether config.json can stay as it is. Raises CheckpointError if `like` is of another model."""
    try:
        differences = output_differences(wanted, model_config_from_hf(base))
    except ConfigError as error:
        raise ConfigError(f"{like or 'checkpoint'}: {error}") from error
    # Tensors that had more rows than config.json said get them again, and it stays.
    as_it_was = origin is not None and origin.padded_vocab_size == rows
    for key, (ours, theirs) in differences.items():
        if key != "vocab_size" and like is not None:
            raise CheckpointError(f"{like}: model.{key} is {theirs} there, but {ours} in the checkpoint")
    return not differences or (as_it_was and differences.keys() == {"vocab_size"})


def _copies(model: ModelConfig, origin: Origin) -> dict[str, str]:
    return {copy: original for copy, original in repeated(model).items() if copy in origin.tied_copies}


def _dtype_of(manifest: Manifest) -> str:
    """The dtype of most of the weights."""
    sizes = {ours: 0 for ours, _ in DTYPES.values()}
    for entry in manifest.tensors.values():
        if entry.dtype in sizes:
            sizes[entry.dtype] += entry.elements
    return max(sizes, key=lambda dtype: sizes[dtype])


def tokenizer_of_run(checkpoint: Path) -> Path | None:
    """The tokenizer.json of the run that wrote a checkpoint (or the newest of several); None where no run did."""
    meta = store.read_manifest(store.find(checkpoint)).meta
    name = _data(meta).get("tokenizer")
    return Path(name) if isinstance(name, str) else None


def _data(meta: Mapping[str, Any]) -> dict[str, Any]:
    config = meta.get("config")
    data = config.get("data") if isinstance(config, dict) else None
    return data if isinstance(data, dict) else {}


def _positions(manifest: Manifest) -> dict[str, Any]:
    """How long the sequences of training were, where the checkpoint knows."""
    seq_len = _data(manifest.meta).get("seq_len")
    return {_POSITIONS: seq_len} if type(seq_len) is int else {}
