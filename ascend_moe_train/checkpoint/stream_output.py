"""Files written tensor by tensor, in threads, each byte read back; what was finished survives an interruption. Pure.

A `Job` produces some tensors as chunks; the chunks of one tensor come in its order. Every chunk is written to its
place, read back from the file, compared, and hashed. A finished file is made durable and then noted in the journal.
"""

import errno
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.checkpoint.files import naming, open_regular
from ascend_moe_train.checkpoint.layout import FileLayout
from ascend_moe_train.checkpoint.resumable import Journal
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.units import format_bytes

# Pieces that are written, read back and hashed while they are in the CPU's cache.
_PIECE_BYTES = 2**20
# The disk works while others compute, and little is left for it when they are done.
_FLUSHED_AT_ONCE_BYTES = 64 * 2**20
_OTHER_BYTES = "reads back as other bytes than were written"

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


class Digest(Protocol):
    """As those of hashlib."""

    def update(self, data: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class Crc32:
    """CRC-32 with the interface of hashlib: for what is compared and then forgotten."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        """Add data."""
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        """Eight hexadecimal digits."""
        return f"{self._value:08x}"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The next bytes of a tensor: any array laid out by rows."""

    tensor: str
    data: NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Something to do in a thread of its own: it writes all of `tensors`, and nothing else does."""

    tensors: tuple[str, ...]
    chunks: Callable[[], Iterator[Chunk]]


class Stopped(Exception):
    """Ends a thread because another has failed."""


class _File:
    """One file on its way; `pending` tensors are not complete yet."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self.path = path
        self.layout = layout
        self.pending = set(layout.offsets_bytes)
        self.unflushed_bytes = 0
        with naming("write", path):
            flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            self.descriptor = os.open(path, flags, 0o666)
            try:
                if layout.total_bytes:
                    os.posix_fallocate(self.descriptor, 0, layout.total_bytes)
                header = np.frombuffer(layout.header, np.uint8)
                if not _is_written(self.descriptor, header, 0, np.empty_like(header)):
                    raise CheckpointError(f"{path}: header: {_OTHER_BYTES}")
            except BaseException:
                os.close(self.descriptor)
                raise


class Output:
    """The files of a folder that is being filled. Threads may share it; a tensor belongs to one of them."""

    def __init__(
        self,
        journal: Journal,
        files: Mapping[str, FileLayout],
        sizes_bytes: Mapping[str, int],
        digest: Callable[[], Digest],
        progress: Progress,
    ) -> None:
        self._journal, self._files, self._sizes_bytes = journal, files, sizes_bytes
        self._folder = journal.folder
        self._digest, self._progress = digest, progress
        self._file_of = {name: file for file, layout in files.items() for name in layout.offsets_bytes}
        self._number = {file: number for number, file in enumerate(files)}
        self._lock = threading.Lock()
        self._open: dict[str, _File] = {}
        self._written_bytes: dict[str, int] = {}
        self._running: dict[str, Digest] = {}
        self._done_bytes, self._total_bytes = 0, sum(sizes_bytes.values())
        self._stop = threading.Event()
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._flushes: list[Future[None]] = []
        self.digests: dict[str, str] = {}

    def reuse(self) -> int:
        """Takes over the finished files of an earlier run that still hold what its journal says; returns how many."""
        kept = {}
        for file, digests in self._journal.finished.items():
            layout = self._files.get(file)
            if layout is not None and digests.keys() == layout.offsets_bytes.keys() and self._holds(file, digests):
                kept[file] = digests
                self.digests |= digests
                self._advance(sum(self._sizes_bytes[name] for name in digests))
        self._journal.start(kept)
        return len(kept)

    def run(self, jobs: Sequence[Job], workers: int) -> None:
        """Does every job that still has something to write, then all files are complete.

        Raises:
            CheckpointError: what a job raised, a disk that is full, or bytes that read back as others.
        """
        self._check_space()
        todo = [job for job in jobs if not job.tensors or any(name not in self.digests for name in job.tensors)]
        todo.sort(key=self._position)  # file by file, so that what is done when an interruption comes is whole files
        with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
            futures = [pool.submit(self._do, job) for job in todo]
            try:
                done = wait(futures, return_when=FIRST_EXCEPTION).done
                _raise_first([*done, *(flush for flush in self._flushes if flush.done())])
                _raise_first(wait(self._flushes, return_when=FIRST_EXCEPTION).done)
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                self._flusher.shutdown()  # files that are complete are finished even now
                for file in self._open.values():
                    os.close(file.descriptor)
        missing = [name for name in self._sizes_bytes if name not in self.digests]
        if missing:
            raise CheckpointError(f"{self._folder}: tensor {missing[0]!r} was not written")

    def _position(self, job: Job) -> tuple[int, int]:
        """The number of the last file that a job writes to, and its first offset there."""
        places = [(self._number[self._file_of[name]], self._offset(name)) for name in job.tensors]
        last = max((number for number, _ in places), default=len(self._files))
        return last, min((offset for number, offset in places if number == last), default=0)

    def _offset(self, name: str) -> int:
        return self._files[self._file_of[name]].offsets_bytes[name]

    def _check_space(self) -> None:
        with naming("read", self._folder):
            free_bytes = shutil.disk_usage(self._folder).free
        needed_bytes = self._total_bytes - self._done_bytes
        if free_bytes < needed_bytes:
            raise CheckpointError(
                f"{self._folder}: {format_bytes(needed_bytes)} are to be written, {format_bytes(free_bytes)} are free"
            ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _do(self, job: Job) -> None:
        with self._stopping_others():
            for chunk in job.chunks():
                if self._stop.is_set():
                    raise Stopped
                if chunk.tensor not in self.digests:
                    self._write(chunk)
            for name in job.tensors:
                if name not in self.digests:
                    self._complete(name)

    @contextmanager
    def _stopping_others(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._stop.set()
            raise

    def _write(self, chunk: Chunk) -> None:
        name = chunk.tensor
        file = self._opened(self._file_of[name])
        start = self._written_bytes.get(name, 0)
        data = chunk.data.reshape(-1).view(np.uint8)
        if start + data.size > self._sizes_bytes[name]:
            raise CheckpointError(f"{file.path}: tensor {name!r}: more than its {self._sizes_bytes[name]} bytes")
        digest = self._running.setdefault(name, self._digest())
        back = np.empty(min(_PIECE_BYTES, data.size), np.uint8)
        for done in range(0, data.size, _PIECE_BYTES):
            piece = data[done : done + _PIECE_BYTES]
            offset = self._offset(name) + start + done
            found = back[: piece.size]
            with naming("write", file.path):
                is_written = _is_written(file.descriptor, piece, offset, found)
            if not is_written:
                raise CheckpointError(f"{file.path}: tensor {name!r}: {_OTHER_BYTES}")
            digest.update(found.data)
        self._written_bytes[name] = start + data.size
        self._advance(data.size)

    def _complete(self, name: str) -> None:
        written, size = self._written_bytes.get(name, 0), self._sizes_bytes[name]
        file = self._opened(self._file_of[name])
        if written != size:
            raise CheckpointError(f"{file.path}: tensor {name!r}: {written} of {size} bytes were written")
        digest = self._running.pop(name, None) or self._digest()
        with self._lock:
            self.digests[name] = digest.hexdigest()
            file.pending.discard(name)
            file.unflushed_bytes += size
            if not file.pending or file.unflushed_bytes > _FLUSHED_AT_ONCE_BYTES:
                file.unflushed_bytes = 0
                self._flushes.append(self._flusher.submit(self._flush, file, complete=not file.pending))

    def _flush(self, file: _File, *, complete: bool) -> None:
        """In the one thread that waits for the disk, so that those that compute do not."""
        with self._stopping_others():
            with naming("write", file.path):
                os.fsync(file.descriptor)
            if complete:
                with self._lock:
                    del self._open[file.path.name]
                os.close(file.descriptor)
                self._journal.add(file.path.name, {name: self.digests[name] for name in file.layout.offsets_bytes})

    def _holds(self, file: str, digests: Mapping[str, str]) -> bool:
        path, layout = self._folder / file, self._files[file]
        try:
            stream = open_regular(path)
        except CheckpointError:
            return False
        with stream, naming("read", path):
            if os.fstat(stream.fileno()).st_size != layout.total_bytes:
                return False
            if os.pread(stream.fileno(), len(layout.header), 0) != layout.header:
                return False
            return all(
                _hash(stream.fileno(), layout.offsets_bytes[name], self._sizes_bytes[name], self._digest()) == digest
                for name, digest in digests.items()
            )

    def _opened(self, name: str) -> _File:
        with self._lock:
            if name not in self._open:
                self._open[name] = _File(self._folder / name, self._files[name])
            return self._open[name]

    def _advance(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            self._progress(self._done_bytes, self._total_bytes)


def _raise_first(done: Iterable[Future[None]]) -> None:
    """Raises what ended one of the threads, rather than what ended the others because of it."""
    errors = [error for future in done if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error


def _is_written(descriptor: int, data: NDArray[np.uint8], offset_bytes: int, found: NDArray[np.uint8]) -> bool:
    """Writes, reads into `found`, and compares."""
    done = 0
    while done < data.size:
        done += os.pwrite(descriptor, data[done:].data, offset_bytes + done)
    return os.preadv(descriptor, [found.data], offset_bytes) == data.size and np.array_equal(found, data)


def _hash(descriptor: int, offset_bytes: int, size_bytes: int, digest: Digest) -> str:
    buffer = memoryview(bytearray(min(_PIECE_BYTES, size_bytes)))
    done = 0
    while done < size_bytes:
        piece = buffer[: size_bytes - done]
        count = os.preadv(descriptor, [piece], offset_bytes + done)
        if not count:
            return ""
        digest.update(piece[:count])
        done += count
    return digest.hexdigest()
