"""Where documents come from: text files, folders, globs, JSONL with a named field, and the built-in corpora. Pure.

A document's name does not depend on where the source lies on the machine, so the validation split, which goes by the
name, is the same everywhere.
"""

import itertools
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe_train.errors import DataError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
CORPORA = ("python-stdlib",)
MAX_DOCUMENT_BYTES = 1 << 30
_GLOB_CHARACTERS = "*?["
# The tests are more than half of the library and repeat themselves; without them 11 to 12 MB remain.
_NOT_STDLIB_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_STDLIB_SUFFIXES = frozenset({".py", ".rst", ".txt"})
# Written when Python was built: paths and compiler flags of that machine.
_NOT_STDLIB_PREFIX = "_sysconfigdata"


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file to read. `explicit`: the user named this very file, so that finding nothing in it is a mistake."""

    name: str
    path: Path
    explicit: bool = False

    @property
    def is_jsonl(self) -> bool:
        """Whether each line is a document."""
        return self.path.suffix.lower() in JSONL_SUFFIXES


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text. `where` is its file and line for messages, `end_bytes` where it ends in its file, for progress."""

    name: str
    text: str
    where: str
    end_bytes: int


# The text of a JSONL line, given the line's object, the field asked for, and where it stands.
Extract = Callable[[Mapping[str, Any], str, str], str]


def find_files(sources: Sequence[str], corpus: str | None, out: Path) -> list[SourceFile]:
    """The files of all sources, in a fixed order. Raises DataError for a source of nothing, or one around `out`."""
    if (corpus is None) == (not sources):
        raise DataError(f"name either sources or a corpus: --source PATH_OR_GLOB ..., or --corpus {'|'.join(CORPORA)}")
    if corpus is not None:
        return _corpus_files(corpus)
    files: dict[Path, SourceFile] = {}
    for source in sources:
        try:
            for file in _source_files(source, out):
                files.setdefault(_real(file.path), file)
        except OSError as error:
            raise DataError(f"{error.filename or source}: cannot be read: {error.strerror}") from error
    return list(files.values())


def text_field(record: Mapping[str, Any], field: str, where: str) -> str:
    """The text in a field of a JSONL line. Raises DataError after `where`."""
    text = record_field(record, field, where)
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is of type {type(text).__name__}, text is needed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field {field!r} holds half a surrogate pair at character {error.start}") from error
    return text


def record_field(record: Mapping[str, Any], field: str, where: str) -> object:
    """A field of a JSONL line. Raises DataError after `where` when it is not there."""
    if field not in record:
        there = ", ".join(repr(key)[:40] for key in list(record)[:8]) or "none"
        advice = "take --format chat" if "messages" in record else "name the right one with --field"
        raise DataError(f"{where}: no field {field!r} (fields there: {there}); {advice}")
    return record[field]


def read_documents(file: SourceFile, field: str, extract: Extract = text_field) -> Iterator[Document]:
    """The documents of a file, empty ones included. Raises DataError with file and byte offset or line number.

    Of each JSONL line `extract` takes the text; any other file is one text, and refused with another `extract`.
    """
    try:
        if not stat.S_ISREG(file.path.stat().st_mode):
            raise DataError(f"{file.path}: is no regular file")
        if file.is_jsonl:
            yield from _read_jsonl(file, field, extract)
        elif extract is text_field:
            yield from _read_text(file)
        else:
            raise DataError(f"{file.path}: conversations are read from JSONL: {', '.join(JSONL_SUFFIXES)}")
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read: {error.strerror}") from error


def _read_text(file: SourceFile) -> Iterator[Document]:
    with file.path.open("rb") as stream:
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DataError(f"{file.path}: a document of more than {MAX_DOCUMENT_BYTES} bytes; split it, or use JSONL")
    if not data and file.explicit:
        raise DataError(f"{file.path}: is empty (0 bytes)")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = f"byte 0x{data[error.start]:02x} at byte offset {error.start}"
        raise DataError(
            f"{file.path}: {bad} is not UTF-8 text; leave the file out, with a glob for instance"
        ) from error
    yield Document(name=file.name, text=text, where=str(file.path), end_bytes=len(data))


def _read_jsonl(file: SourceFile, field: str, extract: Extract) -> Iterator[Document]:
    end_bytes = 0
    empty = True
    with file.path.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_DOCUMENT_BYTES + 1), b""), start=1):
            where = f"{file.path}: line {number}"
            if len(line) > MAX_DOCUMENT_BYTES:
                raise DataError(f"{where} has more than {MAX_DOCUMENT_BYTES} bytes")
            start_bytes, end_bytes = end_bytes, end_bytes + len(line)
            if not line.strip():
                continue
            empty = False
            text = extract(_record(line, field, where, start_bytes), field, where)
            yield Document(name=f"{file.name}:{number}", text=text, where=where, end_bytes=end_bytes)
    if empty and file.explicit:
        raise DataError(f"{file.path}: is empty ({end_bytes} bytes), no line holds a document")


def _record(line: bytes, field: str, where: str, start_bytes: int) -> Mapping[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        at = start_bytes + error.start
        raise DataError(f"{where}: byte 0x{line[error.start]:02x} at byte offset {at} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"{where}: not JSON that can be read: nested too deep or a number too long") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}, an object with the field {field!r} is needed")
    return record


def _source_files(source: str, out: Path) -> list[SourceFile]:
    path = Path(source)
    if os.path.lexists(path):
        _check_apart(path, out)
        return _folder_files(path) if path.is_dir() else [SourceFile(name=path.name, path=path, explicit=True)]
    if not _has_magic(source):
        raise DataError(f"{source}: no such file or folder")
    root = Path(*itertools.takewhile(lambda part: not _has_magic(part), path.parts))
    try:
        matches = [match for match in sorted(root.glob(str(path.relative_to(root)))) if not match.is_dir()]
    except ValueError as error:
        raise DataError(f"{source}: {error}") from error
    if not matches:
        raise DataError(f"{source}: the glob matches no file")
    for match in matches:
        _check_apart(match, out)
    return [SourceFile(name=match.relative_to(root).as_posix(), path=match) for match in matches]


def _has_magic(text: str) -> bool:
    return any(character in text for character in _GLOB_CHARACTERS)


def _folder_files(root: Path) -> list[SourceFile]:
    files = [
        SourceFile(name=path.relative_to(root).as_posix(), path=path)
        for path in _walk(root)
        if not path.name.startswith(".")
    ]
    if not files:
        raise DataError(f"{root}: the folder holds no file")
    return files


def _walk(root: Path) -> Iterator[Path]:
    """All files below a folder in a fixed order; hidden folders and byte code left out, linked folders not followed."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name != "__pycache__")
        yield from (Path(folder, name) for name in sorted(names))


def _corpus_files(corpus: str) -> list[SourceFile]:
    if corpus not in CORPORA:
        raise DataError(f"corpus {corpus!r} is not known, allowed: {', '.join(CORPORA)}")
    root = Path(sysconfig.get_path("stdlib"))
    paths = ((path, path.relative_to(root)) for path in _walk(root))
    return [
        SourceFile(name=relative.as_posix(), path=path)
        for path, relative in paths
        if path.suffix in _STDLIB_SUFFIXES
        and not path.name.startswith(_NOT_STDLIB_PREFIX)
        and _NOT_STDLIB_FOLDERS.isdisjoint(relative.parts[:-1])
    ]


def _check_apart(source: Path, out: Path) -> None:
    source, out = _real(source), _real(out)
    if out == source or source in out.parents:
        raise DataError(f"--out {out} lies inside the source {source}: the next run would read its own output")
    if out in source.parents:
        raise DataError(f"source {source} lies inside --out {out}: writing the output would replace it")


def _real(path: Path) -> Path:
    """`Path.resolve` without its exception for a link that points to itself; reading that file says what is wrong."""
    return Path(os.path.realpath(path))
