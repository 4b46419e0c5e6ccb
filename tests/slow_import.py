"""A process that imports a folder slowly enough to be killed: python -m tests.slow_import SOURCE OUT."""

import sys
import time
from pathlib import Path

from ascend_moe_train.checkpoint.convert_import import import_folder


def main() -> None:
    """Imports with a pause at every step."""
    import_folder(
        Path(sys.argv[1]), Path(sys.argv[2]), max_file_bytes=2 * 10**6, progress=lambda done, total: time.sleep(0.02)
    )


if __name__ == "__main__":
    main()
