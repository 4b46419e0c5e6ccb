"""One split of a corpus as shards: its tokens, and for conversations which of them count. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ascend_moe_train.data.encoding import Encoder
from ascend_moe_train.data.indexed import IndexedWriter, token_type
from ascend_moe_train.data.manifest import SplitRecord, counted_prefix
from ascend_moe_train.data.sources import Document
from ascend_moe_train.errors import DataError

_BATCH_CHARACTERS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written: the split's part of the manifest, and the SHA-256 of each file by name."""

    record: SplitRecord
    checksums: Mapping[str, str]


def write_split(
    prefix: Path, documents: Iterable[Document], encoder: Encoder, vocab_size: int, *, total: int
) -> Written:
    """Encode a split's documents, of `total` in all, into shards. Raises DataError when none is left."""
    seen = text_bytes = counted_tokens = truncated = 0
    with ExitStack() as stack:
        tokens = stack.enter_context(IndexedWriter(prefix, token_type(vocab_size)))
        marks: IndexedWriter | None = None
        for batch in _batches(documents):
            for encoded in encoder.encode(batch):
                seen += 1
                if not len(encoded.ids):
                    continue
                tokens.add(encoded.ids)
                text_bytes += encoded.text_bytes
                truncated += encoded.truncated
                if encoded.counted is not None:
                    marks = marks or stack.enter_context(IndexedWriter(counted_prefix(prefix), np.dtype("u1")))
                    marks.add(encoded.counted)
                    counted_tokens += int(encoded.counted.sum())
        if tokens.num_documents == 0:
            raise DataError(
                f"no document is left for the {prefix.name} split, {total} in all; give more files, another "
                "--valid-fraction, 0 for no validation split" + (", or a larger --max-tokens" if seen else "")
            )
    return Written(
        record=SplitRecord(
            documents=tokens.num_documents,
            tokens=tokens.num_tokens,
            bytes=text_bytes,
            max_token_id=tokens.max_token_id,
            counted_tokens=None if marks is None else counted_tokens,
            dropped=seen - tokens.num_documents,
            truncated=truncated,
        ),
        checksums=tokens.sha256 if marks is None else {**tokens.sha256, **marks.sha256},
    )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists of a few MB: enough to keep all cores busy, little enough to hold."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
