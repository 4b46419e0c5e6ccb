"""Causes that the figures in a line tell: memory, shapes, bytes in a ring, two streams. Pure."""

import re
from dataclasses import dataclass

from ascend_moe_train.doctor.event import Event, Evidence
from ascend_moe_train.doctor.hypothesis import Hypothesis, inferred
from ascend_moe_train.doctor.rule import RuleBook
from ascend_moe_train.units import format_bytes

MEMORY_LEVEL, FOREIGN_LEVEL, SHAPE_LEVEL, RING_LEVEL, STREAMS_LEVEL = 76, 80, 69, 90, 57
CONTEXT_BYTES = 6 * 2**30  # what the driver, libraries and communicators of one process may take
MAX_SHARDS = 1024
SAME_MOMENT_S = 0.05

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_AMOUNT = r"(\d{1,18}(?:\.\d{1,9})?) ?([KMGT]?i?B)"
_TORCH = {
    "request": re.compile(rf"Tried to allocate {_AMOUNT}"),
    "total": re.compile(rf"{_AMOUNT} total capacity|total capacity of {_AMOUNT}"),
    "allocated": re.compile(rf"{_AMOUNT} already allocated|allocated memory {_AMOUNT} is allocated"),
    "free": re.compile(rf"{_AMOUNT} free|of which {_AMOUNT} is free"),
    "reserved": re.compile(rf"{_AMOUNT} reserved in total"),
    "unallocated": re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated"),
    "process": re.compile(rf"this process has {_AMOUNT} memory in use"),
}
_POOL = re.compile(
    r"TotalUsedMemStatistics ?: ?(\d{1,18}).{0,120}?alloc size ?: ?(\d{1,18}).{0,60}?total mem size ?: ?(\d{1,18})"
)
_REQUEST = re.compile(r"Request memory size ?: ?(\d{1,18}) ?B?")
_SIZES = re.compile(r"size of tensor \w{1,10} \((\d{1,12})\) must match the size of tensor \w{1,10} \((\d{1,12})\)")
_SHAPES = re.compile(
    r"saved (?:torch\.Size\()?\[([\d, ]{1,80})\]\)? and current: ?(?:torch\.Size\()?\[([\d, ]{1,80})\]"
)


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Device memory at the moment that it ran out, in bytes; what the line does not say is 0."""

    request: float = 0.0
    total: float = 0.0
    allocated: float = 0.0
    free: float = 0.0
    reserved: float = 0.0

    @property
    def foreign(self) -> float:
        """What neither this process nor nobody has."""
        return self.total - self.free - self.reserved


def shortage_of(text: str) -> Shortage | None:
    """The figures of torch's, torch_npu's or MindSpore's line; None if it has none."""
    found = {name: _amount(pattern.search(text)) for name, pattern in _TORCH.items()}
    if found["total"]:
        reserved = found["reserved"] or found["allocated"] + found["unallocated"] or found["process"]
        names = ("request", "total", "allocated", "free")
        return Shortage(reserved=reserved, **{name: found[name] for name in names})
    if (pool := _POOL.search(text)) is not None:
        used, request, total = map(float, pool.groups())
        return Shortage(request=request, total=total, allocated=used, reserved=used, free=max(total - used, 0.0))
    return None


def _amount(found: re.Match[str] | None) -> float:
    if found is None:
        return 0.0
    number, unit = [group for group in found.groups() if group is not None][:2]
    return float(number) * _UNITS.get(unit, 1)


def figures(evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """What the figures of lines tell."""
    found: list[Hypothesis] = []
    for event in evidence.of("npu-oom", "ms-oom"):
        if found_here := _memory(event, book):
            found += found_here
            break
    for event in evidence.of("torch-size")[:1]:
        found += _shapes(event, book)
    for event in evidence.of("ms-ring-size")[:1]:
        found += _ring(event, evidence, book)
    return [*found, *_streams(evidence, book)]


def _memory(event: Event, book: RuleBook) -> list[Hypothesis]:
    short = shortage_of(event.text)
    if short is None:
        return []
    ranks = () if event.actor.rank is None else (event.actor.rank,)
    shown = {name: format_bytes(round(value)) for name, value in vars(short).items()}
    if "mem size" in event.text:
        return inferred(
            book,
            "oom-pool",
            MEMORY_LEVEL,
            [event],
            ranks=ranks,
            values={"pool": shown["total"], "used": shown["allocated"]},
        )
    if short.request > short.total:
        return inferred(book, "oom-absurd", MEMORY_LEVEL, [event], ranks=ranks, values=_of(shown, "request", "total"))
    if short.foreign > max(CONTEXT_BYTES, 0.15 * short.total):
        foreign = format_bytes(round(short.foreign))
        values = {"foreign": foreign, **_of(shown, "total", "reserved")}
        return inferred(book, "oom-foreign", FOREIGN_LEVEL, [event], ranks=ranks, values=values)
    gap = short.reserved - short.allocated
    if gap > short.request > 0 and gap > 0.04 * short.total:
        values = {"gap": format_bytes(round(gap)), **_of(shown, "request")}
        return inferred(book, "oom-fragments", MEMORY_LEVEL, [event], ranks=ranks, values=values)
    return inferred(
        book, "oom-real", MEMORY_LEVEL, [event], ranks=ranks, values=_of(shown, "allocated", "total", "request")
    )


def _of(shown: dict[str, str], *names: str) -> dict[str, str]:
    return {name: shown[name] for name in names}


def _shapes(event: Event, book: RuleBook) -> list[Hypothesis]:
    """Sizes of which one is a whole multiple of the other: a whole tensor and a shard."""
    first, second = _two_sizes(event.text)
    small, large = min(first, second), max(first, second)
    if small < 64 or large % small or not 2 <= large // small <= MAX_SHARDS:
        return []
    ranks = () if event.actor.rank is None else (event.actor.rank,)
    return inferred(book, "shape-is-shard", SHAPE_LEVEL, [event], ranks=ranks, values={"ratio": str(large // small)})


def _two_sizes(text: str) -> tuple[int, int]:
    if (sizes := _SIZES.search(text)) is not None:
        return int(sizes[1]), int(sizes[2])
    if (shapes := _SHAPES.search(text)) is None:
        return 0, 0
    first, second = (_product(shape) for shape in shapes.groups())
    return first, second


def _product(shape: str) -> int:
    product = 1
    for word in shape.replace(",", " ").split():
        product *= int(word)
    return product


def _ring(event: Event, evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """The sender of a ring is the rank before the one that complains."""
    rank = event.actor.rank
    size = len(evidence.ranks)
    ranks = () if rank is None else ((rank - 1) % size if size > 1 else rank - 1,)
    values = {name: event.values.get(name, "").rstrip(".") for name in ("own", "peer")}
    return inferred(book, "ring-sender", RING_LEVEL, [event], ranks=[r for r in ranks if r >= 0], values=values)


def _streams(evidence: Evidence, book: RuleBook) -> list[Hypothesis]:
    """Two collectives of one group, in one process, on two streams at the same moment."""
    last: dict[tuple[int | None, str], Event] = {}
    for event in evidence.of("f-entry-op"):
        key = (event.actor.pid, event.values.get("tag", ""))
        before = last.get(key)
        last[key] = event
        if before is None or before.at_s is None or event.at_s is None:
            continue
        if event.values.get("stream") != before.values.get("stream") and event.at_s - before.at_s < SAME_MOMENT_S:
            return inferred(
                book, "two-streams", STREAMS_LEVEL, [before, event], values={"own": event.values.get("op", "")}
            )
    return []
