"""A corpus as a run reads it: its token shards, what its manifest says, and windows of tokens in any order. Pure.

S tokens of a window: a sequence and the token after it.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.data.indexed import IndexedDataset, bin_path, idx_path
from ascend_moe_train.data.manifest import SplitRecord, counted_prefix, read_manifest
from ascend_moe_train.data.packing import pack
from ascend_moe_train.errors import DataError

Split = Literal["train", "valid"]
# A larger foreign shard is not read through when it is opened: its ids are checked as they are drawn.
_SCAN_BYTES = 4 << 30
_KEPT_EPOCHS = 2


@dataclass(frozen=True, kw_only=True)
class Window:
    """Where one window is to be written, all zero before.

    `segment_S` is the number of each token's document within the window, `counted_S` 1 for a token that is a target.
    """

    tokens_S: NDArray[np.int32]
    segment_S: NDArray[np.int32]
    counted_S: NDArray[np.uint8]


class Corpus(ABC):
    """One corpus, in windows of `seq_len` + 1 tokens: `num_windows` to train on, `num_eval_windows` to evaluate.

    `is_separate`: documents of a window never see each other, whatever the run says. `bytes_per_token` (UTF-8 bytes of
    text per target) is None when no manifest says it. Raises DataError when the shards are not sound or hold a token id
    outside the vocabulary.
    """

    num_windows: int
    num_eval_windows: int
    is_separate: bool

    def __init__(self, dataset: IndexedDataset, *, seq_len: int, vocab_size: int) -> None:
        self.dataset = dataset
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        record = split_record(dataset)
        self.bytes_per_token = None if record is None else record.bytes_per_token
        if record is not None:
            if record.max_token_id >= vocab_size:
                dataset.check_vocabulary(vocab_size)
        elif dataset.tokens.nbytes <= _SCAN_BYTES:
            dataset.check_vocabulary(vocab_size)

    @abstractmethod
    def read_drawn(self, draw: int, seed: int, number: int, out: Window) -> None:
        """Write the window of a draw, a pure function of (draw, seed, number): every epoch has an order of its own.

        `number` is the corpus's place in its blend.
        """

    @abstractmethod
    def read_eval(self, window: int, out: Window) -> None:
        """Write one of the windows to evaluate, in the order of the file."""

    def _refuse_ids(self, tokens: NDArray[np.int32]) -> None:
        """Raise DataError with file and byte offset when one of the tokens just read is outside the vocabulary."""
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            self.dataset.check_vocabulary(self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class Order:
    """Documents in some order, laid end to end. `ends` is where each ends, in tokens."""

    documents: NDArray[np.int64]
    ends: NDArray[np.int64]
    windows: NDArray[np.int64]


class TextCorpus(Corpus):
    """Documents laid end to end and cut into windows, which share their border token: every token but the first is a
    target once. The last window to evaluate is short, what is left of it is not counted.
    """

    is_separate = False

    def __init__(self, dataset: IndexedDataset, *, seq_len: int, vocab_size: int) -> None:
        super().__init__(dataset, seq_len=seq_len, vocab_size=vocab_size)
        self.num_windows = (dataset.num_tokens - 1) // seq_len
        self.num_eval_windows = -(-(dataset.num_tokens - 1) // seq_len)
        self._orders: OrderedDict[tuple[int, int, int], Order] = OrderedDict()

    def read_drawn(self, draw: int, seed: int, number: int, out: Window) -> None:
        """Documents are shuffled in each epoch, then the windows cut from them."""
        epoch, place = divmod(draw, self.num_windows)
        order = self._shuffled(seed, number, epoch)
        self._read(int(order.windows[place]) * self.seq_len, order.documents, order.ends, out)

    def read_eval(self, window: int, out: Window) -> None:
        """See `Corpus`."""
        ends = self.dataset.document_offsets[1:]
        self._read(window * self.seq_len, np.arange(ends.size), ends, out)

    def _shuffled(self, seed: int, number: int, epoch: int) -> Order:
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

    def _read(self, start: int, documents: NDArray[np.int64], ends: NDArray[np.int64], out: Window) -> None:
        """Copy tokens from `start` of the documents in their order, as far as they go."""
        place = int(np.searchsorted(ends, start, side="right"))
        filled = segment = 0
        while filled < out.tokens_S.size and place < ends.size:
            document_end = int(self.dataset.document_offsets[documents[place] + 1])
            source = document_end - (int(ends[place]) - start - filled)
            count = min(document_end - source, out.tokens_S.size - filled)
            out.tokens_S[filled : filled + count] = self.dataset.tokens[source : source + count]
            out.segment_S[filled : filled + count] = segment
            filled += count
            place += 1
            segment += count > 0
        out.segment_S[filled:] = segment
        out.counted_S[:filled] = 1
        self._refuse_ids(out.tokens_S)


class ChatCorpus(Corpus):
    """Conversations, whole, as many to a window as fit; they never see each other, and only what is marked counts.

    The windows are the same in every epoch, their order is not. Raises DataError for a conversation that is longer
    than a window.
    """

    is_separate = True

    def __init__(self, dataset: IndexedDataset, marks: IndexedDataset, *, seq_len: int, vocab_size: int) -> None:
        super().__init__(dataset, seq_len=seq_len, vocab_size=vocab_size)
        if marks.dtype != np.uint8 or not np.array_equal(marks.document_offsets, dataset.document_offsets):
            raise DataError(f"{marks.idx_path}: does not mark the tokens of {dataset.bin_path}: made for another shard")
        record = split_record(dataset)
        if (record is None or record.counted_tokens is None) and marks.max_token_id() == 0:
            raise DataError(f"{marks.bin_path}: marks no token of {dataset.bin_path}: there is nothing to learn")
        self._marks = marks
        lengths = np.diff(dataset.document_offsets)
        longest = int(np.argmax(lengths))
        if lengths[longest] > seq_len + 1:
            raise DataError(
                f"{dataset.bin_path}: conversation {longest} has {lengths[longest]} tokens, a sequence of data.seq_len "
                f"{seq_len} takes {seq_len + 1}: prepare the corpus with --max-tokens {seq_len + 1}, or raise seq_len"
            )
        self._packing = pack(lengths, seq_len + 1)
        self.num_windows = self.num_eval_windows = self._packing.num_windows
        self._orders: OrderedDict[tuple[int, int, int], NDArray[np.int64]] = OrderedDict()

    def read_drawn(self, draw: int, seed: int, number: int, out: Window) -> None:
        """See `Corpus`."""
        epoch, place = divmod(draw, self.num_windows)
        key = (seed, number, epoch)
        if key not in self._orders:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
            self._orders[key] = generator.permutation(self.num_windows)
            if len(self._orders) > _KEPT_EPOCHS:
                self._orders.popitem(last=False)
        self.read_eval(int(self._orders[key][place]), out)

    def read_eval(self, window: int, out: Window) -> None:
        """See `Corpus`."""
        filled = segment = 0
        for segment, document in enumerate(self._packing.window(window).tolist()):
            tokens = self.dataset.document(document)
            end = filled + tokens.size
            out.tokens_S[filled:end] = tokens
            out.segment_S[filled:end] = segment
            out.counted_S[filled:end] = self._marks.document(document)
            filled = end
        out.segment_S[filled:] = segment + 1
        self._refuse_ids(out.tokens_S)


def open_corpus(path: str, split: Split, *, seq_len: int, vocab_size: int) -> Corpus:
    """The corpus of a configured path: conversations when a shard beside its tokens marks what counts, else text.

    Raises DataError: see the classes; and when a corpus of conversations has lost those marks.
    """
    prefix = find_prefix(path, split)
    dataset = IndexedDataset(prefix)
    marks = counted_prefix(prefix)
    manifest = read_manifest(prefix.parent)
    is_chat = manifest is not None and manifest.arguments.format == "chat" and prefix.name in manifest.splits
    if is_chat or idx_path(marks).exists() or bin_path(marks).exists():
        return ChatCorpus(dataset, IndexedDataset(marks), seq_len=seq_len, vocab_size=vocab_size)
    return TextCorpus(dataset, seq_len=seq_len, vocab_size=vocab_size)


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
