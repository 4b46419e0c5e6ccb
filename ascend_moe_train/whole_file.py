"""Files that are there whole or not at all. Pure."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, chunks: Iterable[bytes]) -> None:
    """Puts a new file at `path` in one go: a kill at any moment leaves the old or the new one.

    Raises OSError, of that path.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):  # of a read-only file system, where it never was: told above
            aside.unlink(missing_ok=True)


def write_text_whole(path: Path, text: str) -> None:
    """The same for text, as UTF-8; what is none, such as the name of a file, stands there as its escape."""
    write_whole(path, [text.encode(errors="backslashreplace")])
