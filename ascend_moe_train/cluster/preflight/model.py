"""What a preflight knows: the job, what hosts have said, checks as data, and what came out. Pure."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ascend_moe_train.cluster.hostfile import Host, Hosts
from ascend_moe_train.cluster.preflight.npu_text import NpuTable, parse_npu_smi
from ascend_moe_train.cluster.remote import RemoteError

MOST_PEERS = 16
MAX_SHOWN = 160  # characters of what a host said

Request = Mapping[str, Any]
Status = Literal["ok", "failed", "unknown"]
Words = tuple[str, ...]
K = TypeVar("K")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What hosts are to be fit for. `python` runs the ranks; `files` are needed at the same path with the same SHA-256;
    `code` is the digest of this package here; `folder` takes checkpoints and needs `need_bytes` on its disk. `ssh` says
    which hosts must reach which over SSH, beside this machine, that must reach all."""

    hosts: Hosts
    python: str
    master_port: int
    code: str
    device: Literal["auto", "ascend", "cpu"] = "auto"
    files: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    need_bytes: int = 0
    write_bytes: int = 64 * 2**20
    least_bytes_per_s: float = 50e6
    mtu_bytes: int = 9000
    most_offset_s: float = 0.5
    ssh: Literal["none", "first", "all"] = "none"
    measures_links: bool = False


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a host gave for one request; `out` may hold anything."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    out: str
    code: int | None
    problem: str | None

    @property
    def is_missing(self) -> bool:
        """There is no such program."""
        return self.problem == "not found"

    @property
    def said(self) -> str:
        """One line of it, for people."""
        return one_line(self.problem or self.out) or f"exit code {self.code}"


NOT_READ = Reading(out="", code=None, problem="not read")


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What one host has said. Its clock is `offset_s` before the one here, as far as `error_s` allows to say."""

    host: Host
    readings: Mapping[str, Reading]
    offset_s: float | None = None
    error_s: float = 0.0

    def get(self, name: str) -> Reading:
        """NOT_READ if it is not there."""
        return self.readings.get(name, NOT_READ)

    @cached_property
    def npu_table(self) -> NpuTable:
        """What its npu-smi shows; empty if it is not there, or nothing is known of what it says."""
        return parse_npu_smi(self.get("npu-smi").out)

    def of_pairs(self, name: str) -> Mapping[str, Reading]:
        """Readings of this host with others, by the names of these."""
        begin = f"{name} > "
        return {key.removeprefix(begin): each for key, each in self.readings.items() if key.startswith(begin)}

    def facts(self, name: str) -> Mapping[str, Any]:
        """A reading that is a JSON object; empty if it is none."""
        found = parsed(self.get(name).out)
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one check gives for one host. `fix` are commands for that host, or for here; only the user runs them."""

    host: str
    status: Status
    found: str = ""
    fix: tuple[Words, ...] = ()
    fix_here: bool = False
    remedy: str | None = None  # in place of the check's own


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one host sends to another: bytes a second, and seconds of the shortest message one way."""

    sender: str
    receiver: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All that was said, in the order of the hosts: by those that could be asked, and why others could not."""

    job: Job
    answers: tuple[Answers, ...]
    errors: tuple[RemoteError, ...]
    links: tuple[Link, ...] = ()

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Host -> its place among those that could be asked."""
        return {each.host.name: index for index, each in enumerate(self.answers)}

    @cached_property
    def has_npus(self) -> bool:
        """Whether NPUs are expected on all hosts: as told, or if any of them shows one."""
        if self.job.device != "auto":
            return self.job.device == "ascend"
        return any(not each.get("npu-smi").is_missing or each.facts("host").get("devices") for each in self.answers)

    def judged(self, judge: Callable[[Answers], Outcome | None]) -> Iterator[Outcome]:
        """One outcome of each host that could be asked; None is good."""
        for each in self.answers:
            yield judge(each) or good(each)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check as data. `reads` says what each host is asked, and `reads_of_pair` what it is asked of another host
    when all have answered the first, each request with its time-out; `judge` is the rule that `rule` words."""

    name: str
    group: str
    what: str
    how: str
    rule: str
    why: str
    remedy: str
    judge: Callable[[Seen], Iterable[Outcome]]
    reads: Callable[[Job], Mapping[str, Request]] = lambda job: {}
    reads_of_pair: Callable[[Seen, Answers, Answers], Mapping[str, Request]] = lambda seen, host, peer: {}
    npus_only: bool = False


_READINGS = TypeAdapter(dict[str, dict[str, Reading]], config=ConfigDict(strict=True))


def read_reply(content: bytes) -> Mapping[str, Reading] | None:
    """The readings of a probe's reply; None if it is no such thing, whatever it is."""
    try:
        found = _READINGS.validate_json(content)
    except (ValidationError, RecursionError):
        return None
    return found.get("readings") if len(found) == 1 else None


def parsed(text: str) -> Any:
    """JSON from a host, None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def command(*words: str, timeout_s: float = 10, most_bytes: int = 16_384) -> Request:
    """A program to run, by its words."""
    return {"kind": "command", "words": list(words), "timeout_s": timeout_s, "most_bytes": most_bytes}


def one_line(text: str) -> str:
    """The first characters of what a host said, printable, in one line."""
    line = " ".join(text[: 8 * MAX_SHOWN].split())
    return printable(line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN - 3]}...")


def printable(text: str) -> str:
    """With everything replaced that a terminal would not show as a character."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def good(answers: Answers, found: str = "") -> Outcome:
    """A host that passes."""
    return Outcome(host=answers.host.name, status="ok", found=printable(found))


def bad(answers: Answers, found: str, *fix: Words, remedy: str | None = None) -> Outcome:
    """A host that fails, with what it has, and commands for it."""
    return Outcome(host=answers.host.name, status="failed", found=printable(found), fix=fix, remedy=remedy)


def unknown(answers: Answers, found: str) -> Outcome:
    """A host of which it cannot be said."""
    return Outcome(host=answers.host.name, status="unknown", found=printable(found))


def usual(values: Collection[K]) -> K | None:
    """The most frequent value, the first of those that are equally frequent; None without any."""
    return Counter(values).most_common(1)[0][0] if values else None


def differing(seen: Seen, value: Callable[[Answers], str | None], name: str, *fix: Words) -> Iterator[Outcome]:
    """Fails the hosts whose value is another one than most have; one that is None cannot be judged."""
    values = {each.host.name: value(each) for each in seen.answers}
    most = usual([each for each in values.values() if each is not None])
    for each in seen.answers:
        own = values[each.host.name]
        if own is None:
            yield unknown(each, f"{name} is not known")
        elif own != most:
            yield bad(each, f"{name} {one_line(own)}, most hosts have {one_line(str(most))}", *fix)
        else:
            yield good(each, f"{name} {one_line(own)}")


def of_pair(name: str, peer: Answers) -> str:
    """What a reading of a pair is called among those of its host."""
    return f"{name} > {peer.host.name}"


def peers_of(seen: Seen, index: int) -> list[Answers]:
    """Whom the host of that place is tested with: all others of a small cluster; of a large one the first host, and
    those 1, 2, 4, ... places on, so that every host is tested by several."""
    everybody = seen.answers
    if len(everybody) <= MOST_PEERS:
        return [each for each in everybody if each is not everybody[index]]
    steps = [2**power for power in range(MOST_PEERS) if 2**power < len(everybody)]
    indices = dict.fromkeys([0, *((index + step) % len(everybody) for step in steps)])
    return [everybody[each] for each in indices if each != index]


def judge_pairs(
    seen: Seen, problem: Callable[[Answers, Answers], str | None], verdict: Callable[[Answers, str], Outcome]
) -> Iterator[Outcome]:
    """Fails the hosts that account for the pairs with a `problem`; `verdict` is told what was found, and with whom."""
    tested: dict[tuple[str, str], str | None] = {}
    for index, each in enumerate(seen.answers):
        for peer in peers_of(seen, index):
            tested[each.host.name, peer.host.name] = problem(each, peer)
    wrong = {pair: text for pair, text in tested.items() if text is not None}
    guilty = blamed(wrong, tested)
    for each in seen.answers:
        name = each.host.name
        if name not in guilty:
            yield good(each)
            continue
        text = next(text for pair, text in wrong.items() if name in pair)
        others = guilty[name]
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        yield verdict(each, f"between it and {', '.join(others[:3])}{more}: {text}")


def blamed(failed: Collection[tuple[str, str]], tested: Collection[tuple[str, str]]) -> dict[str, list[str]]:
    """Which hosts account for pairs that failed, each with its peers: the one with most failures first, of equal ones
    that with the larger share of its own tests, until all are accounted for."""
    tests = Counter(name for pair in tested for name in pair)
    left = set(failed)
    found: dict[str, list[str]] = {}
    while left:
        count = Counter(name for pair in left for name in pair)
        worst = max(count, key=lambda name: (count[name], count[name] / tests[name], name))
        mine = {pair for pair in left if worst in pair}
        found[worst] = sorted({other for pair in mine for other in pair if other != worst})
        left -= mine
    return found
