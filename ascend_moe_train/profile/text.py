"""Files of profilers as rows and values, each mistake told with file, row and column. Pure.

Files may be gzipped, lines may end in CR LF, cells carry tabs, and rows may be short; see docs/profile.md.
"""

import csv
import io
import math
import zlib
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import BinaryIO

from ascend_moe_train.errors import ProfileError
from ascend_moe_train.unpacked import unpacked_file

MISSING = frozenset({"", "N/A", "NA", "None", "nan", "-"})
MAX_LINE_CHARS = 2**24  # of hccl_raw, whose cells hold all operators of a step
MAX_JSON_BYTES = 2**29
MAX_CELL_CHARS = 2**24
MAX_US = 1e13  # 116 days: beyond, a duration is no duration
_MAX_NS = 2**62


def open_bytes(path: Path) -> BinaryIO:
    """The file's content, unpacked if its name ends in .gz. Raises ProfileError: a pipe, which might never end. Reading
    raises OSError where more comes out of a packed file than is read of its size."""
    if path.exists() and not path.is_file():
        raise ProfileError(f"{path}: is no regular file")
    return unpacked_file(path) if path.suffix == ".gz" else path.open("rb")


def read_json(path: Path) -> object:
    """Raises ProfileError with the row and column of what is no JSON, and for files too large to hold."""
    import orjson

    try:
        with open_bytes(path) as stream:
            content = stream.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise ProfileError(f"{path}: is larger than {MAX_JSON_BYTES} bytes, which no such file is")
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ProfileError(f"{path}: row {error.lineno}, column {error.colno}: {error.msg}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ProfileError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except RecursionError:
        raise ProfileError(f"{path}: row 1, column 1: is nested too deeply") from None


def number(text: str, path: Path, row: int, column: str, *, most: float = MAX_US) -> float | None:
    """A cell as a number that is finite and not negative; None for a missing one. Raises ProfileError."""
    text = text.strip()
    if text in MISSING:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise bad_cell(path, row, column, text)
    return value


def bad_cell(path: Path, row: int, column: str, text: str) -> ProfileError:
    """What to raise for a cell that is no number, or one that cannot be."""
    return ProfileError(f"{path}: row {row}, column {column!r}: {text[:60]!r} is no possible number")


def stamp_ns(text: str, path: Path, row: int, column: str) -> int:
    """A time stamp in microseconds as whole nanoseconds. Raises ProfileError."""
    whole, _, part = text.strip().partition(".")
    if whole.isdecimal() and (not part or part.isdecimal()) and len(whole) < 19:
        value = int(whole) * 1000 + int((part + "000")[:3])
    else:
        try:
            value = int(Decimal(text.strip()) * 1000)
        except (InvalidOperation, ValueError, OverflowError):
            raise bad_cell(path, row, column, text) from None
    if not 0 <= value < _MAX_NS:
        raise bad_cell(path, row, column, text)
    return value


class Sheet:
    """A table of a .csv file. Columns are found by any of their names, since names move with versions.

    Raises ProfileError for what is no text or has no header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", errors="replace", newline="")
        self._reader = csv.reader(self._lines())
        csv.field_size_limit(MAX_CELL_CHARS)
        header = next(self._raw(), None)
        if header is None:
            self._stream.close()
            raise ProfileError(f"{path}: is empty: row 1 should name the columns")
        self.columns = {name.strip(): place for place, name in enumerate(header)}
        self._width = len(header)

    def find(self, *names: str) -> int | None:
        """The place of the first of these columns that there is."""
        return next((self.columns[name] for name in names if name in self.columns), None)

    def need(self, *names: str) -> int:
        """Like `find`. Raises ProfileError without any of them."""
        place = self.find(*names)
        if place is None:
            self._stream.close()
            have = ", ".join(self.columns)
            raise ProfileError(f"{self.path}: row 1 has no column {names[0]!r}, but {have[:120]!r}")
        return place

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Row number (the header is 1) and cells; a row that is short is filled up with empty cells."""
        width = self._width
        try:
            for number_, cells in enumerate(self._raw(), 2):
                if not cells:
                    continue
                if len(cells) < width:
                    cells += [""] * (width - len(cells))
                yield number_, cells
        finally:
            self._stream.close()

    def number(self, cells: list[str], row: int, place: int | None, name: str) -> float | None:
        """A cell's number; None for a missing cell or column."""
        return None if place is None else number(cells[place], self.path, row, name)

    def _raw(self) -> Iterator[list[str]]:
        try:
            yield from self._reader
        except csv.Error as error:
            raise ProfileError(f"{self.path}: row {self._reader.line_num}, column 1: {error}") from None
        except (OSError, EOFError, zlib.error) as error:
            what = getattr(error, "strerror", None) or error
            raise ProfileError(f"{self.path}: row {self._reader.line_num + 1}, column 1: {what}") from None

    def _lines(self) -> Iterator[str]:
        """Lines of bounded length, so that a file without line ends cannot fill the memory."""
        while line := self._stream.readline(MAX_LINE_CHARS):
            if len(line) == MAX_LINE_CHARS:
                raise csv.Error(f"a line of more than {MAX_LINE_CHARS} characters")
            yield line
