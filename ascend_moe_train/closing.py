"""What is closed at the end of a `with`. Pure."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Gives itself to a `with`, which closes it however it ends."""

    @abstractmethod
    def close(self) -> None:
        """Ends the use of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
