"""The verbs on this rank, one after the other, on host arrays and as operators of a graph."""

from collections.abc import Callable
from typing import Any

from ascend_moe_train.parallel.native import NativeOps
from ascend_moe_train.selftest.collective_cases import Case, cases, partition
from ascend_moe_train.selftest.collective_graph import graph_results, host_graph_results
from ascend_moe_train.selftest.collective_host import host_results, mixed_messages
from ascend_moe_train.selftest.collective_native import TOLERANCES, is_on_ascend, is_on_cpus
from ascend_moe_train.selftest.names import COLLECTIVES, GRAPH
from ascend_moe_train.selftest.results import Finding, NotPossibleError
from ascend_moe_train.train.ranks import join_by_mpi
from ascend_moe_train.train.session import set_device


def looker(asked: dict[str, Any]) -> Callable[[str], Finding]:
    """See worker.KINDS. `backend` is `mpi`, or `native` for MindSpore's own, which has no check on host arrays."""
    device = set_device(asked["device"])
    if asked["backend"] == "native":
        return _native(NativeOps(), device)
    comm = join_by_mpi()

    def look(name: str) -> Finding:
        verb, way = COLLECTIVES[name]
        chosen = list(cases(comm.world.size, verb))
        if way == GRAPH:
            return _found(host_graph_results(comm, verb)["wrong"], chosen)
        return _found(host_results(comm, verb)["wrong"] + (mixed_messages(comm) if verb == "send" else []), chosen)

    return look


def _native(collectives: NativeOps, device: str) -> Callable[[str], Finding]:
    n = collectives.world.size
    is_on = is_on_ascend if device == "ascend" else is_on_cpus

    def look(name: str) -> Finding:
        verb, _ = COLLECTIVES[name]
        chosen = [case for case in cases(n, verb) if is_on(case, n)]
        # a group of one moves nothing, and says nothing of the library
        if all(len(partition(case.group, n)) == n for case in chosen):
            raise NotPossibleError(f"MindSpore's own collectives have no {verb} on CPUs")
        return _found(graph_results(collectives, chosen, TOLERANCES)["wrong"], chosen)

    return look


def _found(wrong: list[str], chosen: list[Case]) -> Finding:
    return Finding(problems=wrong, figures={"cases": float(len(chosen))})
