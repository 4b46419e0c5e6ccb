"""What there is to read: folders, files, tar archives, standard input, packed ones too. Pure.

Nothing is unpacked onto the disk, links out of a folder are not followed, and what is no log is passed over.
"""

import lzma
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO, Self, cast

from ascend_moe_train.errors import DataError
from ascend_moe_train.plain_text import plain
from ascend_moe_train.unpacked import Allowance, unpacked, unpacked_file

MAX_FILES = 100_000
MAX_DEPTH = 24
MAX_SOURCE_BYTES = 64 * 2**30  # of one file or pipe
MAX_HEADER_BYTES = 2**18  # of what an archive says of one file
MAX_WIDE_BYTES = 256 * 2**20  # of UTF-16, which is read whole
BLOCK_BYTES = 4 * 2**20
METRICS_NAME = "metrics.jsonl"
VERDICT_NAME = "doctor.json"
_TABLES = "ASCEND_PROFILER_OUTPUT"  # a folder of figures, which `amt profile` reads

# What our runs and checkpoints keep beside logs: figures, verdicts, records in which words mean something else, texts
# that a model made up.
_OUR_RECORDS = frozenset(
    {
        METRICS_NAME,
        VERDICT_NAME,
        "failure.json",
        "launcher.json",
        "manifest.json",
        "run.json",
        "sample.txt",
        "tokenizer.json",
    }
)

_NO_LOGS = frozenset(
    {
        ".air",
        ".bin",
        ".c",
        ".ckpt",
        ".css",
        ".csv",
        ".db",
        ".h",
        ".h5",
        ".html",
        ".idx",
        ".jpg",
        ".js",
        ".mindir",
        ".npy",
        ".npz",
        ".o",
        ".om",
        ".parquet",
        ".pdf",
        ".png",
        ".pt",
        ".pth",
        ".py",
        ".pyc",
        ".safetensors",
        ".so",
        ".whl",
        ".yaml",
        ".yml",
        ".zip",
    }
)
_TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_UNPACKING_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)
# tarfile's own mistakes with headers that no program writes, or that end too soon
_ARCHIVE_ERRORS = (*_UNPACKING_ERRORS, ValueError, TypeError, OverflowError, RecursionError)
_HOLES = "a file with holes in it: unpack it, and name the folder"
_HEADERS_OF_HEADERS = frozenset(
    {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A stream of bytes under a name. `path` is its file, None where it has none of its own, as in an archive."""

    name: str
    size_bytes: int
    path: Path | None = None
    is_packed: bool = False


class _Member(tarfile.TarInfo):
    """A file of an archive, whose name and attributes cannot fill the memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Raises ReadError: a size that no name has, or a list of holes, which may be of any length."""
        found = super().frombuf(buf, encoding, errors)
        if found.type in _HEADERS_OF_HEADERS and found.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {found.size:,} bytes, {MAX_HEADER_BYTES:,} at most")
        if found.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(_HOLES)
        return found


def found_sources(paths: Iterable[Path]) -> list[Source]:
    """The files to read, in the order of their names. Raises DataError: a path that is not there or no file, or too
    many files."""
    found: list[Source] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: there is no such file or folder")
        if not path.is_dir() and not path.is_file():  # a pipe or a device might never end
            raise DataError(f"{path}: is no regular file: what a program writes is read from standard input, as -")
        found += _in_folder(path) if path.is_dir() else [_source(path, str(path))]
        if len(found) > MAX_FILES:
            raise DataError(f"{path}: more than {MAX_FILES:,} files: name the folder that holds the logs of one run")
    return found


def _in_folder(folder: Path) -> list[Source]:
    found: list[Source] = []
    waiting = [(folder, 0)]
    while waiting and len(found) <= MAX_FILES:
        place, depth = waiting.pop()
        for path in sorted(place.iterdir()):
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode) and depth < MAX_DEPTH and path.name != _TABLES:
                waiting.append((path, depth + 1))
            elif stat.S_ISREG(mode) and _is_log(path):
                found.append(_source(path, str(path.relative_to(folder))))
    return sorted(found, key=lambda source: source.name)


def _is_log(path: Path) -> bool:
    """Whether its name may be that of a log; our own records are none."""
    return path.suffix.lower() not in _NO_LOGS and path.name not in _OUR_RECORDS


def _source(path: Path, name: str) -> Source:
    is_packed = path.suffix == ".gz" and not path.name.endswith(_TAR)
    return Source(name=plain(name), size_bytes=path.stat().st_size, path=path, is_packed=is_packed)


def is_archive(source: Source) -> bool:
    """Whether it holds other files."""
    return source.name.endswith(_TAR)


@contextmanager
def opened(source: Source) -> Iterator[BufferedIOBase]:
    """The unpacked stream of a source that has a file. Raises OSError."""
    assert source.path is not None
    with unpacked_file(source.path) if source.is_packed else source.path.open("rb") as stream:
        yield stream


def archived(source: Source) -> Iterator[tuple[Source, BufferedIOBase]]:
    """The files of a tar archive, each readable until the next is asked for. Raises DataError: a damaged archive, or
    one that unpacks to more than is read of its size."""
    assert source.path is not None
    allowance = Allowance(source.size_bytes)  # of its packed files, besides what it unpacks to itself
    try:
        with tarfile.open(source.path, "r|*", tarinfo=_Member) as archive:
            for count, member in enumerate(archive):
                if count >= MAX_FILES:
                    raise DataError(f"{source.name}: more than {MAX_FILES:,} files")
                if member.issparse():
                    raise tarfile.ReadError(_HOLES)
                if archive.offset > allowance.most_bytes:  # where this file ends
                    raise DataError(f"{source.name}: {allowance.refusal}")
                path = Path(member.name)
                suffix = path.suffix.lower()
                is_log = member.isfile() and _is_log(path) and _TABLES not in path.parts
                stream = archive.extractfile(member) if is_log else None
                if stream is None:
                    continue
                inner = Source(name=plain(member.name.lstrip("./")), size_bytes=member.size, is_packed=suffix == ".gz")
                file = cast(BufferedIOBase, stream)
                yield inner, unpacked(cast(BinaryIO, file), allowance) if inner.is_packed else file
    except _ARCHIVE_ERRORS as error:
        raise DataError(f"{source.name}: not a whole tar archive: {error}") from error


def blocks(stream: BufferedIOBase, tell: Callable[[str], None]) -> Iterator[bytes]:
    """Whole lines in blocks, as UTF-8 or in whatever other encoding has ASCII in it; empty for what is no text.

    A line longer than a block is cut there. `tell` gets what went wrong in reading, after which there is no more.
    """
    parts, size, total = [b""], 0, 0  # of what has no end of a line yet
    while True:
        piece = _next_piece(stream, tell)
        if total == 0 and not (piece := _as_text(piece, stream, tell)):
            return
        total += len(piece)
        if not piece or total > MAX_SOURCE_BYTES:
            break
        parts.append(piece)
        size += len(piece)
        end = piece.rfind(b"\n") + 1 or (len(piece) if size >= BLOCK_BYTES else 0)
        if end:
            yield b"".join([*parts[:-1], piece[:end]])
            parts, size = [piece[end:]], len(piece) - end
    if total > MAX_SOURCE_BYTES:
        tell(f"more than {MAX_SOURCE_BYTES:,} bytes: the rest was not read")
    if size:
        yield b"".join(parts)


def _next_piece(stream: BufferedIOBase, tell: Callable[[str], None]) -> bytes:
    """Some bytes; of a damaged archive, what comes before the damage. Empty at the end, and where `tell` got why."""
    try:
        return stream.read1(BLOCK_BYTES)
    except _UNPACKING_ERRORS as error:
        tell(str(error) or type(error).__name__)
        return b""


def _as_text(first: bytes, stream: BufferedIOBase, tell: Callable[[str], None]) -> bytes:
    """The first block of a stream, UTF-16 turned into UTF-8; empty for what has zero bytes and so is no text."""
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        parts, size = [first], len(first)
        while size < MAX_WIDE_BYTES and (piece := _next_piece(stream, tell)):
            parts.append(piece)
            size += len(piece)
        return b"".join(parts).decode("utf-16", errors="replace").encode("utf-8", errors="replace")
    return b"" if b"\0" in first[:1024] and first[:1024].count(b"\0") > 8 else first


def text_of(raw: bytes) -> str:
    """A line as text: UTF-8, else GB18030, else with what cannot be read replaced."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        pass
    try:
        return raw.decode("gb18030")
    except UnicodeDecodeError:
        return raw.decode(errors="replace")
