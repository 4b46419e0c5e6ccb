"""Checks in processes of their own: what crashes or hangs is named, ended, and the checks after it go on. Pure."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascend_moe_train.cluster.mpiexec import python
from ascend_moe_train.selftest.results import Event, Result, merged, one_line, read_events

TICK_S = 0.1
GRACE_S = 5.0  # from SIGTERM to SIGKILL: the launcher ends its ranks meanwhile
MAX_LATE = 3  # after so many time limits the rest of a part is left out
MAX_LOG_BYTES = 2**16
LOG_LINES = 40
WORKER = "ascend_moe_train.selftest.worker"

Show = Callable[[Result], None]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Checks that one kind of process does, in this order. `command` starts it, and is given the folder in which
    `asked.json` says what to do: `options`, and the names of the checks that are left.

    `start_s` is how long it may take to begin the first, `check_s` how long each check may take.
    """

    name: str
    checks: tuple[str, ...]
    command: Callable[[Path], list[str]]
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ranks: int = 1
    start_s: float = 120.0
    check_s: float = 60.0


def worker_command(folder: Path) -> list[str]:
    """A process that does the checks of a folder by itself."""
    return [*python(), "-m", WORKER, str(folder)]


def run_part(part: Part, folder: Path, show: Show) -> list[Result]:
    """The results of all checks of the part, in their order; `show` is called with each when it is known.

    A process that ends, or is over its time, before all are done makes the check at hand a failed one, and the next
    process goes on behind it. Raises KeyboardInterrupt, with no process left.
    """
    left, found, late = list(part.checks), [], 0

    def take(result: Result) -> None:
        found.append(result)
        show(result)

    for number in range(len(part.checks)):
        if not left:
            break
        place = folder / f"{part.name.replace(' ', '_')}.{number}"
        attempt = _Attempt(part, tuple(left), place)
        why, is_late = attempt.run(take)
        late += is_late
        left = left[len(attempt.done) :]
        if attempt.ended_by_failure or (why is None and not left):
            continue
        if not attempt.has_begun or not left:
            # it cannot even start, or fails at its end: another one would do the same
            for name in left or ["end of the process"]:
                take(attempt.culprit(name, why or "the process began nothing"))
            break
        take(attempt.culprit(left.pop(0), why or "the process ended without a result"))
        if late >= MAX_LATE:
            for name in left:
                why = f"left out after {MAX_LATE} checks of this part that did not end in time"
                take(Result(part=part.name, name=name, status="not run", detail=why))
            break
    return found


class _Attempt:
    """One process, or one group of ranks, and what it wrote down."""

    def __init__(self, part: Part, names: tuple[str, ...], folder: Path) -> None:
        self._part, self._names, self._folder = part, names, folder
        self._log = folder / "log.txt"
        self.done: list[Result] = []

    @property
    def ended_by_failure(self) -> bool:
        """Whether ranks ended because a check that all have done failed on one of them: see worker.main."""
        return self._part.ranks > 1 and bool(self.done) and self.done[-1].status == "failed"

    @property
    def has_begun(self) -> bool:
        """Whether any check was begun."""
        return any(self._events())

    def run(self, take: Callable[[Result], None]) -> tuple[str | None, bool]:
        """Until it ends or has to be ended: why that was too early, if it was, and whether it was over its time."""
        self._folder.mkdir(parents=True)
        part = self._part
        limits = {"start_s": part.start_s, "check_s": part.check_s}
        asked = {"part": part.name, "checks": self._names, "ranks": part.ranks, **limits, **part.options}
        (self._folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [
                    *python(),
                    "-m",
                    "ascend_moe_train.cluster.tether",
                    str(os.getpid()),
                    *self._part.command(self._folder),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self._part.environment),
                start_new_session=True,
            )
        try:
            limit_s = self._watch(process, take)
        finally:
            _end(process)
        self._collect(take)
        if limit_s is not None:
            return f"no result within {limit_s:g} s{self._said()}", True
        return (None if process.returncode == 0 else f"{_ending(process.returncode)}{self._said()}"), False

    def _watch(self, process: subprocess.Popen[bytes], take: Callable[[Result], None]) -> float | None:
        """Returns when the process has ended, or with the limit that it is over."""
        seen, since_s = 0, time.monotonic()
        while process.poll() is None:
            time.sleep(TICK_S)
            events = sum(len(each) for each in self._events())
            if events > seen:
                seen, since_s = events, time.monotonic()
                self._collect(take)
            limit_s = self._part.check_s if seen else self._part.start_s
            if time.monotonic() - since_s > limit_s:
                return limit_s
        return None

    def _events(self) -> list[list[Event]]:
        """Of each rank."""
        return [read_events(found_path(self._folder, rank)) for rank in range(self._part.ranks)]

    def _collect(self, take: Callable[[Result], None]) -> None:
        """Takes the checks that all ranks have done, in their order."""
        by_rank = [{each.result.name: each.result for each in events if each.result} for events in self._events()]
        while len(self.done) < len(self._names):
            name = self._names[len(self.done)]
            if not all(name in found for found in by_rank):
                return
            self.done.append(merged([found[name] for found in by_rank]))
            take(self.done[-1])

    def culprit(self, name: str, why: str) -> Result:
        """The check at which it ended: what some ranks say of it, if they do, else why it ended."""
        said = [(rank, each.result) for rank, events in enumerate(self._events()) for each in events if each.result]
        wrong = next((f"rank {rank}: {each.detail}" for rank, each in said if each.name == name and each.detail), None)
        log = "\n".join(self._printed()[-LOG_LINES:])
        return Result(part=self._part.name, name=name, status="failed", detail=one_line(wrong or why), log=log)

    def _printed(self) -> list[str]:
        """The last lines of all of its output."""
        return [line for path in (self._log, *sorted(self._folder.glob("logs/worker_*.log"))) for line in _tail(path)]

    def _said(self) -> str:
        """What of its output tells most."""
        lines = self._printed()
        telling = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "")
        return f": {telling.removeprefix('error: ')}" if telling else ""


def found_path(folder: Path, rank: int) -> Path:
    """Where a rank writes down what it finds."""
    return folder / f"found.{rank}.jsonl"


def _tail(path: Path) -> list[str]:
    """The last lines of a file, but for empty ones."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
        return [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]


def _ending(code: int) -> str:
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its group, whatever state they are in; ranks are tied to their launcher by the kernel."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def asked_of(folder: Path) -> dict[str, Any]:
    """What the process of a folder is to do."""
    asked: dict[str, Any] = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
    return asked


def left_out(part: str, names: Sequence[str], why: str) -> list[Result]:
    """Checks that are not run, and why."""
    return [Result(part=part, name=name, status="not run", detail=one_line(why)) for name in names]
