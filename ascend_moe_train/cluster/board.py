"""The status board: one slot of shared memory per rank that says where the rank is. Pure.

A rank writes its own slot at every collective and change of phase; the launcher reads all of them. Nobody waits: what
is written carries a checksum, and a reader that meets a half-written slot reads again. (A sequence lock would need
memory barriers on ARM, which Python does not have.) All integers are little-endian.
"""

import mmap
import os
import stat
import struct
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, get_args

from ascend_moe_train.errors import ConfigError

Phase = Literal["starting", "compile", "step", "evaluating", "saving", "done"]
PHASES: tuple[Phase, ...] = get_args(Phase)

MAX_SLOTS = 2**16
_MAGIC = b"AMTBOARD"
_VERSION = 1
_HEADER = struct.Struct("<8sII")  # magic, version, number of slots
_HEADER_BYTES = 64
_SLOT_BYTES = 1024
_CHECKSUM = struct.Struct("<I")
_STATE = struct.Struct("<QQQQIB32s64s")  # updates, time, step, sequence number, pid, phase, verb, group
_FAILURE = struct.Struct("<Q?H480s")  # time, whether a user's mistake, bytes of the line, the line
_FAILURE_OFFSET = 512
_READS = 4
_MAX_NUMBER = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank gave up, as it says itself; `at_s` is by the system's monotonic clock."""

    line: str
    is_user_error: bool
    at_s: float


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a rank is. Outside collectives `verb` and `group` are empty. Times are by the system's monotonic clock.

    `updates` counts what the rank has written; `sequence` is the number of its newest collective.
    """

    pid: int
    phase: Phase
    step: int
    verb: str
    group: str
    sequence: int
    entered_s: float
    updates: int
    failure: Failure | None


class Slot:
    """A rank's own slot, to write. Nobody waits for a reader; several threads may make updates."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self._memory = memory
        self._offset = _slot_offset(rank)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._updates = 0
        self._phase, self._step = 0, 0
        self._verb, self._group, self._sequence = b"", b"", 0
        self._write_state()

    @classmethod
    def open(cls, path: Path, rank: int) -> Self:
        """The slot of a rank. Raises ConfigError: no board there, or none with that rank."""
        memory, slots = _map(path)
        if not 0 <= rank < slots:
            raise ConfigError(f"{path}: is a board of ranks 0 to {slots - 1}, there is no rank {rank}")
        return cls(memory, rank)

    def phase(self, name: Phase, step: int | None = None) -> None:
        """The rank begins something; `step` counts from 1, is 0 before the first, and stays as it is if None."""
        with self._lock:
            self._phase = PHASES.index(name)
            self._step = self._step if step is None else step
            self._write_state()

    def enter(self, verb: str, group: str, sequence: int) -> None:
        """The rank comes to a collective, where it may have to wait."""
        with self._lock:
            self._verb, self._group, self._sequence = verb.encode(), group.encode(), sequence
            self._write_state()

    def leave(self) -> None:
        """The rank has left the collective."""
        with self._lock:
            self._verb = self._group = b""
            self._write_state()

    def fail(self, line: str, *, is_user_error: bool) -> None:
        """The rank gives up. The first failure stays: what follows from it says less."""
        with self._lock:
            start = self._offset + _FAILURE_OFFSET
            if any(self._memory[start : start + _CHECKSUM.size]):
                return
            text = " ".join(line.split()).encode(errors="replace")[:480]
            self._put(start, _FAILURE.pack(time.monotonic_ns(), is_user_error, len(text), text))
            self._write_state()

    def _write_state(self) -> None:
        self._updates += 1
        state = _STATE.pack(
            self._updates,
            time.monotonic_ns(),
            self._step,
            self._sequence,
            self._pid,
            self._phase,
            self._verb,
            self._group,
        )
        self._put(self._offset, state)

    def _put(self, start: int, record: bytes) -> None:
        self._memory[start : start + _CHECKSUM.size + len(record)] = _CHECKSUM.pack(zlib.crc32(record)) + record


class Board:
    """All slots, to read. What is in them is checked, as anything may write there."""

    def __init__(self, memory: mmap.mmap, slots: int) -> None:
        self._memory = memory
        self._known: list[Status | None] = [None] * slots

    @classmethod
    def create(cls, path: Path, slots: int) -> Self:
        """Makes the file `path` a board without entries. Raises OSError."""
        assert 0 < slots <= MAX_SLOTS
        with path.open("wb") as file:
            file.truncate(_HEADER_BYTES + slots * _SLOT_BYTES)
            file.write(_HEADER.pack(_MAGIC, _VERSION, slots))
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens a board. Raises ConfigError: there is none."""
        return cls(*_map(path))

    def read(self) -> tuple[Status | None, ...]:
        """Where every rank is; None for one that has not written anything sensible yet.

        A slot that cannot be read (its writer was killed while writing, say) stands for what it said before.
        """
        return tuple(self.read_one(rank) for rank in range(len(self._known)))

    def read_one(self, rank: int) -> Status | None:
        """Where one rank is."""
        self._known[rank] = self._read(rank) or self._known[rank]
        return self._known[rank]

    def _read(self, rank: int) -> Status | None:
        for _ in range(_READS):
            state = self._get(_slot_offset(rank), _STATE)
            if state is not None:
                return _status(state, self._get(_slot_offset(rank) + _FAILURE_OFFSET, _FAILURE))
        return None

    def _get(self, start: int, layout: struct.Struct) -> bytes | None:
        """A record whose checksum is right, or None."""
        whole = self._memory[start : start + _CHECKSUM.size + layout.size]
        record = whole[_CHECKSUM.size :]
        return record if _CHECKSUM.unpack_from(whole)[0] == zlib.crc32(record) else None


def _slot_offset(rank: int) -> int:
    return _HEADER_BYTES + rank * _SLOT_BYTES


def _status(state: bytes, failed: bytes | None) -> Status | None:
    updates, entered_ns, step, sequence, pid, phase, verb, group = _STATE.unpack(state)
    if phase >= len(PHASES) or not pid or max(updates, entered_ns, step, sequence) > _MAX_NUMBER:
        return None
    failure = None
    if failed is not None:
        at_ns, is_user_error, num_bytes, line = _FAILURE.unpack(failed)
        failure = Failure(line=_text(line[:num_bytes]), is_user_error=is_user_error, at_s=at_ns / 1e9)
    return Status(
        pid=pid,
        phase=PHASES[phase],
        step=step,
        verb=_text(verb.rstrip(b"\0")),
        group=_text(group.rstrip(b"\0")),
        sequence=sequence,
        entered_s=entered_ns / 1e9,
        updates=updates,
        failure=failure,
    )


def _text(raw: bytes) -> str:
    """What was written, without what could steer a terminal."""
    text = raw.decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _map(path: Path) -> tuple[mmap.mmap, int]:
    """The memory of a board and its number of slots."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path}: no status board of a launcher: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size < _HEADER_BYTES:
            raise ConfigError(f"{path}: is no status board of a launcher")
        memory = mmap.mmap(descriptor, found.st_size)
    finally:
        os.close(descriptor)
    magic, version, slots = _HEADER.unpack_from(memory)
    if (magic, version) != (_MAGIC, _VERSION) or not 0 < slots <= MAX_SLOTS:
        raise ConfigError(f"{path}: is no status board of a launcher")
    if len(memory) != _HEADER_BYTES + slots * _SLOT_BYTES:
        raise ConfigError(f"{path}: is no status board of {slots} ranks: it has {len(memory)} bytes")
    return memory, slots
