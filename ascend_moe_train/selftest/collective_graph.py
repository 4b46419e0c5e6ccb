"""The cases of the collectives inside one compiled graph, on one rank."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.parallel.comm import Array, Collectives, Comm, Group, Operator, RecordingComm, Tensor
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.selftest.collective_cases import (
    Case,
    cases,
    counts_of,
    groups,
    input_of,
    partition,
    payload_of,
    rows_of,
)
from ascend_moe_train.selftest.collective_host import compared, make_groups

NUM_CALLS = 2


class _Plain(nn.Cell):
    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator = operator

    def construct(self, x: Tensor) -> Tensor:
        return self.operator(x)


class _Rows(nn.Cell):
    def __init__(self, operator: Operator, counts: Array, index: int) -> None:
        super().__init__()
        self.operator = operator
        self.send_n = ms.Tensor(counts[index].astype(np.int32))
        self.recv_n = ms.Tensor(counts[:, index].astype(np.int32))

    def construct(self, x: Tensor) -> Tensor:
        return self.operator(x, self.send_n, self.recv_n)


class _Ring(nn.Cell):
    """Even ranks send first, odd ranks receive first."""

    def __init__(self, collectives: Collectives, group: Group, x: Array) -> None:
        super().__init__()
        previous, following = (group.index - 1) % group.size, (group.index + 1) % group.size
        self.send = collectives.send(group, following)
        self.recv = collectives.recv(group, previous, x.shape, ms.Tensor(x).dtype)
        self.sends_first = group.index % 2 == 0

    def construct(self, x: Tensor) -> Tensor:
        if self.sends_first:
            return self.recv(self.send(x))
        received = self.recv(x)
        return ops.depend(received, self.send(ops.depend(x, received)))


class _All(nn.Cell):
    """One after the other."""

    def __init__(self, calls: list[nn.Cell]) -> None:
        super().__init__()
        self.calls = nn.CellList(calls)

    def construct(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = []
        last = inputs[0]
        for index, call in enumerate(self.calls):
            last = call(ops.depend(inputs[index], last))
            results.append(last)
        return tuple(results)


def made(collectives: Collectives, case: Case, group: Group, x: Array) -> nn.Cell:
    """The case as a part of a graph."""
    match case.verb:
        case "all_reduce":
            return _Plain(collectives.all_reduce(group, case.how, case.wire))
        case "reduce_scatter":
            return _Plain(collectives.reduce_scatter(group, case.wire))
        case "all_to_all_v":
            rows = rows_of(case, collectives.world.size)
            return _Rows(collectives.all_to_all_v(group, rows), counts_of(case, group.size), group.index)
        case "broadcast":
            return _Plain(collectives.broadcast(group, group.size - 1))
        case "send":
            return _Ring(collectives, group, x)
    return _Plain(getattr(collectives, case.verb)(group))


def graph_results(
    collectives: Collectives, chosen: list[Case], tolerances: dict[str, float] | None = None
) -> dict[str, Any]:
    """What is wrong with the operators, in some calls of one graph."""
    n, rank = collectives.world.size, collectives.rank
    by_name = make_groups(collectives.split, n, [name for name in groups(n) if name in {case.group for case in chosen}])
    inputs = [input_of(case, n, rank) for case in chosen]
    net = _All([made(collectives, case, by_name[case.group], x) for case, x in zip(chosen, inputs, strict=True)])
    wrong = []
    for _ in range(NUM_CALLS):
        for case, found in zip(chosen, net(*map(ms.Tensor, inputs)), strict=True):
            dtype = "float16" if case.wire else case.dtype
            wrong += compared(case, found.asnumpy(), n, rank, (tolerances or {}).get(dtype, 0.0))
    return {"wrong": wrong}


def host_graph_results(inner: Comm, verb: str | None = None) -> dict[str, Any]:
    """What is wrong with the operators of host arrays, and with the payloads that they show; of one verb, or of all."""
    ms.set_context(mode=ms.GRAPH_MODE)
    comm = RecordingComm(inner)
    n, rank = comm.world.size, comm.rank
    chosen = [case for case in cases(n, verb) if case.dtype != "bfloat16"]
    result = graph_results(HostOps(comm), chosen)
    found = [call.payload_bytes for call in comm.calls if call.verb not in ("split", "recv")]
    expected = [payload_of(case, n, rank) for case in chosen if _moves(case, n, rank)]
    if found != expected * NUM_CALLS:
        result["wrong"].append(f"payloads {found}, not {expected}")
    return result


def _moves(case: Case, n: int, rank: int) -> bool:
    """A graph has no operator where there is nothing to move."""
    ranks = next(part for part in partition(case.group, n) if rank in part)
    return case.verb == "all_to_all_v" or (len(ranks) > 1 and input_of(case, n, rank).size > 0)
