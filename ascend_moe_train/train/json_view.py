"""What a run prints for machines: one JSON line per record on stdout, remarks on stderr. Pure."""

import sys
from types import TracebackType
from typing import Self

from ascend_moe_train.train.metrics import Record, to_json_line


class JsonView:
    """Stands where `LiveView` stands with `--json`."""

    def show(self, record: Record) -> None:
        """Prints one record."""
        sys.stdout.write(to_json_line(record).decode())
        sys.stdout.flush()

    def note(self, message: str) -> None:
        """Prints a remark to stderr."""
        print(message, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
