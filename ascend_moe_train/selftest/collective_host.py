"""The cases of the collectives on host arrays, on one rank."""

from typing import Any

import numpy as np

from ascend_moe_train.parallel.comm import Array, Comm, Group, RecordingComm, own_group
from ascend_moe_train.selftest.collective_cases import (
    Case,
    cases,
    counts_of,
    expected_of,
    groups,
    input_of,
    partition,
    payload_of,
    rows_of,
)
from ascend_moe_train.selftest.compare import relative_error

# elements; MPI sends small messages at once and large ones when they are wanted
MESSAGE_SIZES = (1, 300_000, 2, 1_000_000)


def make_groups(split: Any, n: int, names: list[str]) -> dict[str, Group]:
    """Groups of the cases, by name."""
    return {name: split(name, partition(name, n)) for name in names}


def wrong_groups(found: dict[str, Group], n: int, rank: int) -> list[str]:
    """What is wrong with groups of the cases, by name."""
    expected = {name: own_group(name, partition(name, n), rank, n) for name in found}
    return [f"split: {found[name]}, not {expected[name]}" for name in found if found[name] != expected[name]]


def called(comm: Comm, case: Case, group: Group, x: Array) -> Array:
    """The case on host arrays."""
    match case.verb:
        case "all_reduce":
            return comm.all_reduce(group, x, case.how, case.wire)
        case "reduce_scatter":
            return comm.reduce_scatter(group, x, case.wire)
        case "all_gather":
            return comm.all_gather(group, x)
        case "all_to_all":
            return comm.all_to_all(group, x)
        case "all_to_all_v":
            counts = counts_of(case, group.size)
            return comm.all_to_all_v(
                group, x, counts[group.index], counts[:, group.index], rows_of(case, comm.world.size)
            )
        case "broadcast":
            return comm.broadcast(group, x, group.size - 1)
        case "barrier":
            comm.barrier(group)
            return x
    return _around_the_ring(comm, group, x)


def _around_the_ring(comm: Comm, group: Group, x: Array) -> Array:
    """All send first, which ends only if sends do not wait; and what is sent may change at once."""
    sent = x.copy()
    comm.send(group, sent, (group.index + 1) % group.size)
    sent[...] = 0
    return comm.recv(group, x.shape, x.dtype, (group.index - 1) % group.size)


def host_results(inner: Comm, verb: str | None = None) -> dict[str, Any]:
    """What is wrong with one verb on host arrays, or with all."""
    comm = RecordingComm(inner)
    n, rank = comm.world.size, comm.rank
    by_name = make_groups(comm.split, n, groups(n))
    wrong = wrong_groups(by_name, n, rank)
    for case in cases(n, verb):
        comm.calls.clear()
        x = input_of(case, n, rank)
        kept = x.copy()
        found = called(comm, case, by_name[case.group], x)
        wrong += compared(case, found, n, rank)
        if not np.array_equal(x, kept):
            wrong.append(f"{case.name}: the input was changed")
        found_bytes = sum(call.payload_bytes for call in comm.calls)
        if found_bytes != payload_of(case, n, rank):
            wrong.append(f"{case.name}: payload {found_bytes} bytes, not {payload_of(case, n, rank)}")
    return {"wrong": wrong}


def compared(case: Case, found: Array, n: int, rank: int, tolerance: float = 0.0) -> list[str]:
    """Nothing, or what is wrong. Where sums are in the order of the ranks, every bit must be right."""
    expected = expected_of(case, n, rank)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return [f"{case.name}: {found.dtype}{found.shape}, not {expected.dtype}{expected.shape}"]
    is_right = relative_error(found, expected) <= tolerance if tolerance else np.array_equal(found, expected)
    return [] if is_right else [f"{case.name}: {found.ravel()[:9]}, not {expected.ravel()[:9]}"]


def mixed_messages(comm: Comm) -> list[str]:
    """What is wrong with messages that are received in another order than sent, but for those of one group."""
    n, rank = comm.world.size, comm.rank
    up, down = (comm.split(name, [tuple(range(n))]) for name in ("up", "down"))
    expected = [(group, np.full(size, number)) for group in (up, down) for number, size in enumerate(MESSAGE_SIZES)]
    for group, x in expected:
        comm.send(group, x, (rank + 1) % n)
    wrong = []
    for group, x in sorted(expected, key=lambda each: each[0].name):
        found = comm.recv(group, x.shape, x.dtype, (rank - 1) % n)
        if not np.array_equal(found, x):
            wrong.append(f"{group.name}: {found[:1]} of {found.size}, not {x[:1]} of {x.size}")
    comm.barrier(comm.world)
    return wrong
