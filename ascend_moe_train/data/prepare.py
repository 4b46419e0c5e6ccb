"""`amt data prepare`: text or conversations to token shards. Pure.

The output folder appears complete or not at all: everything is written into a hidden folder beside it, synced to disk,
and renamed. The sources are read two or three times (survey, tokenizer training, tokens), never held in memory.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers

from ascend_moe_train.data.chat import conversation_text
from ascend_moe_train.data.chat_template import Answers, ChatRenderer, TemplateSource, find_template
from ascend_moe_train.data.encoding import ChatEncoder, Encoder, TextEncoder, TooLong
from ascend_moe_train.data.indexed import IndexedDataset
from ascend_moe_train.data.manifest import (
    CORPUS_FILES,
    MANIFEST_NAME,
    SPLITS,
    TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    Arguments,
    FileRecord,
    Manifest,
    SourceRecord,
    read_manifest,
)
from ascend_moe_train.data.sources import (
    Document,
    Extract,
    SourceFile,
    find_files,
    read_documents,
    text_field,
)
from ascend_moe_train.data.split_writer import Written, write_split
from ascend_moe_train.data.staging import occupied, staged_folder, write_synced
from ascend_moe_train.data.tokenizer import Tokenizer, parse_tokenizer, read_tokenizer_text, train_tokenizer
from ascend_moe_train.errors import DataError

# stage, bytes done, bytes in all
Progress = Callable[[str, int, int], None]

_HASH_RANGE = 1 << 64


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How conversations are read: see `chat_template.find_template`, `encoding.ChatEncoder` and `chat_worker`."""

    template: Path | None = None
    max_tokens: int | None = None
    too_long: TooLong = "drop"
    answers: Answers = "all"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` gives back. `reused`: the output was there already, of the same arguments and sources."""

    manifest: Manifest
    reused: bool


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What the user brought: a tokenizer with the text of its file, and for conversations a template."""

    tokenizer: tuple[Tokenizer, str] | None
    template: TemplateSource | None


@dataclass(frozen=True, kw_only=True)
class _Survey:
    """The sources after one reading. Held out is a name hash below `valid_below` with at most `valid_bytes` of text; of
    a single text, what follows `cut`, in characters."""

    files: Sequence[SourceFile]
    field: str
    extract: Extract
    records: list[SourceRecord]
    documents: int
    empty_documents: int
    valid_below: int
    valid_bytes: int
    cut: int | None

    @property
    def total_bytes(self) -> int:
        return sum(record.bytes for record in self.records)

    def parts_of(self, document: Document) -> Iterator[tuple[str, Document]]:
        """The document with its split, or both ends of a single one with theirs."""
        if self.cut is None:
            yield self._split_of(document), document
        else:
            yield "train", replace(document, text=document.text[: self.cut])
            yield "valid", replace(document, text=document.text[self.cut :])

    def _split_of(self, document: Document) -> str:
        held_out = _name_hash(document.name) < self.valid_below and len(document.text.encode()) <= self.valid_bytes
        return "valid" if held_out else "train"


def prepare(
    *,
    sources: Sequence[str] = (),
    corpus: str | None = None,
    out: Path,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    field: str | None = None,
    valid_fraction: float = 0.05,
    chat: ChatOptions | None = None,
    force: bool = False,
    progress: Progress = lambda stage, done_bytes, total_bytes: None,
) -> Prepared:
    """Tokenise text into `out`: train.bin/.idx, valid.bin/.idx, tokenizer.json and manifest.json.

    With `chat`, JSONL lines are conversations (see `chat`), a tokenizer is needed, and beside each shard is one that
    says which tokens count in the loss. `field` is `text`, or `messages` of conversations, unless named.
    A tokenizer of `vocab_size` tokens is trained on the training split, unless one is given; `vocab_size` is then the
    bound on its ids, when named. Whole documents are held out for validation, chosen by a hash of their names: the
    share `valid_fraction` of them, at least one; a document larger than that share of all bytes is not, so that it does
    not become most of the validation split. Of a single text the end is, from the start of a line on. An output of the
    same arguments and sources is reused; any other is refused, or replaced with `force`. Raises DataError, and then
    leaves nothing behind.
    """
    if not 0 <= valid_fraction < 1:
        raise DataError(f"valid_fraction {valid_fraction} is not possible, allowed: 0 (no validation split) to below 1")
    if vocab_size is None and tokenizer is None:
        raise DataError("name the size of the vocabulary to train (--vocab-size), or a tokenizer (--tokenizer)")
    if chat is not None and (tokenizer is None or corpus is not None):
        raise DataError("conversations need --source and a --tokenizer: that of the model to be tuned")
    files = find_files(sources, corpus, out)
    given = _given(tokenizer, vocab_size, chat)
    extract = text_field if chat is None else conversation_text
    survey = _survey(files, field or ("text" if chat is None else "messages"), extract, valid_fraction, progress)
    arguments = Arguments(
        sources=[_printable(source) for source in sources],
        corpus=corpus,
        field=_printable(survey.field),
        vocab_size=vocab_size,
        tokenizer_sha256=None if given.tokenizer is None else _sha256(given.tokenizer[1]),
        valid_fraction=float(valid_fraction),
        **_chat_arguments(chat, given.template),
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


def _chat_arguments(chat: ChatOptions | None, template: TemplateSource | None) -> dict[str, Any]:
    if chat is None or template is None:
        return {}
    if chat.max_tokens is not None and chat.max_tokens < 2:
        raise DataError(f"max_tokens {chat.max_tokens} is not possible, allowed: 2 and more")
    return {
        "format": "chat",
        "template_sha256": template.sha256,
        "max_tokens": chat.max_tokens,
        "too_long": chat.too_long,
        "answers": chat.answers,
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _given(path: Path | None, vocab_size: int | None, chat: ChatOptions | None) -> _Given:
    if path is None:
        return _Given(tokenizer=None, template=None)
    tokenizer, text = _given_tokenizer(path, vocab_size)
    template = None if chat is None else find_template(path, chat.template, tokenizer.eod_token)
    return _Given(tokenizer=(tokenizer, text), template=template)


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


def _survey(
    files: Sequence[SourceFile], field: str, extract: Extract, valid_fraction: float, progress: Progress
) -> _Survey:
    """Read everything once: whatever is wrong with the sources is found before any work is done."""
    total_bytes = sum(_size_bytes(file.path) for file in files)
    records: list[SourceRecord] = []
    done_bytes = documents = empty_documents = 0
    lowest = lowest_small = _HASH_RANGE
    cut: int | None = None
    valid_bytes = int(valid_fraction * total_bytes)
    for file in files:
        end_bytes = 0
        for document in read_documents(file, field, extract):
            end_bytes = document.end_bytes
            progress("reading", done_bytes + end_bytes, total_bytes)
            if not document.text:
                empty_documents += 1
                continue
            documents += 1
            cut = _cut_of(document.text, valid_fraction) if documents == 1 and extract is text_field else None
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
        extract=extract,
        records=records,
        documents=documents,
        empty_documents=empty_documents,
        valid_below=valid_below,
        valid_bytes=valid_bytes,
        cut=cut,
    )


def _cut_of(text: str, valid_fraction: float) -> int | None:
    """The start of the last line before the share that is held out; None if there is no such share or line."""
    cut = text.rfind("\n", 0, int((1 - valid_fraction) * len(text))) + 1
    return cut if valid_fraction > 0 and cut > 0 else None


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


def _documents(survey: _Survey, split: str, stage: str, progress: Progress) -> Iterator[Document]:
    """The documents of a split that have text, in the order of the files."""
    done_bytes = documents = 0
    for file, record in zip(survey.files, survey.records, strict=True):
        for document in read_documents(file, survey.field, survey.extract):
            progress(stage, done_bytes + document.end_bytes, survey.total_bytes)
            if document.text:
                documents += 1
                yield from (part for its_split, part in survey.parts_of(document) if its_split == split)
        done_bytes += record.bytes
    if documents != survey.documents:
        raise DataError(f"the sources changed while they were read: {survey.documents} documents, then {documents}")


def _write(folder: Path, survey: _Survey, arguments: Arguments, given: _Given, progress: Progress) -> Manifest:
    if given.tokenizer is None:
        # `vocab_size` is there whenever no tokenizer is: `prepare` refuses otherwise.
        assert arguments.vocab_size is not None
        texts = (document.text for document in _documents(survey, "train", "training the tokenizer", progress))
        tokenizer = train_tokenizer(texts, arguments.vocab_size)
        tokenizer_text = tokenizer.to_json()
    else:
        tokenizer, tokenizer_text = given.tokenizer
    written: dict[str, Written] = {}
    with _encoder(tokenizer, given.template, arguments) as encoder:
        for split in SPLITS if survey.valid_below else SPLITS[:1]:
            chosen = _documents(survey, split, f"tokenising {split}", progress)
            written[split] = write_split(folder / split, chosen, encoder, tokenizer.vocab_size, total=survey.documents)
    checksums = {name: sha256 for each in written.values() for name, sha256 in each.checksums.items()}
    texts_beside = {TOKENIZER_NAME: tokenizer_text}
    if given.template is not None:
        texts_beside[TEMPLATE_NAME] = given.template.text
        if given.template.config is not None:
            texts_beside[TOKENIZER_CONFIG_NAME] = given.template.config
    for name, text in texts_beside.items():
        write_synced(folder / name, text.encode())
        checksums[name] = _sha256(text)
    manifest = Manifest(
        arguments=arguments,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        splits={split: each.record for split, each in written.items()},
        empty_documents=survey.empty_documents,
        sources=survey.records,
        files={
            name: FileRecord(bytes=(folder / name).stat().st_size, sha256=sha256) for name, sha256 in checksums.items()
        },
        tokenizers_version=tokenizers.__version__,
    )
    write_synced(folder / MANIFEST_NAME, (manifest.model_dump_json(indent=1) + "\n").encode())
    return manifest


@contextmanager
def _encoder(tokenizer: Tokenizer, template: TemplateSource | None, arguments: Arguments) -> Iterator[Encoder]:
    if template is None:
        yield TextEncoder(tokenizer)
        return
    with ChatRenderer(template, arguments.answers or "all") as renderer:
        too_long = arguments.too_long or "drop"
        yield ChatEncoder(tokenizer, renderer, max_tokens=arguments.max_tokens, too_long=too_long)


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
