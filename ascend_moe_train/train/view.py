"""What a run tells its user through. Pure."""

from types import TracebackType
from typing import Protocol, Self

from ascend_moe_train.train.metrics import Record


class View(Protocol):
    """`LiveView` for people, `JsonView` for machines."""

    def show(self, record: Record) -> None:
        """Takes in the record of one step or evaluation."""

    def note(self, message: str) -> None:
        """Takes in whatever else has to be said, in one line."""


class Silent:
    """The view of every rank but the first."""

    def show(self, record: Record) -> None:
        """Nothing."""

    def note(self, message: str) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
