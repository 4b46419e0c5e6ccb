"""`amt data prepare`: text to token shards. Pure.

The output folder appears complete or not at all: everything is written into a hidden folder beside it, synced to disk,
and renamed. The sources are read two or three times (survey, tokenizer training, tokens), never held in memory.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from ascend_moe_train.data.indexed import IndexedDataset, IndexedWriter, token_type
from ascend_moe_train.data.manifest import (
    CORPUS_FILES,
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_NAME,
    Arguments,
    FileRecord,
    Manifest,
    SourceRecord,
    SplitRecord,
    read_manifest,
)
from ascend_moe_train.data.sources import Document, SourceFile, find_files, read_documents
from ascend_moe_train.data.staging import occupied, staged_folder, write_synced
from ascend_moe_train.data.tokenizer import Tokenizer, parse_tokenizer, read_tokenizer_text, train_tokenizer
from ascend_moe_train.errors import DataError

# stage, bytes done, bytes in all
Progress = Callable[[str, int, int], None]

_BATCH_BYTES = 1 << 22
_HASH_RANGE = 1 << 64


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` gives back. `reused`: the output was there already, of the same arguments and sources."""

    manifest: Manifest
    reused: bool


@dataclass(frozen=True, kw_only=True)
class _Survey:
    """The sources after one reading. Held out is a name hash below `valid_below` with at most `valid_bytes` of text."""

    files: Sequence[SourceFile]
    field: str
    records: list[SourceRecord]
    documents: int
    empty_documents: int
    valid_below: int
    valid_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(record.bytes for record in self.records)

    def split_of(self, document: Document) -> str:
        held_out = _name_hash(document.name) < self.valid_below and len(document.text.encode()) <= self.valid_bytes
        return "valid" if held_out else "train"


def prepare(
    *,
    sources: Sequence[str] = (),
    corpus: str | None = None,
    out: Path,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    field: str = "text",
    valid_fraction: float = 0.05,
    force: bool = False,
    progress: Progress = lambda stage, done_bytes, total_bytes: None,
) -> Prepared:
    """Tokenise text into `out`: train.bin/.idx, valid.bin/.idx, tokenizer.json and manifest.json.

    A tokenizer of `vocab_size` tokens is trained on the training split, unless one is given; `vocab_size` is then the
    bound on its ids, when named. Whole documents are held out for validation, chosen by a hash of their names: the
    share `valid_fraction` of them, at least one; a document larger than that share of all bytes is not, so that it does
    not become most of the validation split. An output of the same arguments and sources is reused; any other is
    refused, or replaced with `force`. Raises DataError, and then leaves nothing behind.
    """
    if not 0 <= valid_fraction < 1:
        raise DataError(f"valid_fraction {valid_fraction} is not possible, allowed: 0 (no validation split) to below 1")
    if vocab_size is None and tokenizer is None:
        raise DataError("name the size of the vocabulary to train (--vocab-size), or a tokenizer (--tokenizer)")
    files = find_files(sources, corpus, out)
    given = None if tokenizer is None else _given_tokenizer(tokenizer, vocab_size)
    survey = _survey(files, field, valid_fraction, progress)
    arguments = Arguments(
        sources=[_printable(source) for source in sources],
        corpus=corpus,
        field=_printable(field),
        vocab_size=vocab_size,
        tokenizer_sha256=None if given is None else hashlib.sha256(given[1].encode()).hexdigest(),
        valid_fraction=float(valid_fraction),
    )
    try:
        if occupied(out):
            _check_ours(out)
            if not force:
                return Prepared(manifest=_existing(out, arguments, survey.records), reused=True)
        with staged_folder(out) as folder:
            manifest = _write(folder, survey, arguments, given, progress)
    except OSError as error:
        raise DataError(f"{error.filename or out}: cannot be written: {error.strerror}") from error
    return Prepared(manifest=manifest, reused=False)


def _given_tokenizer(path: Path, vocab_size: int | None) -> tuple[Tokenizer, str]:
    text = read_tokenizer_text(path)
    tokenizer = parse_tokenizer(text, str(path))
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{path}: its largest token id is {tokenizer.vocab_size - 1}, beyond vocab_size {vocab_size}; "
            f"allowed: --vocab-size {tokenizer.vocab_size} or more, or none"
        )
    return tokenizer, text


def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _survey(files: Sequence[SourceFile], field: str, valid_fraction: float, progress: Progress) -> _Survey:
    """Read everything once: whatever is wrong with the sources is found before any work is done."""
    total_bytes = sum(_size_bytes(file.path) for file in files)
    records: list[SourceRecord] = []
    done_bytes = documents = empty_documents = 0
    lowest = lowest_small = _HASH_RANGE
    valid_bytes = int(valid_fraction * total_bytes)
    for file in files:
        end_bytes = 0
        for document in read_documents(file, field):
            end_bytes = document.end_bytes
            progress("reading", done_bytes + end_bytes, total_bytes)
            if not document.text:
                empty_documents += 1
                continue
            documents += 1
            name_hash = _name_hash(document.name)
            lowest = min(lowest, name_hash)
            if len(document.text.encode()) <= valid_bytes:
                lowest_small = min(lowest_small, name_hash)
        size_bytes, sha256 = _digest(file.path)
        done_bytes += size_bytes
        records.append(SourceRecord(name=_printable(file.name), bytes=size_bytes, sha256=sha256))
    if documents == 0:
        raise DataError(f"{files[0].path}: {len(files)} file(s) and no text in them")
    valid_below = int(valid_fraction * _HASH_RANGE)
    # At least one document is held out, however small the share.
    if valid_fraction > 0 and lowest_small < _HASH_RANGE:
        valid_below = max(valid_below, lowest_small + 1)
    elif valid_fraction > 0:
        valid_below, valid_bytes = lowest + 1, total_bytes
    return _Survey(
        files=files,
        field=field,
        records=records,
        documents=documents,
        empty_documents=empty_documents,
        valid_below=valid_below,
        valid_bytes=valid_bytes,
    )


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _digest(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file."""
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return stream.tell(), digest
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _printable(name: str) -> str:
    """A file name as text that JSON can hold, whatever bytes the file system gave."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _documents(survey: _Survey, stage: str, progress: Progress) -> Iterator[Document]:
    """The documents with text, in the order of the files."""
    done_bytes = documents = 0
    for file, record in zip(survey.files, survey.records, strict=True):
        for document in read_documents(file, survey.field):
            progress(stage, done_bytes + document.end_bytes, survey.total_bytes)
            if document.text:
                documents += 1
                yield document
        done_bytes += record.bytes
    if documents != survey.documents:
        raise DataError(f"the sources changed while they were read: {survey.documents} documents, then {documents}")


def _write(
    folder: Path, survey: _Survey, arguments: Arguments, given: tuple[Tokenizer, str] | None, progress: Progress
) -> Manifest:
    if given is None:
        # `vocab_size` is there whenever no tokenizer is: `prepare` refuses otherwise.
        assert arguments.vocab_size is not None
        documents = _documents(survey, "training the tokenizer", progress)
        texts = (document.text for document in documents if survey.split_of(document) == "train")
        tokenizer = train_tokenizer(texts, arguments.vocab_size)
        tokenizer_text = tokenizer.to_json()
    else:
        tokenizer, tokenizer_text = given
    splits, checksums = _write_splits(folder, survey, tokenizer, progress)
    write_synced(folder / TOKENIZER_NAME, tokenizer_text.encode())
    checksums[TOKENIZER_NAME] = hashlib.sha256(tokenizer_text.encode()).hexdigest()
    manifest = Manifest(
        arguments=arguments,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        splits=splits,
        empty_documents=survey.empty_documents,
        sources=survey.records,
        files={
            name: FileRecord(bytes=(folder / name).stat().st_size, sha256=sha256) for name, sha256 in checksums.items()
        },
        tokenizers_version=tokenizers.__version__,
    )
    write_synced(folder / MANIFEST_NAME, (manifest.model_dump_json(indent=1) + "\n").encode())
    return manifest


def _write_splits(
    folder: Path, survey: _Survey, tokenizer: Tokenizer, progress: Progress
) -> tuple[dict[str, SplitRecord], dict[str, str]]:
    """Tokenise every document into its split. Returns the splits, and the checksums of the files by name."""
    splits: dict[str, SplitRecord] = {}
    checksums: dict[str, str] = {}
    dtype = token_type(tokenizer.vocab_size)
    for split in SPLITS if survey.valid_below else SPLITS[:1]:
        text_bytes = 0
        with IndexedWriter(folder / split, dtype) as writer:
            documents = _documents(survey, f"tokenising {split}", progress)
            for batch in _batches(document.text for document in documents if survey.split_of(document) == split):
                for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
                    text_bytes += len(text.encode())
                    writer.add([*ids, tokenizer.eod_id])
        if writer.num_documents == 0:
            raise DataError(
                f"no document is left for the {split} split, {survey.documents} in all; give more files, "
                f"another --valid-fraction, or 0 for no validation split"
            )
        checksums |= writer.sha256
        splits[split] = SplitRecord(
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            bytes=text_bytes,
            max_token_id=writer.max_token_id,
        )
    return splits, checksums


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts in lists of a few MB: enough to keep all cores busy, little enough to hold."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_ours(out: Path) -> None:
    """Refuse an output that holds anything this command does not write: `--force` deletes nothing of the user's."""
    if not out.is_dir():
        raise DataError(f"--out {out} exists and is no folder; name another")
    for path in out.iterdir():
        if path.name not in CORPUS_FILES:
            raise DataError(f"--out {out} exists and holds {path.name!r}, which is no part of a corpus; name another")


def _existing(out: Path, arguments: Arguments, records: list[SourceRecord]) -> Manifest:
    """The manifest of an output that is complete and of the same arguments and sources. Raises DataError otherwise."""
    hint = "name another --out, or replace it with --force"
    manifest = read_manifest(out)
    if manifest is None:
        raise DataError(f"--out {out} exists, without a {MANIFEST_NAME}; {hint}")
    # Not how the sources were spelled: which files they are and what is in them is compared below.
    for key, value in arguments.model_dump(exclude={"sources"}).items():
        if (before := getattr(manifest.arguments, key)) != value:
            raise DataError(f"--out {out} exists, made with {key} {before!r}, asked for is {value!r}; {hint}")
    if manifest.sources != records:
        raise DataError(f"--out {out} exists, and the sources have changed since it was made; {hint}")
    for name, record in manifest.files.items():
        if name not in CORPUS_FILES:
            raise DataError(f"{out / MANIFEST_NAME}: lists a file {name!r} that no corpus has; {hint}")
        if not (out / name).is_file() or (out / name).stat().st_size != record.bytes:
            raise DataError(f"{out / name}: missing or not the {record.bytes} bytes that were written; {hint}")
    for split in manifest.splits:
        IndexedDataset(out / split)
    return manifest
