"""Packed files, read only as far as their size makes likely: a few megabytes may hold as many gigabytes. Pure."""

import gzip
import io
from pathlib import Path
from typing import Any, BinaryIO

MAX_RATIO = 200  # logs and profiles are a tenth to a fiftieth when packed; gzip can say a thousandth
ALWAYS_BYTES = 64 * 2**20  # which takes no time, however little it was packed into


class TooMuch(OSError):
    """More came out of a packed file than may."""


class Allowance:
    """How much may still come out of a packed file."""

    def __init__(self, packed_bytes: int) -> None:
        """Of all that is in a file of so many bytes."""
        self._packed_bytes = packed_bytes
        self.most_bytes = max(ALWAYS_BYTES, MAX_RATIO * packed_bytes)
        self._left_bytes = self.most_bytes

    def take(self, num_bytes: int) -> None:
        """Counts bytes that came out. Raises TooMuch."""
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise TooMuch(self.refusal)

    @property
    def refusal(self) -> str:
        """What to say of a file that is not read any further, without its name."""
        return (
            f"unpacks to more than {self.most_bytes:,} bytes, the most that is read of {self._packed_bytes:,} packed "
            "ones: if it is to be trusted, unpack it and name what came out"
        )


def unpacked(packed: BinaryIO, allowance: Allowance) -> io.BufferedReader:
    """The content of a gzip file. Reading raises TooMuch, and what `gzip` raises for damaged files."""
    return io.BufferedReader(_Counted(gzip.GzipFile(fileobj=packed), allowance))


def unpacked_file(path: Path) -> io.BufferedReader:
    """The same of a file, which is closed with it. Raises OSError."""
    return io.BufferedReader(_Counted(gzip.GzipFile(path), Allowance(path.stat().st_size)))


class _Counted(io.RawIOBase):
    """A stream whose bytes are counted as they come."""

    def __init__(self, stream: gzip.GzipFile, allowance: Allowance) -> None:
        self._stream, self._allowance = stream, allowance

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises TooMuch."""
        count = self._stream.readinto1(buffer)
        self._allowance.take(count)
        return count

    def close(self) -> None:
        """Closes the stream too."""
        self._stream.close()
        super().close()
