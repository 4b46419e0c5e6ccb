"""A process that measures when it is told to, and sleeps until then. Peers use this too: standard library only.

An order and its reply are one line of JSON each, over a Unix socket.
"""

import json
import socket
from collections.abc import Callable
from typing import Any

Order = dict[str, Any]
Reply = dict[str, Any]


def serve(path: str, rank: int, facts: Reply, obey: Callable[[Order], Reply]) -> None:
    """Says who this is, then replies to orders until the other side goes away."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw", encoding="utf-8") as lines:
            _say(lines, {"rank": rank, **facts})
            for line in lines:
                _say(lines, obey(json.loads(line)))


def _say(lines: Any, reply: Reply) -> None:
    lines.write(json.dumps(reply) + "\n")
    lines.flush()
