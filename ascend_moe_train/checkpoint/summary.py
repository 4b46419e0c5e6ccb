"""What is in a checkpoint, without reading its tensors."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ascend_moe_train.checkpoint.store import read_manifest


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """Figures of one checkpoint. A prefix is a tensor's name up to its first dot."""

    path: Path
    step: int
    tensors: int
    files: int
    data_bytes: int
    elements: int
    elements_by_prefix: Mapping[str, int]
    bytes_by_dtype: Mapping[str, int]
    config_keys: tuple[str, ...]
    meta_keys: tuple[str, ...]


def inspect_checkpoint(path: Path) -> CheckpointSummary:
    """Summarises one checkpoint folder. File sizes and headers are verified, the checksums of the data are not.

    Config keys are the dotted names of the leaves of `meta["config"]`.

    Raises:
        CheckpointError: not a checkpoint, or damaged as far as that shows without reading the tensors.
    """
    manifest = read_manifest(path)
    elements_by_prefix: Counter[str] = Counter()
    bytes_by_dtype: Counter[str] = Counter()
    for name, entry in sorted(manifest.tensors.items()):
        elements_by_prefix[name.partition(".")[0]] += entry.elements
        bytes_by_dtype[entry.dtype] += entry.size_bytes
    return CheckpointSummary(
        path=path,
        step=manifest.step,
        tensors=len(manifest.tensors),
        files=len(manifest.by_file()),
        data_bytes=bytes_by_dtype.total(),
        elements=elements_by_prefix.total(),
        elements_by_prefix=dict(elements_by_prefix),
        bytes_by_dtype=dict(bytes_by_dtype),
        config_keys=tuple(_leaves(manifest.meta.get("config"), "")),
        meta_keys=tuple(sorted(manifest.meta)),
    )


def _leaves(value: object, key: str) -> list[str]:
    if not isinstance(value, dict):
        return [key] if key else []
    prefix = f"{key}." if key else ""
    return [leaf for name, item in sorted(value.items()) for leaf in _leaves(item, f"{prefix}{name}")]
