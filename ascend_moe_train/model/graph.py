"""A graph of a step, as it is compiled."""

from typing import Any, NamedTuple


class Graph(NamedTuple):
    """A cell that is compiled for `arguments`, and run `calls` times a step. `given` names a graph whose outputs, but
    for the first, come behind the arguments."""

    name: str
    cell: Any
    arguments: tuple[Any, ...]
    calls: int
    given: str | None = None
