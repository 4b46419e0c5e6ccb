"""What a run prints for machines: one JSON line per record on stdout, remarks on stderr. Pure."""

import sys

from ascend_moe_train.train.metrics import Record, to_json_line
from ascend_moe_train.train.view import Silent


class JsonView(Silent):
    """Stands where `LiveView` stands with `--json`."""

    def show(self, record: Record) -> None:
        """Prints one record."""
        sys.stdout.write(to_json_line(record).decode())
        sys.stdout.flush()

    def note(self, message: str) -> None:
        """Prints a remark to stderr."""
        print(message, file=sys.stderr, flush=True)
