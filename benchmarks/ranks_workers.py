"""Processes that stay for a whole benchmark, compiled and warm, so that what is compared can take turns every second.

Those whose turn it is not sleep. Ours are ranks under the project's launcher, a peer's are plain processes.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

from benchmarks.ranks_orders import Order, Reply

ROOT = Path(__file__).parents[1]
LEAVE_S = 20.0
MAX_OUTPUT_CHARS = 4000


class Workers:
    """`count` processes that `commands` start, each with the path of a socket as its last argument.

    For use in a `with`; at its end no process is left. What they print is shown if one fails.
    """

    def __init__(self, name: str, count: int, commands: Sequence[Sequence[str]], timeout_s: float) -> None:
        self.name, self.count, self.timeout_s = name, count, timeout_s
        self.facts: list[Reply] = []
        self._commands = commands
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        self._output = Path(self._folder.name) / "output"
        self._listener = socket.socket(socket.AF_UNIX)
        self._lines: list[Any] = []

    def __enter__(self) -> Self:
        path = f"{self._folder.name}/orders"
        self._listener.bind(path)
        self._listener.listen(self.count)
        # numbers of threads are the benchmark's, not the user's
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_NUM", "MKL_NUM"))}
        try:
            with self._output.open("wb") as output:
                for command in self._commands:
                    process = subprocess.Popen(
                        [*command, path],
                        cwd=ROOT,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                    self._processes.append(process)
            self._meet()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, order: Order) -> list[Reply]:
        """Gives all of them an order at once; their replies by rank. SystemExit: one failed or is too late."""
        try:
            for lines in self._lines:
                lines.write(json.dumps(order) + "\n")
                lines.flush()
            return [json.loads(lines.readline() or self._fail(f"{order}: a process is gone")) for lines in self._lines]
        except (TimeoutError, OSError) as error:
            self._fail(f"{order}: {error}")

    def close(self) -> None:
        """Lets them end, and sees to it that they do."""
        for lines in self._lines:
            with contextlib.suppress(OSError):  # it has gone already
                lines.close()
        self._listener.close()
        self._wait(LEAVE_S if self._lines else 0.0)
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in self._processes:
                end(process)
            self._wait(LEAVE_S)
        self._folder.cleanup()

    def _wait(self, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))

    def _meet(self) -> None:
        """Accepts every process, in whatever order they come."""
        found: list[tuple[Reply, Any]] = []
        deadline_s = time.monotonic() + self.timeout_s
        self._listener.settimeout(0.5)
        while len(found) < self.count:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline_s or any(process.poll() is not None for process in self._processes):
                    self._fail("did not start")
                continue
            connection.settimeout(self.timeout_s)
            lines = connection.makefile("rw", encoding="utf-8")
            connection.close()  # the lines keep it open
            self._lines.append(lines)
            found.append((json.loads(lines.readline() or self._fail("did not start")), lines))
        found.sort(key=lambda each: each[0]["rank"])
        self.facts, self._lines = [facts for facts, _ in found], [lines for _, lines in found]

    def _fail(self, what: str) -> NoReturn:
        said = self._output.read_text(errors="replace").strip()[-MAX_OUTPUT_CHARS:]
        raise SystemExit(f"{self.name}: {what}\n{said}")


def ranks_of(name: str, count: int, module: str, timeout_s: float) -> Workers:
    """Ranks of this project, as `amt launch` starts them: each with its share of the cores as OpenMP threads."""
    return Workers(name, count, [[sys.executable, "-m", "benchmarks.ranks_launch", str(count), module]], timeout_s)


def peers_of(name: str, count: int, module: str, timeout_s: float) -> Workers:
    """Processes in the environment of PEER_PYTHON. Each gets its rank, the number of all, and a path of its team."""
    python = os.environ.get("PEER_PYTHON", ".venv-peer/bin/python")
    if shutil.which(python) is None:
        raise SystemExit(f"PEER_PYTHON {python}: not there; `make bench` makes it")
    commands = [[python, "-m", module, str(rank), str(count)] for rank in range(count)]
    return Workers(name, count, commands, timeout_s)
