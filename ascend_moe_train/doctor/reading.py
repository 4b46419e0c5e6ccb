"""What there is to read: folders, files, tar archives, standard input, packed ones too. Pure.

Nothing is unpacked onto the disk, links out of a folder are not followed, and what is no log is passed over.
"""

import gzip
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import cast

from ascend_moe_train.errors import DataError

MAX_FILES = 100_000
MAX_DEPTH = 24
MAX_UNPACKED_BYTES = 64 * 2**30  # of one packed file
MAX_WIDE_BYTES = 256 * 2**20  # of UTF-16, which is read whole
BLOCK_BYTES = 4 * 2**20
METRICS_NAME = "metrics.jsonl"
VERDICT_NAME = "doctor.json"

_NO_LOGS = frozenset(
    {
        ".air",
        ".bin",
        ".c",
        ".ckpt",
        ".css",
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
_UNPACKING_ERRORS = (OSError, EOFError, zlib.error, tarfile.TarError)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A stream of bytes under a name. `path` is its file, None where it has none of its own, as in an archive."""

    name: str
    size_bytes: int
    path: Path | None = None
    is_packed: bool = False


def found_sources(paths: Iterable[Path]) -> list[Source]:
    """The files to read, in the order of their names. Raises DataError: a path that is not there, or too many files."""
    found: list[Source] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: there is no such file or folder")
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
            if stat.S_ISDIR(mode) and depth < MAX_DEPTH:
                waiting.append((path, depth + 1))
            elif stat.S_ISREG(mode) and _is_log(path):
                found.append(_source(path, str(path.relative_to(folder))))
    return sorted(found, key=lambda source: source.name)


def _is_log(path: Path) -> bool:
    """Whether its name may be that of a log; figures of steps and our own verdicts are none."""
    return path.suffix.lower() not in _NO_LOGS and path.name not in (METRICS_NAME, VERDICT_NAME)


def _source(path: Path, name: str) -> Source:
    is_packed = path.suffix == ".gz" and not name.endswith(_TAR)
    return Source(name=name, size_bytes=path.stat().st_size, path=path, is_packed=is_packed)


def is_archive(source: Source) -> bool:
    """Whether it holds other files."""
    return source.name.endswith(_TAR)


@contextmanager
def opened(source: Source) -> Iterator[BufferedIOBase]:
    """The unpacked stream of a source that has a file. Raises OSError."""
    assert source.path is not None
    with source.path.open("rb") as file:
        if source.is_packed:
            with closing(gzip.GzipFile(fileobj=file)) as unpacked:
                yield unpacked
        else:
            yield file


def archived(source: Source) -> Iterator[tuple[Source, BufferedIOBase]]:
    """The files of a tar archive, each readable until the next is asked for. Raises DataError: a damaged archive."""
    assert source.path is not None
    try:
        with tarfile.open(source.path, "r|*") as archive:
            for count, member in enumerate(archive):
                if count >= MAX_FILES:
                    raise DataError(f"{source.name}: more than {MAX_FILES:,} files")
                suffix = Path(member.name).suffix.lower()
                stream = archive.extractfile(member) if member.isfile() and suffix not in _NO_LOGS else None
                if stream is None:
                    continue
                inner = Source(name=member.name.lstrip("./"), size_bytes=member.size, is_packed=suffix == ".gz")
                file = cast(BufferedIOBase, stream)
                yield inner, gzip.GzipFile(fileobj=file) if inner.is_packed else file
    except _UNPACKING_ERRORS as error:
        raise DataError(f"{source.name}: not a whole tar archive: {error}") from error


def blocks(stream: BufferedIOBase, tell: Callable[[str], None]) -> Iterator[bytes]:
    """Whole lines in blocks, as UTF-8 or in whatever other encoding has ASCII in it; empty for what is no text.

    A line longer than a block is cut there. `tell` gets what went wrong in reading, after which there is no more.
    """
    rest, total = b"", 0
    while True:
        try:
            piece = stream.read1(BLOCK_BYTES)  # of a damaged archive, what comes before the damage
        except _UNPACKING_ERRORS as error:
            tell(str(error) or type(error).__name__)
            piece = b""
        if total == 0 and not (piece := _as_text(piece, stream)):
            return
        total += len(piece)
        if not piece or total > MAX_UNPACKED_BYTES:
            break
        rest += piece
        end = rest.rfind(b"\n") + 1 or (len(rest) if len(rest) >= BLOCK_BYTES else 0)
        if end:
            yield rest[:end]
            rest = rest[end:]
    if total > MAX_UNPACKED_BYTES:
        tell(f"more than {MAX_UNPACKED_BYTES:,} bytes: the rest was not read")
    if rest:
        yield rest


def _as_text(first: bytes, stream: BufferedIOBase) -> bytes:
    """The first block of a stream, UTF-16 turned into UTF-8; empty for what has zero bytes and so is no text."""
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        whole = first + stream.read(MAX_WIDE_BYTES)
        return whole.decode("utf-16", errors="replace").encode("utf-8", errors="replace")
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
