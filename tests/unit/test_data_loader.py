"""The loaders: a pure function of (seed, step, rank), every token once per epoch, blends, document borders."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ascend_moe_train.data.blend import Blend
from ascend_moe_train.data.config import CorpusConfig, DataConfig
from ascend_moe_train.data.indexed import IndexedWriter, token_type
from ascend_moe_train.data.loader import Batch, EvalLoader, TrainLoader
from ascend_moe_train.data.prepare import prepare
from ascend_moe_train.errors import DataError

SEQ_LEN = 16
VOCAB_SIZE = 1000
EOD = 0


def write_corpus(prefix: Path, lengths: list[int], *, first_id: int = 1, vocab_size: int = VOCAB_SIZE) -> None:
    """Documents of consecutive ids, each ended by EOD: a token's value says where in the corpus it stood."""
    token_id = first_id
    with IndexedWriter(prefix, token_type(vocab_size)) as writer:
        for length in lengths:
            writer.add([*range(token_id, token_id + length - 1), EOD])
            token_id += length - 1


def config(*prefixes: Path, weights: list[float] | None = None, reset_attention: bool = False) -> DataConfig:
    weights = weights or [1.0] * len(prefixes)
    corpora = tuple(
        CorpusConfig(path=str(prefix), weight=weight) for prefix, weight in zip(prefixes, weights, strict=True)
    )
    return DataConfig(train=corpora, valid=corpora, tokenizer="none", seq_len=SEQ_LEN, reset_attention=reset_attention)


def loader(data: DataConfig, *, seed: int = 1, sequences: int = 4, rank: int = 0, size: int = 1) -> TrainLoader:
    return TrainLoader(data, vocab_size=VOCAB_SIZE, seed=seed, global_sequences=sequences, dp_rank=rank, dp_size=size)


def assert_same(first: Batch, second: Batch) -> None:
    for name in ("tokens_BS", "targets_BS", "segment_BS", "position_BS"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    prefix = tmp_path / "corpus"
    write_corpus(prefix, [5, 40, 1, 17, 90, 3, 3, 60, 29])
    return prefix


@pytest.mark.parametrize("reset_attention", [False, True])
def test_ranks_laid_end_to_end_are_the_single_rank_batch(corpus: Path, reset_attention: bool) -> None:
    data = config(corpus, corpus, weights=[0.7, 0.3], reset_attention=reset_attention)
    whole = loader(data)
    ranks = [loader(data, rank=rank, size=2) for rank in (0, 1)]
    for step in (0, 1, 7, 100):
        parts = [rank.batch(step) for rank in ranks]
        joined = Batch(
            **{
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in ("tokens_BS", "targets_BS", "segment_BS", "position_BS")
            }
        )
        assert_same(joined, whole.batch(step))


@pytest.mark.parametrize("micro", [1, 2])
def test_micro_batches_of_ranks_are_those_of_one_rank_that_takes_as_many(corpus: Path, micro: int) -> None:
    data = config(corpus)
    shares = {"vocab_size": VOCAB_SIZE, "seed": 1, "global_sequences": 8}
    whole = TrainLoader(data, **shares, micro_sequences=2 * micro).batch(3).tokens_BS
    ranks = [
        TrainLoader(data, **shares, dp_rank=rank, dp_size=2, micro_sequences=micro).batch(3).tokens_BS
        for rank in (0, 1)
    ]
    for number in range(4 // micro):
        own, both = slice(number * micro, (number + 1) * micro), slice(2 * number * micro, 2 * (number + 1) * micro)
        np.testing.assert_array_equal(np.concatenate([rank[own] for rank in ranks]), whole[both])


def test_a_new_loader_at_step_k_goes_on_as_the_unbroken_one(corpus: Path) -> None:
    data = config(corpus, reset_attention=True)
    unbroken = loader(data)
    batches = [unbroken.batch(step) for step in range(40)]
    for step in (39, 17, 18, 3):
        assert_same(loader(data).batch(step), batches[step])


def test_steps_may_be_asked_for_in_any_order(corpus: Path) -> None:
    one = loader(config(corpus))
    forwards = [one.batch(step) for step in range(20)]
    for step in reversed(range(20)):
        assert_same(one.batch(step), forwards[step])


def test_an_epoch_draws_every_token_once_as_a_target(tmp_path: Path) -> None:
    lengths = [5, 40, 1, 17, 90, 3, 3, 60, 38]
    assert sum(lengths) % SEQ_LEN == 1
    write_corpus(tmp_path / "corpus", lengths)
    one = loader(config(tmp_path / "corpus"), sequences=1)
    windows = (sum(lengths) - 1) // SEQ_LEN
    for epoch in range(3):
        drawn = Counter(
            np.concatenate([one.batch(epoch * windows + step).targets_BS.ravel() for step in range(windows)]).tolist()
        )
        tokens = Counter({EOD: len(lengths)} | dict.fromkeys(range(1, sum(lengths) - len(lengths) + 1), 1))
        missing = tokens - drawn
        assert drawn - tokens == Counter()
        assert missing.total() == 1


def test_epochs_and_seeds_have_orders_of_their_own(corpus: Path) -> None:
    one, other = loader(config(corpus), sequences=8), loader(config(corpus), seed=2, sequences=8)
    assert not np.array_equal(one.batch(0).tokens_BS, other.batch(0).tokens_BS)
    windows = (248 - 1) // SEQ_LEN
    by_window = loader(config(corpus), sequences=windows)
    assert not np.array_equal(by_window.batch(0).tokens_BS, by_window.batch(1).tokens_BS)


def test_targets_are_the_next_tokens_and_positions_count_up(corpus: Path) -> None:
    batch = loader(config(corpus)).batch(0)
    assert batch.tokens_BS.dtype == batch.targets_BS.dtype == np.int32
    np.testing.assert_array_equal(batch.tokens_BS[:, 1:], batch.targets_BS[:, :-1])
    np.testing.assert_array_equal(batch.position_BS, np.tile(np.arange(SEQ_LEN), (4, 1)))
    assert not batch.segment_BS.any()


def test_reset_attention_marks_document_borders(corpus: Path) -> None:
    plain, reset = (loader(config(corpus, reset_attention=on), sequences=14).batch(0) for on in (False, True))
    np.testing.assert_array_equal(plain.tokens_BS, reset.tokens_BS)
    borders = 0
    for row in range(14):
        segment = position = 0
        for place in range(SEQ_LEN):
            assert reset.segment_BS[row, place] == segment
            assert reset.position_BS[row, place] == position
            position += 1
            if reset.tokens_BS[row, place] == EOD:
                assert reset.targets_BS[row, place] == -1
                segment, position, borders = segment + 1, 0, borders + 1
            else:
                assert reset.targets_BS[row, place] == plain.targets_BS[row, place]
    assert borders >= 5


@pytest.mark.parametrize(
    "weights", [[1.0], [0.7, 0.3], [1.0, 2.0, 4.0], [0.123456789, 0.5, 0.301, 3.0], [0.5] + [0.01] * 50]
)
def test_a_blend_follows_its_weights_within_one_sequence(weights: list[float]) -> None:
    blend = Blend(weights)
    shares = np.asarray(blend.counts) / blend.period
    np.testing.assert_allclose(shares, np.asarray(weights) / sum(weights), atol=1 / 65536)
    drawn = np.zeros(len(weights), dtype=np.int64)
    for sequence in range(min(3 * blend.period, 20_000)):
        corpus, draw = blend.locate(sequence)
        assert draw == drawn[corpus]
        drawn[corpus] += 1
        assert np.abs(drawn - (sequence + 1) * shares).max() < 1


def test_a_blend_draws_from_the_corpora_it_says(tmp_path: Path) -> None:
    write_corpus(tmp_path / "low", [100, 100])
    write_corpus(tmp_path / "high", [100, 100], first_id=500)
    one = loader(config(tmp_path / "low", tmp_path / "high", weights=[3.0, 1.0]), sequences=8)
    for step in range(6):
        assert int((one.batch(step).tokens_BS.max(axis=1) >= 500).sum()) == 2


def test_a_weight_too_small_to_be_drawn_is_refused() -> None:
    with pytest.raises(DataError, match=r"data weight 1e-09 is less than 1/65536"):
        Blend([1.0, 1e-9])


def test_a_corpus_smaller_than_one_sequence_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "small", [SEQ_LEN])
    with pytest.raises(DataError, match=r"small\.bin: holds 16 tokens, one sequence of data\.seq_len 16 needs 17"):
        loader(config(tmp_path / "small"))


def test_an_id_outside_the_vocabulary_is_refused_with_its_offset(tmp_path: Path) -> None:
    write_corpus(tmp_path / "big", [50], first_id=970)
    with pytest.raises(DataError, match=r"big\.bin: token id 1000 at byte offset 60 .* vocabulary of 1000"):
        loader(config(tmp_path / "big"))


def test_a_manifest_that_understates_its_ids_does_not_let_them_through(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words to read, and some more of them\n" * 20)
    out = tmp_path / "out"
    prepare(sources=[str(tmp_path / "text.txt")], out=out, vocab_size=270, valid_fraction=0)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["splits"]["train"]["max_token_id"] = 10
    (out / "manifest.json").write_text(json.dumps(manifest))
    one = TrainLoader(config(out), vocab_size=200, seed=1, global_sequences=8)
    with pytest.raises(DataError, match=r"train\.bin: token id 2\d\d at byte offset"):
        one.batch(0)


@pytest.mark.parametrize("reset_attention", [False, True])
def test_validation_reads_each_target_once_and_fills_up_with_uncounted_ones(
    corpus: Path, reset_attention: bool
) -> None:
    validation = EvalLoader(
        config(corpus, reset_attention=reset_attention), vocab_size=VOCAB_SIZE, num_sequences=1000, micro_sequences=6
    )
    batches = list(validation)
    assert validation.num_sequences == 16
    assert [batch.tokens_BS.shape for batch in batches] == [(6, SEQ_LEN)] * 3
    targets = np.concatenate([batch.targets_BS.ravel() for batch in batches])
    borders = 8 if reset_attention else 0
    assert int((targets >= 0).sum()) == 248 - 1 - borders
    for first, second in zip(batches, validation, strict=True):
        assert_same(first, second)


def test_validation_spreads_over_the_corpus(corpus: Path) -> None:
    validation = EvalLoader(config(corpus), vocab_size=VOCAB_SIZE, num_sequences=4, micro_sequences=4)
    (batch,) = validation
    assert validation.num_sequences == 4
    assert [int(row[row > 0].min()) // 60 for row in batch.tokens_BS] == [0, 1, 2, 3]
    assert validation.bytes_per_token is None


def test_bytes_per_token_come_from_the_manifest(tmp_path: Path) -> None:
    text = "déjà vu, and some more words\n" * 30
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(text)
    out = tmp_path / "out"
    manifest = prepare(sources=[str(tmp_path / "?.txt")], out=out, vocab_size=300, valid_fraction=0.1).manifest
    validation = EvalLoader(config(out), vocab_size=300, num_sequences=4, micro_sequences=4)
    assert manifest.splits["valid"].bytes == len(text.encode())
    assert validation.bytes_per_token == manifest.splits["valid"].bytes / manifest.splits["valid"].tokens
