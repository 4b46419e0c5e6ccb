"""What stands before a line's own text: who says it. Pure.

All patterns are anchored and have no repetition inside a repetition, on lines of bounded length.
"""

import re
from dataclasses import replace
from pathlib import PurePosixPath

from ascend_moe_train.doctor.event import Actor, Part

# `worker_2.log: text`, `logs/rank-00002.log:17:text`, `scheduler.log-59-text`, as grep and people write them
_FILE = re.compile(r"(?P<file>(?:[\w.\-]{1,80}/){0,8}[\w.\-]{0,60}\.log(?:\.\d{1,3})?)[:\-](?:\d{1,9}[:\-])? ?")
_SAID = re.compile(r"(?P<who>msrun|torchrun|scheduler|launcher|mpiexec)(?:\.log)?: ")
_RANK = re.compile(
    r"(?:node[ _\-]?(?P<node>\d{1,5})/)?\[?(?:default\d{1,4}\]:\[)?rank[ _\-]?(?P<rank>\d{1,6})\]?"
    r"(?::| (?=\S)|(?=\[)) ?"
)
# our launcher, of what a rank said before it ended (docs/launch.md)
_TOLD = re.compile(r"error: rank (?P<rank>\d{1,6})(?: on [\w.\-:]{1,80})? in step \d{1,12}: ")
_FAILED = re.compile(r"error: rank (?P<rank>\d{1,6})(?: on [\w.\-:]{1,80})? failed ")  # the same, of an exception
_NODE = re.compile(r"\[?(?P<host>(?:node|worker|host)[ _\-]?\d{1,5})\]?: ")
_MPI = re.compile(r"\[\d{1,4},(?P<rank>\d{1,6})\](?:<std(?:out|err)>)?:? ?")
_LEVEL = re.compile(r"\[(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL|EVENT|EXCEPTION)\] ?")
_MODULE = re.compile(r"(?P<module>[A-Z][A-Z_0-9]{1,16})\((?P<pid>\d{1,9})[,:)]")
_RANK_ID = re.compile(r"(?:RankID:|\[Rank |\[PG \d{1,4} Rank |\(RANK )(?P<rank>\d{1,6})")
_PID = re.compile(r"\(?\[?PID: ?(?P<pid>\d{1,9})")

_WORKER = re.compile(r"(?<![a-z])(?:worker|rank|log|stdout|stderr|local_rank)[_\-. ]?(\d{1,6})$", re.IGNORECASE)
_RANK_PART = re.compile(r"(?:rank|local_rank)[_\-= ]?(\d{1,6})(?![\d.])", re.IGNORECASE)
_PLOG = re.compile(r"(?:plog(?:-parser)?|device)-(\d{1,9})(?:[_\-.]|$)")
_DEVICE = re.compile(r"device-(\d{1,3})$")
_NODE_FOLDER = re.compile(r"(?:worker|node|host|server)[_\-]\d{1,5}$|(?:node|host)\d{1,5}$", re.IGNORECASE)
_ENDINGS = re.compile(r"(?:\.(?:log|txt|out|err|gz|\d{1,3}))+$", re.IGNORECASE)
_PARTS: tuple[tuple[str, Part], ...] = (
    ("scheduler", "scheduler"),
    ("msrun", "launcher"),
    ("torchrun", "launcher"),
    ("launch", "launcher"),
    ("dmesg", "kernel"),
    ("kern.log", "kernel"),
    ("messages", "kernel"),
    ("syslog", "kernel"),
    ("journal", "kernel"),
    ("npu-smi", "tool"),
    ("npu_smi", "tool"),
    ("hccn", "tool"),
    ("link_stat", "tool"),
)


def actor_of_file(name: str) -> Actor:
    """Who wrote a file, by its name and the folders that it lies in."""
    path = PurePosixPath(name)
    stem = _ENDINGS.sub("", path.name)
    folders = [part for part in path.parts[:-1] if part not in ("/", ".", "..")]
    host = next((part for part in reversed(folders) if _NODE_FOLDER.match(part)), None)
    lower = path.name.lower()
    for word, part in _PARTS:
        if word in lower:
            return Actor(part=part, host=host)
    device = next((int(found[1]) for part in reversed(folders) if (found := _DEVICE.match(part))), None)
    pid = int(found[1]) if (found := _PLOG.match(stem)) else None
    rank = _rank_of(stem, folders)
    return Actor(part="rank" if rank is not None else "unknown", rank=rank, pid=pid, host=host, device=device)


def _rank_of(stem: str, folders: list[str]) -> int | None:
    """The rank that a file's name or folder tells; torchrun has a folder per rank, with stdout.log in it."""
    if (found := _WORKER.search(stem) or _RANK_PART.search(stem)) is not None:
        return int(found[1])
    for folder in reversed(folders):
        if (found := _RANK_PART.search(folder)) is not None:
            return int(found[1])
    is_stream = stem in ("stdout", "stderr")
    return int(folders[-1]) if is_stream and folders and folders[-1].isdecimal() else None


def split(line: str, actor: Actor) -> tuple[Actor, str, str]:
    """Who says a line of a source that `actor` wrote, the level that it has, and its text without what stood before
    the level."""
    if (found := _LEVEL.match(line)) is not None:  # most lines of frameworks, and none of the others begins like that
        return _with_ids(line[found.end() :], actor), found["level"], line
    if (found := _FILE.match(line)) is not None:
        named = actor_of_file(found["file"])
        actor = named if named != Actor() else actor
        line = line[found.end() :]
    elif (found := _SAID.match(line)) is not None:
        actor = Actor(part="scheduler" if found["who"] == "scheduler" else "launcher", host=actor.host)
        line = line[found.end() :]
    if (found := _RANK.match(line) or _MPI.match(line) or _TOLD.match(line)) is not None:
        node = found.groupdict().get("node")
        actor = replace(actor, part="rank", rank=int(found["rank"]), host=f"node {node}" if node else actor.host)
        line = line[found.end() :]
    elif (found := _FAILED.match(line)) is not None:
        actor = replace(actor, part="rank", rank=int(found["rank"]))
    elif (found := _NODE.match(line)) is not None:
        actor = replace(actor, host=found["host"])
        line = line[found.end() :]
    found = _LEVEL.match(line)
    rest = line if found is None else line[found.end() :]
    return _with_ids(rest, actor), "" if found is None else found["level"], line


def _with_ids(line: str, actor: Actor) -> Actor:
    head = line[:200]
    if actor.part not in ("scheduler", "launcher") and (found := _RANK_ID.search(head)) is not None:
        actor = replace(actor, part="rank", rank=int(found["rank"]))
    if (found := _MODULE.match(head) or _PID.search(head)) is not None:
        actor = replace(actor, pid=int(found["pid"]))
    return actor
