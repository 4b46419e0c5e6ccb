"""What a run tells its user through. Pure."""

from typing import Protocol

from ascend_moe_train.train.metrics import Record


class View(Protocol):
    """`LiveView` for people, `JsonView` for machines."""

    def show(self, record: Record) -> None:
        """Takes in the record of one step or evaluation."""

    def note(self, message: str) -> None:
        """Takes in whatever else has to be said, in one line."""
