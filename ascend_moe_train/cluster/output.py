"""What ranks print: cut into lines, shown under the rank's number, kept in a file per rank. Pure."""

import re
import sys
from pathlib import Path
from typing import BinaryIO, Protocol

START_LINE = "--- start "  # before the name of a start, in each log
MAX_LINE_BYTES = 4 * 2**20  # what is longer is cut, so that a rank that never ends its line fills no memory

_STEERING = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Screen(Protocol):
    """Where the lines of all ranks come together. It may raise OSError when nobody looks at it any more."""

    def line(self, rank: int, text: str, *, is_error: bool) -> None:
        """One line of a rank's standard output or standard error, without its end."""


class PlainScreen:
    """Rank 0 as it is, the others' lines with their number on standard error."""

    def line(self, rank: int, text: str, *, is_error: bool) -> None:
        """Prints one line."""
        if rank == 0:
            print(text, file=sys.stderr if is_error else sys.stdout, flush=True)
        else:
            print(labelled(rank, text), file=sys.stderr, flush=True)


class NoScreen:
    """For when nobody looks."""

    def line(self, rank: int, text: str, *, is_error: bool) -> None:
        """Nothing."""


class LineCutter:
    """Bytes of one stream as they come, to lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[str]:
        """The lines that are whole with this piece."""
        first, *others = piece.split(b"\n")
        self._rest += first
        if not others:
            return self.finish() if len(self._rest) > MAX_LINE_BYTES else []
        lines = [bytes(self._rest), *others[:-1]]
        self._rest = bytearray(others[-1])
        return [_text(line) for line in lines]

    def finish(self) -> list[str]:
        """What has come of a line whose end has not."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [_text(rest)] if rest else []


class RankLogs:
    """A file `rank-00003.log` per rank that prints anything, added to at each start.

    A folder that cannot be written to is said once, in `problem`, and stops nothing.
    """

    def __init__(self, folder: Path | None, run_id: str) -> None:
        self._folder, self._run_id = folder, run_id
        self._files: dict[int, BinaryIO] = {}
        self.problem: str | None = None

    def line(self, rank: int, text: str) -> None:
        """Keeps a line."""
        if self._folder is None or self.problem is not None:
            return
        try:
            if rank not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._files[rank] = (self._folder / log_name(rank)).open("ab", buffering=0)
                self._files[rank].write(f"{START_LINE}{self._run_id}\n".encode())
            self._files[rank].write(f"{text}\n".encode())
        except OSError as error:
            self.problem = f"{self._folder}: what ranks print is not kept: {error.strerror}"

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()


def log_name(rank: int) -> str:
    """The name of a rank's log."""
    return f"rank-{rank:05d}.log"


def labelled(rank: int, text: str) -> str:
    """A line under the number of its rank."""
    return f"[rank {rank}] {text}"


def unsteered(text: str) -> str:
    """A line without what could steer a terminal."""
    return _STEERING.sub("", text)


def _text(line: bytes) -> str:
    """A line without what could steer a terminal; of a line that was written over itself, the last version."""
    return unsteered(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))
