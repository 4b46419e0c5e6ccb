"""Token shards: what is written is read back, byte for byte as Megatron lays it out; a failed write leaves nothing."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_moe_train.data.indexed import IndexedDataset, IndexedWriter, token_type
from ascend_moe_train.errors import DataError


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 1000) -> IndexedWriter:
    with IndexedWriter(prefix, token_type(vocab_size)) as writer:
        for document in documents:
            writer.add(document)
    return writer


def test_layout_is_megatrons(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [65535]])
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 65535)
    assert (tmp_path / "a.idx").read_bytes() == (
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i2q3q", 3, 1, 0, 6, 0, 1, 2)
    )


@given(
    documents=st.lists(st.lists(st.integers(0, 99_999), min_size=1, max_size=20), min_size=1, max_size=20),
)
def test_written_documents_are_read_back(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    prefix = tmp_path_factory.mktemp("shard") / "a"
    writer = write(prefix, documents, vocab_size=100_000)
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == np.dtype("<i4")
    assert [dataset.document(number).tolist() for number in range(dataset.num_documents)] == documents
    assert (writer.num_documents, writer.num_tokens) == (dataset.num_documents, dataset.num_tokens)
    assert writer.max_token_id == dataset.max_token_id() == max(map(max, documents))


def test_documents_of_several_sequences_and_of_none(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(struct.pack("<6i", *range(10, 16)))
    (tmp_path / "a.idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 4) + struct.pack("<3i3q4q", 1, 2, 3, 0, 4, 12, 0, 2, 2, 3)
    )
    dataset = IndexedDataset(tmp_path / "a")
    assert [dataset.document(number).tolist() for number in range(3)] == [[10, 11, 12], [], [13, 14, 15]]
    with pytest.raises(DataError, match="document 3 is asked for, it has 0 to 2"):
        dataset.document(3)


@pytest.mark.parametrize(("vocab_size", "name"), [(257, "uint16"), (65536, "uint16"), (65537, "int32")])
def test_the_narrowest_type_that_holds_the_vocabulary(vocab_size: int, name: str) -> None:
    assert token_type(vocab_size).name == name


@pytest.mark.parametrize("document", [[], [-1], [65536]])
def test_a_document_that_does_not_fit_is_refused_and_nothing_stays(tmp_path: Path, document: list[int]) -> None:
    with pytest.raises(DataError, match="ids from 0 to 65535"):
        write(tmp_path / "a", [[1, 2], document])
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "a", token_type(1000)) as writer:
        writer.add([1, 2, 3])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
