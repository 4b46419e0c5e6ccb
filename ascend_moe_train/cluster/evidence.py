"""What is kept of a failure: a numbered folder beside the logs, for whoever looks at it in the morning. Pure."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe_train.cluster.output import START_LINE, log_name
from ascend_moe_train.cluster.report import around
from ascend_moe_train.cluster.verdict import RankView, ending_words, place
from ascend_moe_train.whole_file import write_text_whole, write_whole

FAILURES = "failures"  # within the folder of logs
TAIL_BYTES = 2**16
_FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A failure: the rank that failed first (None: no rank did), what was said of it, where all ranks were, and, of
    ranks that hung, stacks by rank. Of a job on several hosts, the `host` of that rank, and those that were `lost`."""

    rank: int | None
    exit_code: int
    message: str
    views: Sequence[RankView]
    stacks: Mapping[int, str]
    host: str | None = None
    lost: tuple[str, ...] = ()


def keep_evidence(log_folder: Path, failed: Failed, *, run_id: str, checkpoint_step: int | None) -> Path:
    """Writes `failures/N` below the folder of logs: `message.txt`, `failure.json`, the ends of what the failed rank and
    those around it printed since the start, and stacks where there are some. Returns the folder.

    `checkpoint_step` is that of the newest checkpoint then. Raises OSError.
    """
    folder = _next_folder(log_folder / FAILURES)
    write_text_whole(folder / "message.txt", failed.message + "\n")
    facts = _facts(failed, run_id, checkpoint_step)
    write_text_whole(folder / "failure.json", json.dumps(facts, indent=2) + "\n")
    for view in around(failed.views, failed.rank or 0):
        tail = _tail(log_folder / log_name(view.rank))
        if tail:
            write_whole(folder / log_name(view.rank), [tail])
    for rank, text in failed.stacks.items():
        write_text_whole(folder / f"stacks-{rank:05d}.txt", text)
    return folder


def _next_folder(parent: Path) -> Path:
    """Makes the folder with the next free number."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()), default=0)
    while True:
        try:
            (parent / str(number)).mkdir()
        except FileExistsError:
            number += 1
        else:
            return parent / str(number)


def _facts(failed: Failed, run_id: str, checkpoint_step: int | None) -> dict[str, Any]:
    view = None if failed.rank is None else failed.views[failed.rank]
    steps = [each.status.step for each in failed.views if each.status is not None]
    return {
        "format_version": _FORMAT_VERSION,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "start": run_id,
        "exit_code": failed.exit_code,
        "message": failed.message.splitlines()[0],
        "first_failed": None if view is None else _row(view),
        "host": failed.host,
        "lost_hosts": list(failed.lost),
        "last_step": max(steps, default=None),
        "checkpoint_step": checkpoint_step,
        "ranks": [_row(each) for each in failed.views],
    }


def _row(view: RankView) -> dict[str, Any]:
    return {
        "rank": view.rank,
        "pid": view.pid,
        "step": None if view.status is None else view.status.step,
        "phase": view.phase,
        "place": place(view),
        "idle_s": round(view.idle_s, 3),
        "stopped": view.stopped_s is not None,
        "ending": None if view.ending is None else ending_words(view.ending),
    }


def _tail(path: Path) -> bytes:
    """The end of a log, no more than of its last start; empty for one that cannot be read."""
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - TAIL_BYTES))
            text = file.read(TAIL_BYTES)
    except OSError:
        return b""
    if size_bytes > TAIL_BYTES:
        text = text.partition(b"\n")[2]
    before, mark, last = text.rpartition(START_LINE.encode())
    return mark + last if not before or before.endswith(b"\n") else text
