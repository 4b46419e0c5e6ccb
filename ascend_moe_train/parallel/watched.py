"""A `Comm` that says what it is doing, and errors that say where they happened.

Pure.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ascend_moe_train.parallel.comm import Comm, CommError, Group, ObservedComm


class CollectiveError(CommError):
    """What one collective raised, as its cause: `verb`, the group's name, this process's rank."""

    def __init__(self, verb: str, group: Group, rank: int, error: Exception) -> None:
        where, why = f"{verb} in {group.name!r}", str(error) or type(error).__name__
        super().__init__(f"rank {rank}: {why if where in why else f'{where} failed: {why}'}")
        self.verb, self.group_name, self.rank = verb, group.name, rank


@contextmanager
def named_errors(verb: str, group: Group, rank: int) -> Iterator[None]:
    """Turns what is raised inside into a CollectiveError; one that is one already passes."""
    try:
        yield
    except CollectiveError:
        raise
    except Exception as error:
        raise CollectiveError(verb, group, rank, error) from error


class OnCall(Protocol):
    """Told before a collective (`done` False) and after it. It runs inside the step: it must be quick and not raise."""

    def __call__(self, verb: str, group_name: str, number: int, done: bool) -> None:
        """`number` counts this process's collectives from 0."""


class WatchedComm(ObservedComm):
    """Tells `on_call` of every collective. What fails raises CollectiveError, and is not told as done."""

    def __init__(self, inner: Comm, on_call: OnCall) -> None:
        super().__init__(inner)
        self._on_call = on_call
        self._number = 0

    def _observe(self, verb: str, group: Group, payload: int, call: Callable[[], Any]) -> Any:
        number = self._number
        self._number += 1
        self._on_call(verb, group.name, number, False)
        with named_errors(verb, group, self.rank):
            result = call()
        self._on_call(verb, group.name, number, True)
        return result
