"""What a check found, how it is written down while checks go on, and what it amounts to. Pure."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

Status = Literal["passed", "failed", "not run"]
Figures = dict[str, float | str | None]
MAX_DETAIL_CHARS = 600
MAX_FILE_BYTES = 2**24


class NotPossibleError(Exception):
    """A check that cannot be done on this machine; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check saw: `problems` is empty when all is right; `figures` are measured, with units in their names."""

    problems: Sequence[str] = ()
    figures: Figures = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A check, done or not. `detail` says in one line what was wrong, or why it was not run; `log` is the last that a
    process printed that ended in it."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    part: str
    name: str
    status: Status
    detail: str = ""
    figures: Figures = field(default_factory=dict)
    took_s: float = 0.0
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of what a process writes down: the check that it begins, or a result."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    begun: str | None = None
    result: Result | None = None


_EVENT = TypeAdapter(Event)


class Notes:
    """Appends to a file what is begun and what was found, so that a crash loses nothing that came before."""

    def __init__(self, path: Path, part: str) -> None:
        self._path, self._part = path, part

    def check(self, name: str, look: Callable[[], Finding]) -> Result:
        """Does one check. Whatever it raises makes it a failed one, but for NotPossibleError."""
        self._write(Event(begun=name))
        start_s = time.perf_counter()
        status: Status
        figures: Figures = {}
        try:
            found = look()
            status, detail, figures = "failed" if found.problems else "passed", summary(found.problems), found.figures
        except NotPossibleError as error:
            status, detail = "not run", str(error)
        except Exception as error:  # a wrong operator may raise anything, and the other checks go on
            status, detail = "failed", f"{type(error).__name__}: {error}"
        took_s = time.perf_counter() - start_s
        shown = one_line(detail)
        result = Result(part=self._part, name=name, status=status, detail=shown, figures=figures, took_s=took_s)
        self._write(Event(result=result))
        return result

    def _write(self, event: Event) -> None:
        with self._path.open("ab") as file:
            file.write(_EVENT.dump_json(event) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def read_events(path: Path) -> list[Event]:
    """What is in such a file by now; a line that is not whole yet, or is none of ours, is left out."""
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_FILE_BYTES).splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(_EVENT.validate_json(line))
        except ValidationError:
            continue
    return found


def summary(problems: Sequence[str]) -> str:
    """The first problem, and how many more there are."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}" if problems else ""


def one_line(text: str) -> str:
    """Text of any origin as one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_DETAIL_CHARS else line[: MAX_DETAIL_CHARS - 2] + " …"


def merged(results: Sequence[Result]) -> Result:
    """One check as all ranks found it: failed if it failed on any, with the figures of the first rank."""
    first = results[0]
    for status in ("failed", "not run"):
        hit = next(((rank, each) for rank, each in enumerate(results) if each.status == status), None)
        if hit is not None:
            rank, each = hit
            detail = each.detail if len(results) == 1 or status == "not run" else f"rank {rank}: {each.detail}"
            took_s = max(one.took_s for one in results)
            return Result(
                part=first.part,
                name=first.name,
                status=each.status,
                detail=detail,
                figures=first.figures,
                took_s=took_s,
            )
    return first


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Number of checks by status."""
    return {status: sum(each.status == status for each in results) for status in ("passed", "failed", "not run")}
