"""One rank of collectives.py: times a collective in a graph, on host arrays, and as mpi4py's own call, into one
buffer and into as many as there are calls."""

import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import mindspore as ms
import mpi4py
import numpy as np
from mindspore import nn, ops
from mpi4py import MPI
from numpy.typing import NDArray

from ascend_moe_train.cluster.rank import progress, unlink_shared_memory
from ascend_moe_train.parallel.comm import Operator, Tensor
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.mpi import MpiComm
from benchmarks.ranks_orders import Order, Reply, serve

Array = NDArray[np.float32]
Way = Callable[[], Any]
WAYS = ("raw", "apart", "graph", "host")


class _Chain(nn.Cell):  # type: ignore[misc]  # MindSpore's types are unknown
    """So many collectives of one input, one after the other: what starting a graph costs is shared by all."""

    def __init__(self, operator: Operator, calls: int) -> None:
        super().__init__()
        self.operator, self.calls = operator, calls

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        for _ in range(self.calls):
            y = self.operator(ops.depend(x, y))
        return y, ops.reshape(y, (-1,))[:1]


class Collective:
    """A verb at one size, ready to be called in each way."""

    def __init__(self, comm: MpiComm, verb: str, size_bytes: int, calls: int) -> None:
        n, world = comm.world.size, MPI.COMM_WORLD
        x = np.random.default_rng(comm.rank).random(size_bytes // 4, np.float32)
        out = np.empty({"all_gather": n * x.size, "reduce_scatter": x.size // n}.get(verb, x.size), np.float32)
        own, apart = np.empty_like(out), [np.zeros_like(out) for _ in range(calls)]
        call: Any = {
            "all_reduce": world.Allreduce,
            "all_gather": world.Allgather,
            "reduce_scatter": world.Reduce_scatter_block,
            "all_to_all": world.Alltoall,
        }[verb]
        chain = _Chain(getattr(HostOps(comm), verb)(comm.world), calls)
        tensor = ms.Tensor(x)

        def raw() -> Array:
            for _ in range(calls):
                call(x, out)
            return out

        def raw_apart() -> Array:
            for each in apart:
                call(x, each)
            return apart[-1]

        def host() -> Array:
            for _ in range(calls):
                result: Array = getattr(comm, verb)(comm.world, x, out=own)
            return result

        def graph() -> Tensor:
            y, first = chain(tensor)
            first.asnumpy()  # waits for the end, and copies one element
            return y

        self._ways: dict[str, Way] = {"raw": raw, "apart": raw_apart, "graph": graph, "host": host}
        for way, found in (("host", host()), ("graph", graph().asnumpy())):
            np.testing.assert_allclose(found, raw(), rtol=1e-6, err_msg=f"{verb}, {way}")

    def seconds(self, ways: tuple[str, ...]) -> Reply:
        """Seconds of all calls by way, in the order given."""
        found = {}
        for way in ways:
            MPI.COMM_WORLD.Barrier()
            start_s = time.perf_counter()
            self._ways[way]()
            found[way] = time.perf_counter() - start_s
        return found


def main(path: str) -> None:
    """Serves until the benchmark is done."""
    ms.set_context(mode=ms.GRAPH_MODE)
    comm = MpiComm()
    unlink_shared_memory()
    progress().phase("step")
    ready = cache(lambda verb, size_bytes, calls: Collective(comm, verb, size_bytes, calls))

    def obey(order: Order) -> Reply:
        collective = ready(order["verb"], order["size_bytes"], order["calls"])
        return collective.seconds(WAYS if order["forward"] else WAYS[::-1])

    library = " ".join(MPI.Get_library_version().split("\n")[0].strip("\0").split())
    facts = {"mindspore": ms.__version__, "mpi4py": mpi4py.__version__, "MPI": library}
    serve(path, comm.rank, facts, obey)
    progress().phase("done")


if __name__ == "__main__":
    main(sys.argv[1])
