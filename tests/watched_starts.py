"""What this process starts, and whom it connects to, by the audit events of Python. Only `multiprocessing` starts
processes without one."""

import contextlib
import sys
from collections.abc import Iterator

STARTS = frozenset(
    {
        *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"),
        *("os.startfile", "pty.spawn"),
    }
)
_watching: list[list[str]] = []
_hooks: list[bool] = []  # a hook stays as long as the process


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _watching and (event in STARTS or event == "socket.connect"):
        for seen in _watching:
            seen.append(f"{event} {arguments}")


@contextlib.contextmanager
def watched_starts() -> Iterator[list[str]]:
    """The events, as they come."""
    if not _hooks:
        sys.addaudithook(_watch)
        _hooks.append(True)
    seen: list[str] = []
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)
