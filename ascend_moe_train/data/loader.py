"""Batches as a pure function of (seed, step, rank): nothing to save, nothing to replay when a run resumes. Pure.

B batch (sequences), S sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.data.blend import Blend
from ascend_moe_train.data.config import DataConfig
from ascend_moe_train.data.corpus import Corpus, Window, open_corpus
from ascend_moe_train.errors import DataError

NOT_COUNTED = -1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences to train on. All fields are int32 of shape [B, S].

    `targets_BS`: the next token; -1 where it is not counted. `segment_BS`: number of the token's document inside the
    sequence, from 0. `position_BS`: 0 to S - 1. With `reset_attention` segments tell documents apart, positions restart
    at every document, and the first token of a document, of which nothing in sight tells, is no target; without it all
    segments are 0. Conversations are always told apart, and only what the assistant says is a target.
    """

    tokens_BS: NDArray[np.int32]
    targets_BS: NDArray[np.int32]
    segment_BS: NDArray[np.int32]
    position_BS: NDArray[np.int32]


class TrainLoader:
    """The training batches of one data-parallel rank.

    Sequences are numbered through the run: step k reads k * global_sequences onwards. Each micro-batch takes the next
    dp_size * micro_sequences of them, and each rank its share of those in order, so that the ranks' micro-batches laid
    end to end are one of a single rank that takes as many at once. Raises DataError for a corpus that cannot be read,
    is smaller than one sequence, or holds ids outside the vocabulary.
    """

    def __init__(
        self,
        data: DataConfig,
        *,
        vocab_size: int,
        seed: int,
        global_sequences: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_sequences: int | None = None,
    ) -> None:
        """`micro_sequences` of one rank; None when its share of a step is one micro-batch."""
        micro = global_sequences // max(1, dp_size) if micro_sequences is None else micro_sequences
        at_once = micro * dp_size
        if not 0 <= dp_rank < dp_size or at_once < 1 or global_sequences % at_once or seed < 0:
            raise ValueError(
                f"{global_sequences} sequences by {micro}, rank {dp_rank} of {dp_size}, seed {seed}: not possible"
            )
        self._data = data
        self._seed = seed
        self._global_sequences = global_sequences
        self._micro_sequences, self._at_once, self._first = micro, at_once, dp_rank * micro
        self._blend = Blend([corpus.weight for corpus in data.train])
        self._corpora = [
            open_corpus(corpus.path, "train", seq_len=data.seq_len, vocab_size=vocab_size) for corpus in data.train
        ]
        for corpus in self._corpora:
            if corpus.num_windows == 0:
                raise DataError(
                    f"{corpus.dataset.bin_path}: holds {corpus.dataset.num_tokens} tokens, one sequence of "
                    f"data.seq_len {data.seq_len} needs {data.seq_len + 1}"
                )

    def batch(self, step: int) -> Batch:
        """This rank's [global_sequences / dp_size, S] sequences of optimizer step `step`, from 0."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        num_micro = self._global_sequences // self._at_once
        windows = _Windows(num_micro * self._micro_sequences, self._data)
        for row in range(num_micro * self._micro_sequences):
            micro_batch, place = divmod(row, self._micro_sequences)
            first = step * self._global_sequences + micro_batch * self._at_once + self._first
            number, draw = self._blend.locate(first + place)
            corpus = self._corpora[number]
            corpus.read_drawn(draw, self._seed, number, windows.row(row, corpus))
        return windows.batch()


class EvalLoader:
    """Validation batches of [micro_sequences, S]: the same sequences each time, spread evenly over each corpus.

    `num_sequences` is how many there are: as asked for, shared by the corpora's weights, or all when there are fewer.
    The last batch, and the end of a corpus, are filled up with tokens that are not counted. `bytes_per_token` (UTF-8
    bytes of text per token) turns a loss in nats into bits per byte: loss / ln 2 / bytes_per_token; None when a corpus
    has no manifest. Raises DataError like `TrainLoader`, and when the configuration names no validation data.
    """

    def __init__(self, data: DataConfig, *, vocab_size: int, num_sequences: int, micro_sequences: int) -> None:
        if not data.valid:
            raise DataError("data.valid is empty: name a corpus, or turn evaluation off")
        if num_sequences < 1 or micro_sequences < 1:
            raise ValueError(f"{num_sequences} sequences in micro-batches of {micro_sequences}: not possible")
        self._data = data
        self._micro_sequences = micro_sequences
        self._corpora = [
            open_corpus(corpus.path, "valid", seq_len=data.seq_len, vocab_size=vocab_size) for corpus in data.valid
        ]
        blend = Blend([corpus.weight for corpus in data.valid])
        drawn = np.bincount([blend.locate(i)[0] for i in range(num_sequences)], minlength=len(data.valid))
        self._chosen = [
            (corpus, window)
            for corpus, count in zip(self._corpora, drawn, strict=True)
            for window in _spread(corpus, int(count))
        ]
        self.num_sequences = len(self._chosen)
        self.bytes_per_token = self._mean_bytes_per_token()

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, self.num_sequences, self._micro_sequences):
            windows = _Windows(self._micro_sequences, self._data)
            for row, (corpus, window) in enumerate(self._chosen[first : first + self._micro_sequences]):
                corpus.read_eval(window, windows.row(row, corpus))
            yield windows.batch()

    def _mean_bytes_per_token(self) -> float | None:
        """The mean over the sequences that are read, each with its corpus's share."""
        total = 0.0
        for corpus, _ in self._chosen:
            if corpus.bytes_per_token is None:
                return None
            total += corpus.bytes_per_token
        return total / len(self._chosen)


def _spread(corpus: Corpus, count: int) -> list[int]:
    """Numbers of `count` windows at even distances; of all windows when there are fewer."""
    if corpus.dataset.num_tokens < 2:
        raise DataError(f"{corpus.dataset.bin_path}: holds {corpus.dataset.num_tokens} token, validation needs two")
    available = corpus.num_eval_windows
    count = min(count, available)
    return [number * available // count for number in range(count)]


class _Windows:
    """Windows of S + 1 tokens on their way to a batch of S."""

    def __init__(self, num_sequences: int, data: DataConfig) -> None:
        shape = (num_sequences, data.seq_len + 1)
        self._tokens_BS = np.zeros(shape, dtype=np.int32)
        self._segment_BS = np.zeros(shape, dtype=np.int32)
        self._counted_BS = np.zeros(shape, dtype=np.uint8)
        self._is_separate_B = np.full(num_sequences, data.reset_attention)

    def row(self, number: int, corpus: Corpus) -> Window:
        """Where a window of this corpus is to be written."""
        self._is_separate_B[number] |= corpus.is_separate
        return Window(
            tokens_S=self._tokens_BS[number],
            segment_S=self._segment_BS[number],
            counted_S=self._counted_BS[number],
        )

    def batch(self) -> Batch:
        """The tokens with their targets."""
        num_sequences, seq_len = self._tokens_BS.shape[0], self._tokens_BS.shape[1] - 1
        segment_BS = np.where(self._is_separate_B[:, None], self._segment_BS, 0).astype(np.int32)
        border_BS = segment_BS[:, 1:] != segment_BS[:, :-1]
        targets_BS = np.where(border_BS | (self._counted_BS[:, 1:] == 0), NOT_COUNTED, self._tokens_BS[:, 1:])
        position_BS = np.tile(np.arange(seq_len, dtype=np.int32), (num_sequences, 1))
        starts_BS = np.zeros_like(position_BS)
        starts_BS[:, 1:] = np.where(border_BS[:, :-1], position_BS[:, 1:], 0)
        return Batch(
            tokens_BS=self._tokens_BS[:, :-1].copy(),
            targets_BS=targets_BS.astype(np.int32),
            segment_BS=segment_BS[:, :-1].copy(),
            position_BS=position_BS - np.maximum.accumulate(starts_BS, axis=1),
        )
