"""What a run reads fits together: corpora, and the tokenizer that their numbers are of."""

import shutil
from pathlib import Path

import pytest

from ascend_moe_train.data.tokenizer import load_tokenizer, train_tokenizer
from ascend_moe_train.errors import DataError
from ascend_moe_train.train.inputs import open_inputs
from tests.small_run import small_run


def test_another_corpus_tokenizer_is_refused(small_corpus: Path, tmp_path: Path) -> None:
    size = load_tokenizer(small_corpus / "tokenizer.json").vocab_size
    other = tmp_path / "other.json"
    other.write_text(train_tokenizer(["qq zz qq zz xyzzy " * 50], size).to_json())
    config = small_run(tmp_path, small_corpus, f"data.tokenizer={other}")
    with pytest.raises(DataError) as caught:
        open_inputs(config)
    message = str(caught.value)
    assert message.startswith(f"{small_corpus}/train: was prepared with another tokenizer than data.tokenizer {other}")
    assert message.endswith(f"use {small_corpus}/tokenizer.json")


def test_the_same_numbers_written_otherwise_are_taken(small_corpus: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(small_corpus / "tokenizer.json")
    other = tmp_path / "other.json"
    other.write_text(tokenizer.to_json() + "\n\n")
    config = small_run(tmp_path, small_corpus, f"data.tokenizer={other}")
    assert open_inputs(config).tokenizer.vocab_size == tokenizer.vocab_size


def test_a_corpus_without_a_tokenizer_is_taken(small_corpus: Path, tmp_path: Path) -> None:
    foreign = shutil.copytree(small_corpus, tmp_path / "foreign")
    named = tmp_path / "named.json"
    (foreign / "tokenizer.json").rename(named)
    config = small_run(tmp_path, foreign, f"data.tokenizer={named}")
    assert open_inputs(config).train.batch(0).tokens_BS.size > 0
