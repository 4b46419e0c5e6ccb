"""Options such as --out: what a command makes, written to a file."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def check_out(out: Path, option: str = "--out") -> None:
    """Raises DataError if no file can be put there."""
    from ascend_moe_train.errors import DataError

    if out.is_dir():
        raise DataError(f"{option} {out}: is a folder, a file is needed")
    if out.exists() and not out.is_file():
        raise DataError(f"{option} {out}: is no regular file, and would be replaced by one")
    if not out.parent.is_dir():
        raise DataError(f"{option} {out}: there is no folder {out.parent}")


def check_outs(outs: Mapping[str, Path | None], read: Iterable[Path | None] = ()) -> None:
    """Checks the files of several options, None for those that are not given.

    Raises DataError: as `check_out`, two that are the same file, or one that is among those that are read.
    """
    from ascend_moe_train.errors import DataError

    seen: dict[str, str] = {}
    inputs = {os.path.realpath(path) for path in read if path is not None}
    for option, out in outs.items():
        if out is None:
            continue
        check_out(out, option)
        place = os.path.realpath(out)
        if place in inputs:
            raise DataError(f"{option} {out}: is read by this command, and would be replaced")
        if (other := seen.setdefault(place, option)) is not option:
            raise DataError(f"{option} {out}: is the file of {other} as well")


def write_out(out: Path, text: str) -> None:
    """Puts the file there whole, or not at all. Raises OSError."""
    from ascend_moe_train.whole_file import write_text_whole

    write_text_whole(Path(os.path.realpath(out)), text)  # a link stays one
