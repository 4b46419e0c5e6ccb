"""A corpus as a run reads it: its token shards, what its manifest says, and windows of tokens in any order. Pure.

S tokens of a window: a sequence and the token after it.
"""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.data.indexed import IndexedDataset, bin_path, idx_path
from ascend_moe_train.data.manifest import SplitRecord, read_manifest
from ascend_moe_train.errors import DataError

Split = Literal["train", "valid"]
# A larger foreign shard is not read through when it is opened: its ids are checked as they are drawn.
_SCAN_BYTES = 4 << 30
_KEPT_EPOCHS = 2


@dataclass(frozen=True, kw_only=True)
class Order:
    """Documents in some order, laid end to end. `ends` is where each ends, in tokens."""

    documents: NDArray[np.int64]
    ends: NDArray[np.int64]
    windows: NDArray[np.int64]


class Corpus:
    """One corpus, cut into windows of `seq_len` + 1 tokens.

    Windows share their border token, so that every token but the first is a target once.
    `bytes_per_token` (UTF-8 bytes of text per token) is None when no manifest says it. Raises DataError when the shards
    are not sound or hold a token id outside the vocabulary.
    """

    def __init__(self, path: str, split: Split, *, seq_len: int, vocab_size: int) -> None:
        self.prefix = find_prefix(path, split)
        self.dataset = IndexedDataset(self.prefix)
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.num_windows = (self.dataset.num_tokens - 1) // seq_len
        record = split_record(self.dataset)
        self.bytes_per_token = None if record is None else record.bytes / record.tokens
        self._orders: OrderedDict[tuple[int, int, int], Order] = OrderedDict()
        if record is not None:
            if record.max_token_id >= vocab_size:
                self.dataset.check_vocabulary(vocab_size)
        elif self.dataset.tokens.nbytes <= _SCAN_BYTES:
            self.dataset.check_vocabulary(vocab_size)

    def shuffled(self, seed: int, number: int, epoch: int) -> Order:
        """The order of an epoch, a pure function of its arguments: documents shuffled, then the windows cut from them.

        `number` is the corpus's place in its blend. The last orders are kept.
        """
        key = (seed, number, epoch)
        if key not in self._orders:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
            documents = generator.permutation(self.dataset.num_documents)
            windows = generator.permutation(self.num_windows)
            lengths = np.diff(self.dataset.document_offsets)
            self._orders[key] = Order(documents=documents, ends=np.cumsum(lengths[documents]), windows=windows)
            if len(self._orders) > _KEPT_EPOCHS:
                self._orders.popitem(last=False)
        return self._orders[key]

    def read(
        self, start: int, out_S: NDArray[np.int32], segment_S: NDArray[np.int32], order: Order | None = None
    ) -> int:
        """Copy tokens from `start` of the order (of the file when None) into `out_S`; returns how many there were.

        `segment_S` receives the number of the document each belongs to, counted within the window.
        """
        offsets = self.dataset.document_offsets
        ends = offsets[1:] if order is None else order.ends
        place = int(np.searchsorted(ends, start, side="right"))
        filled = segment = 0
        while filled < out_S.size and place < ends.size:
            document = place if order is None else int(order.documents[place])
            document_end = int(offsets[document + 1])
            source = document_end - (int(ends[place]) - start - filled)
            count = min(document_end - source, out_S.size - filled)
            out_S[filled : filled + count] = self.dataset.tokens[source : source + count]
            segment_S[filled : filled + count] = segment
            filled += count
            place += 1
            segment += count > 0
        return filled

    def refuse_ids(self, tokens: NDArray[np.int32]) -> None:
        """Raise DataError with file and byte offset when one of the tokens just read is outside the vocabulary."""
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            self.dataset.check_vocabulary(self.vocab_size)


def find_prefix(path: str, split: Split) -> Path:
    """The prefix a configured `path` means: itself, or the split in the folder that `amt data prepare` wrote."""
    given = Path(path)
    if given.suffix in (".bin", ".idx"):
        raise DataError(f"{path}: name a corpus without .bin and .idx: {given.with_suffix('')}")
    return given / split if given.is_dir() and not idx_path(given).exists() else given


def split_record(dataset: IndexedDataset) -> SplitRecord | None:
    """What the manifest beside a shard says of it; None without a manifest, or when it is of other files."""
    manifest = read_manifest(dataset.prefix.parent)
    if manifest is None:
        return None
    record = manifest.splits.get(dataset.prefix.name)
    file = manifest.files.get(bin_path(dataset.prefix).name)
    if record is None or file is None:
        return None
    if record.tokens != dataset.num_tokens or file.bytes != dataset.tokens.nbytes:
        return None
    return record
