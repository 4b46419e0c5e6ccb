"""The cases of the collectives with MindSpore's own operators, on one rank."""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np

from ascend_moe_train.parallel.agree import broadcast_json, exchange_json, max_int, sum_floats, sum_int
from ascend_moe_train.parallel.comm import CommError, Group
from ascend_moe_train.parallel.native import NativeOps
from ascend_moe_train.selftest.collective_cases import cases, partition
from ascend_moe_train.selftest.collective_graph import graph_results
from ascend_moe_train.selftest.collective_native import TOLERANCES, is_on_cpus


def refusals(collectives: NativeOps, group: Group) -> list[str]:
    """The errors for what a CPU lacks."""
    found = []
    makes: list[Callable[[], object]] = [
        lambda: collectives.all_reduce(collectives.world, "max"),
        lambda: collectives.all_reduce(collectives.world, "sum", "bf16"),
        lambda: collectives.reduce_scatter(collectives.world),
        lambda: collectives.all_to_all(collectives.world),
        lambda: collectives.all_to_all_v(collectives.world, 3),
        lambda: collectives.send(collectives.world, 1),
        lambda: collectives.recv(collectives.world, 1, (3,), ms.float32),
        lambda: collectives.all_gather(group),
        lambda: collectives.broadcast(group, 0),
        lambda: collectives.all_gather(collectives.world)(ms.Tensor([2**40], ms.int64)),
        lambda: collectives.broadcast(collectives.world, 0)(ms.Tensor([1.0], ms.float64)),
    ]
    for make in makes:
        try:
            make()
        except CommError as error:
            found.append(str(error))
    return found


def native(argument: Any) -> dict[str, Any]:
    """On a rank that msrun started."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    collectives = NativeOps()
    n = collectives.world.size
    chosen = [case for case in cases(n) if is_on_cpus(case, n)]
    comm, rank = collectives.comm, collectives.rank
    half = collectives.split("half", partition("halves", n))
    return {
        **graph_results(collectives, chosen, TOLERANCES),
        "verbs": sorted({case.verb for case in chosen}),
        "host": comm.all_reduce(half, np.full(3, rank, np.float32)),
        "half": half.ranks,
        "exchanged": exchange_json(comm, {"ä": rank}),
        "broadcast": broadcast_json(comm, [rank], root=n - 1),
        "agreed": [sum_int(comm, 2**40 + rank), max_int(comm, 2**40 + rank), *sum_floats(comm, [2**40 + rank / 4])],
        "refusals": refusals(collectives, half),
    }
