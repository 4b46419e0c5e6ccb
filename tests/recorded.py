"""A stand-in for a package that records calls instead of making them, and takes only such as the installed one has."""

import inspect
from typing import Any

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Recorded:
    """What is below `real`, by the same names. A name that is not there is an AttributeError, arguments that the
    function does not take are a TypeError."""

    def __init__(self, real: Any, calls: list[Call], name: str = "") -> None:
        self._real, self._calls, self._name = real, calls, name

    def __getattr__(self, name: str) -> "Recorded":
        return Recorded(getattr(self._real, name), self._calls, f"{self._name}.{name}".lstrip("."))

    def __call__(self, *arguments: Any, **named: Any) -> None:
        inspect.signature(self._real).bind(*arguments, **named)
        self._calls.append((self._name, arguments, named))
