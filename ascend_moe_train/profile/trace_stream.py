"""Events of a Chrome trace, one after the other, in bounded memory however large the file is. Pure."""

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ascend_moe_train.errors import ProfileError
from ascend_moe_train.profile.text import open_bytes

CHUNK_BYTES = 2**22
MAX_EVENT_BYTES = 2**25
MAX_TRIES = 64
_BETWEEN = re.compile(rb"\}\s*,(?=\s*\{)")
_OPENING = re.compile(rb'\s*(?:\{.*?"traceEvents"\s*:\s*)?\[', re.DOTALL)


def events(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of the list, or of the list "traceEvents".

    The file is cut between two objects. Whether a cut is between objects, and not inside a text or a nested list, is
    found by parsing what is before it: that is a sequence of whole values only if the cut is. Raises ProfileError with
    the byte from which on the file is no list of objects.
    """
    import orjson

    try:
        with open_bytes(path) as stream:
            rest = stream.read(CHUNK_BYTES)
            opening = _OPENING.match(rest.removeprefix(b"\xef\xbb\xbf"))
            if opening is None:
                raise ProfileError(f"{path}: row 1, column 1: is no list of trace events")
            rest = rest.removeprefix(b"\xef\xbb\xbf")[opening.end() :]
            place, is_last = opening.end(), False
            while not is_last:
                more = stream.read(CHUNK_BYTES)
                rest, is_last = rest + more, not more
                end, found = _whole(rest, is_last)
                if end is None and (is_last or len(rest) > MAX_EVENT_BYTES):
                    raise ProfileError(f"{path}: byte {place}: from here on it is no list of trace events")
                for event in found:
                    if isinstance(event, dict):
                        yield event
                place += end or 0
                rest = rest[end or 0 :]
    except (OSError, EOFError, zlib.error) as error:
        raise ProfileError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except orjson.JSONDecodeError as error:
        raise ProfileError(f"{path}: {error.msg}") from None


def _whole(data: bytes, is_last: bool) -> tuple[int | None, list[Any]]:
    """How many bytes are whole events with the comma behind them, and these; None when none are found."""
    import orjson

    if is_last:
        closing = data.rfind(b"]")
        for inner in (data[:closing] if closing >= 0 else data, data):
            try:
                return len(data), orjson.loads(b"[" + inner.rstrip().removesuffix(b",") + b"]")
            except orjson.JSONDecodeError:
                continue
        return None, []
    place = len(data)
    for _ in range(MAX_TRIES):
        place = data.rfind(b"}", 0, place)
        if place < 0:
            return None, []
        between = _BETWEEN.match(data, place)
        if between is None:
            continue
        try:
            return between.end(), orjson.loads(b"[" + data[: place + 1] + b"]")
        except orjson.JSONDecodeError:
            continue
    return None, []
