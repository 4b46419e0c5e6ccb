"""The cases of the collectives on an MPI rank."""

from typing import Any

from ascend_moe_train.parallel.mpi import MpiComm
from ascend_moe_train.selftest.collective_graph import host_graph_results
from ascend_moe_train.selftest.collective_host import host_results, mixed_messages


def both(argument: Any) -> dict[str, Any]:
    """`host`, of host arrays, and `graph`, of operators in one."""
    comm = MpiComm()
    return {"host": {"wrong": host_results(comm)["wrong"] + mixed_messages(comm)}, "graph": host_graph_results(comm)}


def in_a_graph(argument: Any) -> dict[str, Any]:
    return host_graph_results(MpiComm())
