"""Cases that every backend of the collectives must pass: inputs of each rank, results and payloads by NumPy. Pure."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ascend_moe_train.parallel.comm import WIRE_DTYPES, Array, How, Wire

DTYPES = {
    **{name: np.dtype(name) for name in ("float64", "float32", "float16", "int64", "int32", "uint8", "bool")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call with an input of `shape` on every rank; in `all_to_all_v`, `counts` says how many rows there are."""

    verb: str
    group: str = "world"
    dtype: str = "float32"
    shape: tuple[int, ...] = (4,)
    how: How = "sum"
    wire: Wire | None = None
    counts: str = ""

    @property
    def name(self) -> str:
        """Tells cases apart."""
        words = (self.verb, self.group, self.dtype, "x".join(map(str, self.shape)), self.how, self.wire, self.counts)
        return " ".join(str(word) for word in words if word)


def partition(group: str, n: int) -> list[tuple[int, ...]]:
    """The ranks 0..n-1 in parts."""
    match group:
        case "world":
            return [tuple(range(n))]
        case "halves":
            return [tuple(range(n // 2)), tuple(range(n // 2, n))]
        case "alternate":
            return [tuple(range(0, n, 2)), tuple(range(1, n, 2))]
        case "backwards":
            return [tuple(reversed(range(n)))]
        case "first three":
            return [tuple(range(min(3, n))), tuple(range(min(3, n), n))]
        case _:
            return [(rank,) for rank in range(n)]


def groups(n: int) -> list[str]:
    """Names for `partition` without empty parts."""
    return [
        "world",
        "alone",
        *(["halves", "alternate", "backwards"] if n > 1 else []),
        *(["first three"] if n > 3 else []),
    ]


def cases(n: int, verb: str | None = None) -> Iterator[Case]:
    """All cases for n ranks, or those of one verb; the same on every rank and in the same order. `send` is `recv` too,
    and `split` has no case of its own: every group is made by it."""
    return (case for case in _all_cases(n) if verb in (None, case.verb))


def _all_cases(n: int) -> Iterator[Case]:
    for dtype in ("float64", "float32", "float16", "int64", "int32", "bfloat16"):
        yield Case(verb="all_reduce", dtype=dtype, shape=(7, 3))
        yield Case(verb="all_reduce", dtype=dtype, shape=(3001,))
        yield Case(verb="all_reduce", dtype=dtype, shape=(5,), how="max")
        yield Case(verb="reduce_scatter", dtype=dtype, shape=(2 * n, 3))
    yield Case(verb="all_reduce", dtype="bool", how="max")
    for shape in ((), (1,), (0, 3), (2, 1, 3), (1_100_003,)):
        yield Case(verb="all_reduce", shape=shape)
    for dtype in DTYPES:
        for verb in ("all_gather", "all_to_all", "broadcast"):
            yield Case(verb=verb, dtype=dtype, shape=(2 * n, 3))
        yield Case(verb="all_to_all_v", dtype=dtype, counts="some")
    for wire in WIRE_DTYPES:
        for shape in ((), (11,), (3001,), (2_100_001,)):
            yield Case(verb="all_reduce", shape=shape, wire=wire)
        yield Case(verb="reduce_scatter", shape=(n, 5), wire=wire)
    yield Case(verb="reduce_scatter", shape=(n * 300_000, 4))
    for group in groups(n):
        size = max(map(len, partition(group, n)))
        for verb in ("all_reduce", "all_gather", "broadcast", "barrier"):
            yield Case(verb=verb, group=group, shape=(3, 2))
        for verb in ("reduce_scatter", "all_to_all"):
            yield Case(verb=verb, group=group, shape=(6 * size, 2))
        yield Case(verb="all_to_all_v", group=group, counts="some")
    for verb in ("all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        yield Case(verb=verb, shape=(0, 3))
        yield Case(verb=verb, shape=(2 * n, 0))
    for counts in ("none", "no rows", "to the first", "to the next", "full"):
        yield Case(verb="all_to_all_v", counts=counts)
    yield Case(verb="broadcast", shape=())
    if n > 1:
        for dtype in ("float32", "float16", "int64"):
            yield Case(verb="send", dtype=dtype, shape=(3, 2))


def input_of(case: Case, n: int, rank: int) -> Array:
    """What the rank puts in."""
    generator = np.random.default_rng([zlib.crc32(case.name.encode()), rank])
    dtype, shape = DTYPES[case.dtype], case.shape
    if case.counts:
        ranks = next(part for part in partition(case.group, n) if rank in part)
        unused = 0 if case.counts in ("full", "no rows") else 2
        shape = (int(counts_of(case, len(ranks))[ranks.index(rank)].sum()) + unused, 3)
    if dtype.kind in "iub":
        return generator.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


def counts_of(case: Case, size: int) -> Array:
    """Rows that each rank of a group (first) sends to each (second)."""
    sender, receiver = np.indices((size, size))
    match case.counts:
        case "some":
            return (3 * sender + 5 * receiver + sender * receiver) % 4
        case "to the first":
            return 3 * (receiver == 0)
        case "to the next":
            return 4 * (receiver == (sender + 1) % size)
        case "full":
            return np.full((size, size), 2)
        case _:
            return np.zeros((size, size), int)


def rows_of(case: Case, n: int) -> int:
    """Rows of the result of `all_to_all_v`: the same on every rank, and all full only in the case of that name."""
    most = max(int(counts_of(case, len(ranks)).sum(0).max()) for ranks in partition(case.group, n))
    return most + (0 if case.counts in ("full", "no rows") else 1)


def expected_of(case: Case, n: int, rank: int) -> Array:
    """What the rank gets."""
    ranks = next(part for part in partition(case.group, n) if rank in part)
    index, size = ranks.index(rank), len(ranks)
    inputs = [input_of(case, n, each) for each in ranks]
    own = inputs[index]
    match case.verb:
        case "all_reduce":
            total = _combined(inputs, case.how, case.wire)
            is_rounded = case.wire is not None and size > 1
            return total.astype(WIRE_DTYPES[case.wire]).astype(own.dtype) if case.wire and is_rounded else total
        case "all_gather":
            return np.concatenate(inputs)
        case "reduce_scatter":
            return np.split(_combined(inputs, "sum", case.wire), size)[index]
        case "all_to_all":
            return np.concatenate([np.split(each, size)[index] for each in inputs])
        case "all_to_all_v":
            counts = counts_of(case, size)
            parts = [np.split(each, np.cumsum(sent))[index] for each, sent in zip(inputs, counts, strict=True)]
            received = np.concatenate(parts)
            return np.concatenate([received, np.zeros((rows_of(case, n) - len(received), 3), own.dtype)])
        case "broadcast":
            return inputs[-1]
        case "send":
            return inputs[index - 1]
        case _:
            return own


def payload_of(case: Case, n: int, rank: int) -> int:
    """Bytes that a recorder must have noted."""
    own = input_of(case, n, rank)
    itemsize = 2 if case.wire else own.dtype.itemsize
    if case.verb == "barrier":
        return 0
    if case.verb == "all_to_all_v":
        ranks = next(part for part in partition(case.group, n) if rank in part)
        return int(counts_of(case, len(ranks))[ranks.index(rank)].sum()) * 3 * itemsize
    return own.size * itemsize


def _combined(inputs: list[Array], how: How, wire: Wire | None) -> Array:
    """In the order of the ranks, one after the other."""
    dtype = inputs[0].dtype
    if len(inputs) == 1:
        return inputs[0]
    is_short = wire is not None or dtype.itemsize == 2
    total = inputs[0] if wire is None else inputs[0].astype(WIRE_DTYPES[wire])
    total = total.astype(np.float32) if is_short else total
    for each in inputs[1:]:
        part: Any = each if wire is None else each.astype(WIRE_DTYPES[wire])
        part = part.astype(np.float32) if is_short else part
        total = total + part if how == "sum" else np.maximum(total, part)
    return total.astype(dtype)
