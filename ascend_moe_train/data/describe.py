"""What a corpus on disk holds, for `amt data inspect`. Pure."""

from dataclasses import dataclass
from pathlib import Path

from ascend_moe_train.data.corpus import split_record
from ascend_moe_train.data.indexed import IndexedDataset, idx_path
from ascend_moe_train.data.manifest import SPLITS
from ascend_moe_train.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Description:
    """One prefix. `text_bytes` is the UTF-8 text before tokenising, None when no manifest says it."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    token_type: str
    max_token_id: int
    bin_bytes: int
    text_bytes: int | None


def describe(path: Path) -> list[Description]:
    """Describe a prefix, or every split in a folder that `amt data prepare` wrote.

    The tokens are read through when no manifest gives the largest id. Raises DataError when there is nothing or it is
    not sound.
    """
    if not path.is_dir() or idx_path(path).exists():
        return [_describe_prefix(path.with_suffix("") if path.suffix in (".bin", ".idx") else path)]
    prefixes = [path / split for split in SPLITS if idx_path(path / split).exists()]
    if not prefixes:
        raise DataError(
            f"{path}: the folder holds no corpus: neither {' nor '.join(f'{split}.idx' for split in SPLITS)}"
        )
    return [_describe_prefix(prefix) for prefix in prefixes]


def _describe_prefix(prefix: Path) -> Description:
    dataset = IndexedDataset(prefix)
    record = split_record(dataset)
    return Description(
        prefix=str(prefix),
        documents=dataset.num_documents,
        sequences=dataset.num_sequences,
        tokens=dataset.num_tokens,
        token_type=dataset.dtype.name,
        max_token_id=dataset.max_token_id() if record is None else record.max_token_id,
        bin_bytes=dataset.tokens.nbytes,
        text_bytes=None if record is None else record.bytes,
    )
