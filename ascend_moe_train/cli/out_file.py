"""Option --out: what a command prints, written to a file too."""

import os
from pathlib import Path


def check_out(out: Path) -> None:
    """Raises DataError if no file can be put there."""
    from ascend_moe_train.errors import DataError

    if out.is_dir():
        raise DataError(f"--out {out}: is a folder, a file is needed")
    if out.exists() and not out.is_file():
        raise DataError(f"--out {out}: is no regular file, and would be replaced by one")
    if not out.parent.is_dir():
        raise DataError(f"--out {out}: there is no folder {out.parent}")


def write_out(out: Path, text: str) -> None:
    """Puts the file there whole, or not at all. Raises MetricsError."""
    from ascend_moe_train.train.metrics import replace_file

    replace_file(Path(os.path.realpath(out)), [text.encode()])  # a link stays one
