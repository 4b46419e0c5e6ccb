"""What was read of large ranks, kept by content, so that the second look takes no time. Pure."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_moe_train.profile.find import Source
from ascend_moe_train.profile.read import read_rank
from ascend_moe_train.profile.tables import Rank

if TYPE_CHECKING:
    from pydantic import TypeAdapter

KEPT_FROM_BYTES = 2**24
ENDS_BYTES = 2**16
HERE = Path(__file__).parent


def read_kept(source: Source, cache: Path | None) -> Rank:
    """`read_rank`, or what it gave before for files of the same names, sizes, times of change, beginnings and ends."""
    if cache is None or sum(path.stat().st_size for path in source.paths()) < KEPT_FROM_BYTES:
        return read_rank(source)
    path = cache / f"{_key(source)}.json"
    if (kept := _load(path)) is not None:
        return kept
    rank = read_rank(source)
    _store(path, rank)
    return rank


def _key(source: Source) -> str:
    """Changes with the files, and with the code that reads them."""
    digest = hashlib.sha256(f"{source.rank} {source.writer} {source.device} {_code()}".encode())
    for path in sorted(source.paths()):
        status = path.stat()
        digest.update(f"\n{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(ENDS_BYTES))
            stream.seek(max(0, status.st_size - ENDS_BYTES))
            digest.update(stream.read(ENDS_BYTES))
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _code() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(HERE.glob("*.py")))).hexdigest()


@lru_cache(maxsize=1)
def _adapter() -> "TypeAdapter[Rank]":
    from pydantic import TypeAdapter

    return TypeAdapter(Rank)


def _load(path: Path) -> Rank | None:
    """None for what is not there, or is no rank."""
    try:
        return _adapter().validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def _store(path: Path, rank: Rank) -> None:
    """A cache that cannot be written is none."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(_adapter().dump_json(rank))
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
