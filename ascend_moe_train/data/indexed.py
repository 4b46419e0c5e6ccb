"""Megatron's `.bin/.idx` token shards: written once, read by memory map. Pure.

A prefix `p` names two files. `p.bin` holds the tokens of all sequences, one after the other. `p.idx` holds, little
endian: magic `MMIDIDX\\0\\0` (9 bytes), version 1 (u64), token type code (u8), number of sequences (u64), length of the
document index (u64), then sequence lengths in tokens (i32 each), sequence positions in bytes (i64 each), and the
document index (i64 each): document d is made of the sequences index[d] to index[d + 1].
Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
TYPE_CODES = {dtype: code for code, dtype in TOKEN_TYPES.items()}
_SCAN_TOKENS = 1 << 22


def bin_path(prefix: Path) -> Path:
    """The token file of a prefix."""
    return prefix.parent / f"{prefix.name}.bin"


def idx_path(prefix: Path) -> Path:
    """The index file of a prefix."""
    return prefix.parent / f"{prefix.name}.idx"


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type Megatron uses for ids below `vocab_size`: uint16 when they fit, else int32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


class IndexedWriter:
    """Writes documents to `<prefix>.bin` and `<prefix>.idx`; both appear when the `with` block ends well, or neither.

    Each document becomes one sequence. `sha256` maps a file's name to its checksum after the block.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix = prefix
        self.dtype = dtype
        self.num_tokens = 0
        self.max_token_id = -1
        self.sha256: dict[str, str] = {}
        self._sizes: list[int] = []
        self._hash = hashlib.sha256()
        self._parts = [path.with_name(path.name + ".part") for path in (bin_path(prefix), idx_path(prefix))]
        self._files = ExitStack()
        self._file = self._files.enter_context(self._parts[0].open("wb"))

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._sizes)

    def add(self, token_ids: Sequence[int] | NDArray[Any]) -> None:
        """Append one document. Raises DataError when an id does not fit the token type."""
        ids = np.asarray(token_ids, dtype=np.int64)
        bounds = np.iinfo(self.dtype)
        if ids.size == 0 or ids.min() < 0 or ids.max() > bounds.max:
            raise DataError(f"{self.prefix}: a document needs tokens with ids from 0 to {bounds.max}")
        data = ids.astype(self.dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._sizes.append(ids.size)
        self.num_tokens += ids.size
        self.max_token_id = max(self.max_token_id, int(ids.max()))

    def _write_index(self) -> None:
        sizes = np.asarray(self._sizes, dtype="<i4")
        ends_bytes = np.cumsum(sizes, dtype="<i8") * self.dtype.itemsize
        starts_bytes = np.concatenate([np.zeros(1, "<i8"), ends_bytes[:-1]])[: sizes.size]
        index = b"".join(
            [
                HEADER.pack(MAGIC, VERSION, TYPE_CODES[self.dtype], sizes.size, sizes.size + 1),
                sizes.tobytes(),
                starts_bytes.astype("<i8").tobytes(),
                np.arange(sizes.size + 1, dtype="<i8").tobytes(),
            ]
        )
        with self._parts[1].open("wb") as file:
            file.write(index)
            file.flush()
            os.fsync(file.fileno())
        self.sha256[idx_path(self.prefix).name] = hashlib.sha256(index).hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self.sha256[bin_path(self.prefix).name] = self._hash.hexdigest()
                self._write_index()
                for part in self._parts:
                    part.replace(part.with_suffix(""))
        finally:
            self._files.close()
            for part in self._parts:
                part.unlink(missing_ok=True)


class IndexedDataset:
    """A prefix's tokens, by memory map.

    `tokens` is the flat array of all tokens, `document_offsets` (int64, documents + 1) where each document starts in
    it, in tokens. Raises DataError that names the file and the byte offset when the pair of files is not sound.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.idx_path = idx_path(prefix)
        self.bin_path = bin_path(prefix)
        index = _map_file(self.idx_path)
        self.dtype, sizes, pointers, documents = _read_index(self.idx_path, index)
        data = _map_file(self.bin_path)
        self._check(sizes, pointers, documents, data.size)
        self.num_sequences = int(sizes.size)
        self.num_documents = int(documents.size) - 1
        self.tokens: NDArray[Any] = data.view(self.dtype)
        ends = np.concatenate([pointers // self.dtype.itemsize, np.asarray([self.tokens.size], dtype=np.int64)])
        self.document_offsets: NDArray[np.int64] = ends[documents]

    @property
    def num_tokens(self) -> int:
        """All tokens, end-of-document tokens included."""
        return int(self.tokens.size)

    def document(self, number: int) -> NDArray[Any]:
        """The tokens of one document, as a view of the map."""
        if not 0 <= number < self.num_documents:
            raise DataError(f"{self.prefix}: document {number} is asked for, it has 0 to {self.num_documents - 1}")
        return self.tokens[self.document_offsets[number] : self.document_offsets[number + 1]]

    def max_token_id(self) -> int:
        """The largest token id, by reading every token."""
        chunks = range(0, self.num_tokens, _SCAN_TOKENS)
        return max(int(self.tokens[start : start + _SCAN_TOKENS].max()) for start in chunks)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Read every token; raises DataError with file and byte offset at the first id outside 0 to vocab_size - 1."""
        for start in range(0, self.num_tokens, _SCAN_TOKENS):
            chunk = self.tokens[start : start + _SCAN_TOKENS]
            if int(chunk.min()) < 0 or int(chunk.max()) >= vocab_size:
                at = start + int(np.argmax((chunk < 0) | (chunk >= vocab_size)))
                raise DataError(
                    f"{self.bin_path}: token id {int(self.tokens[at])} at byte offset {at * self.dtype.itemsize} is "
                    f"outside the vocabulary of {vocab_size} (allowed: 0 to {vocab_size - 1}); "
                    f"use the tokenizer it was made with"
                )

    def _check(
        self, sizes: NDArray[np.int32], pointers: NDArray[np.int64], documents: NDArray[np.int64], bin_bytes: int
    ) -> None:
        path, item_bytes = self.idx_path, self.dtype.itemsize
        sizes_at = HEADER.size
        pointers_at = sizes_at + sizes.nbytes
        documents_at = pointers_at + pointers.nbytes
        if (bad := _first(sizes < 0)) is not None:
            raise DataError(f"{path}: sequence length {sizes[bad]} at byte offset {sizes_at + 4 * bad} is negative")
        ends = np.cumsum(sizes, dtype=np.int64) * item_bytes
        starts = ends - sizes.astype(np.int64) * item_bytes
        if (bad := _first(pointers != starts)) is not None:
            raise DataError(
                f"{path}: sequence {bad} at byte offset {pointers_at + 8 * bad} points to byte {pointers[bad]} of "
                f"the .bin file, it should be {starts[bad]}, the end of the sequence before it"
            )
        if int(ends[-1]) != bin_bytes:
            raise DataError(
                f"{self.bin_path}: has {bin_bytes} bytes, its index {path.name} describes {int(ends[-1])}: "
                f"the file is truncated or belongs to another index"
            )
        if documents[0] != 0 or documents[-1] != sizes.size:
            raise DataError(
                f"{path}: the document index at byte offset {documents_at} runs from {documents[0]} to "
                f"{documents[-1]}, it should run from 0 to {sizes.size}"
            )
        if (bad := _first(np.diff(documents) < 0)) is not None:
            at = documents_at + 8 * (bad + 1)
            raise DataError(f"{path}: the document index decreases to {documents[bad + 1]} at byte offset {at}")


def _first(wrong: NDArray[np.bool_]) -> int | None:
    """The first true element's number, or None."""
    return int(np.argmax(wrong)) if wrong.any() else None


def _map_file(path: Path) -> NDArray[np.uint8]:
    try:
        if not path.is_file():
            raise DataError(f"{path}: no such file; `amt data prepare --corpus python-stdlib --out DIR` makes a corpus")
        if path.stat().st_size == 0:
            raise DataError(f"{path}: is empty (0 bytes)")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _read_index(
    path: Path, data: NDArray[np.uint8]
) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Token type, sequence lengths (tokens), sequence positions (bytes), document index."""
    if data.size < HEADER.size:
        raise DataError(f"{path}: truncated at byte offset {data.size}, the header alone takes {HEADER.size} bytes")
    magic, version, code, num_sequences, num_documents = HEADER.unpack(data[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(f"{path}: starts with {magic!r} at byte offset 0, a Megatron index starts with {MAGIC!r}")
    if version != VERSION:
        raise DataError(f"{path}: format version {version} at byte offset 9, only version {VERSION} is known")
    if code not in TOKEN_TYPES:
        known = ", ".join(f"{known_code} ({dtype})" for known_code, dtype in TOKEN_TYPES.items())
        raise DataError(f"{path}: token type code {code} at byte offset 17, known are {known}")
    needed_bytes = HEADER.size + 12 * num_sequences + 8 * num_documents
    if num_sequences < 1 or num_documents < 2:
        raise DataError(f"{path}: {num_sequences} sequences and a document index of {num_documents}: holds no document")
    if needed_bytes != data.size:
        what = "is truncated" if data.size < needed_bytes else "goes on after its end"
        raise DataError(
            f"{path}: {what} at byte offset {min(data.size, needed_bytes)}: {num_sequences} sequences and a document "
            f"index of {num_documents} take {needed_bytes} bytes, it has {data.size}"
        )
    pointers_at = HEADER.size + 4 * num_sequences
    documents_at = pointers_at + 8 * num_sequences
    sizes = np.frombuffer(data, dtype="<i4", count=num_sequences, offset=HEADER.size)
    pointers = np.frombuffer(data, dtype="<i8", count=num_sequences, offset=pointers_at)
    documents = np.frombuffer(data, dtype="<i8", count=num_documents, offset=documents_at)
    return TOKEN_TYPES[code], sizes, pointers, documents
