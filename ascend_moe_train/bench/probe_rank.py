"""`python -m ascend_moe_train.bench.probe_rank FOLDER`: one rank of a machine's measurement, see FOLDER/asked.json.

All ranks do the same at the same time; of each round the slowest counts. The first writes FOLDER/found.json.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.bench.measured import ASKED, FOUND
from ascend_moe_train.bench.probes import (
    VERBS,
    WITHOUT_PAYLOAD,
    CommTime,
    DispatchSizes,
    Probed,
    WorkTime,
    group_sizes,
    probed_json,
)
from ascend_moe_train.cluster.as_rank import as_rank
from ascend_moe_train.cluster.rank import progress
from ascend_moe_train.errors import UserError
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.kernels.select import choose
from ascend_moe_train.parallel.agree import exchange_json
from ascend_moe_train.parallel.comm import Comm, Group
from ascend_moe_train.train.metrics import replace_file
from ascend_moe_train.train.ranks import join_by_mpi
from ascend_moe_train.train.session import set_device

COMM, WORK, DISPATCH = "comm", "work", "dispatch"
EXIT_USER_ERROR = 2
SIZES_BYTES = (2**10, 2**14, 2**17, 2**20, 2**22, 2**24)  # the last as a bucket of gradients: in no cache
CALLS_BYTES = 2**22  # of one round: many calls of small messages, few of large ones
MAX_CALLS = 64
COPY_BYTES = 2**26
PRODUCTS = ((64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (2048, 512, 256), (2048, 1024, 256))
# as the gradient of a weight, over all tokens; of experts: how many, rows of each, outputs, inputs
LONG_PRODUCTS = ((256, 512, 2048), (768, 256, 2048))
GROUPED = ((8, 64, 1024, 256), (8, 256, 1024, 256), (8, 512, 256, 512))
PRODUCTS_FLOPS = 2e9  # of one round, so that starting a graph is a small part of it
ATTENTION = ((128, 8, 32), (256, 8, 32), (512, 8, 32), (1024, 8, 32))
ROWS, WIDTH = 2048, 512
VECTOR_CALLS, OPERATOR_CALLS, DISPATCH_CALLS = 16, 64, 4
ATTENTION_FLOPS, ATTENTION_CALLS = 1e9, 8


class _Chain(nn.Cell):
    """So many calls of one operator on the same inputs, one after the other: starting the graph is shared by all."""

    def __init__(self, operator: Callable[..., Any], calls: int) -> None:
        super().__init__()
        self.operator, self.calls = operator, calls

    def construct(self, x: Any, *others: Any) -> Any:
        y = self.operator(x, *others)
        for _ in range(self.calls - 1):
            y = self.operator(ops.depend(x, y), *others)
        return ops.reshape(y, (-1,))[:1]


class Prober:
    """Measures, with all ranks of `comm`."""

    def __init__(self, comm: Comm, kernels: Kernels, rounds: int) -> None:
        self._comm, self._kernels, self._rounds = comm, kernels, rounds

    def slowest(self, call: Callable[[], Any], calls: int) -> tuple[float, ...]:
        """Seconds of one of the `calls` that a call makes, of each round on the slowest rank; the first is not
        counted."""
        own = []
        for _ in range(self._rounds + 1):
            self._comm.barrier(self._comm.world)
            start_s = time.perf_counter()
            call()
            own.append((time.perf_counter() - start_s) / calls)
        return tuple(max(each) for each in zip(*exchange_json(self._comm, own[1:]), strict=True))

    def comm_times(self) -> Iterator[CommTime]:
        """Every verb, group and size."""
        for size in group_sizes(self._comm.world.size):
            starts = range(0, self._comm.world.size, size)
            group = self._comm.split(f"bench {size}", [tuple(range(first, first + size)) for first in starts])
            for verb in VERBS:
                if verb == "send" and size > 2:
                    continue
                for payload in (0,) if verb in WITHOUT_PAYLOAD else SIZES_BYTES:
                    calls = int(np.clip(CALLS_BYTES // max(payload, 1), 1, 1 if verb == "split" else MAX_CALLS))
                    call = self._repeated(verb, group, payload, calls)
                    rounds_s = self.slowest(call, 2 * calls if verb == "send" else calls)
                    yield CommTime(verb=verb, size=size, payload_bytes=payload, rounds_s=rounds_s)

    def _repeated(self, verb: str, group: Group, payload: int, calls: int) -> Callable[[], Any]:
        x = np.full(payload // 4, 1.0, np.float32)
        out = np.empty(
            {"all_gather": group.size * x.size, "reduce_scatter": x.size // group.size}.get(verb, x.size), "f4"
        )
        comm = self._comm
        if verb == "send":  # there and back
            peer = 1 - group.index

            def call() -> None:
                for _ in range(calls):
                    if group.index == 0:
                        comm.send(group, x, peer)
                    comm.recv(group, x.shape, x.dtype, peer, out=out)
                    if group.index == 1:
                        comm.send(group, x, peer)

            return call
        if verb == "split":
            partition = [tuple(range(first, first + group.size)) for first in range(0, comm.world.size, group.size)]
            numbers = count()
            return lambda: comm.split(f"{group.name}, {next(numbers)}", partition)
        if verb == "barrier":
            return lambda: _times(calls, lambda: comm.barrier(group))
        extra: tuple[Any, ...] = (0,) if verb == "broadcast" else ()
        if verb == "all_to_all_v":  # as many to each
            each_n = np.full(group.size, x.size // group.size, np.int32)
            extra = each_n, each_n, x.size

        def repeat() -> None:
            for _ in range(calls):
                getattr(comm, verb)(group, x, *extra, out=out)

        return repeat

    def work_times(self) -> Iterator[WorkTime]:
        """Matrix products, attention, and operators that memory or their launch rules, as graphs have them."""
        kernels = self._kernels
        for m, n, k in (*PRODUCTS, *LONG_PRODUCTS):
            flops = 2.0 * m * n * k
            calls = int(np.clip(PRODUCTS_FLOPS / flops, 1, MAX_CALLS))
            yield self._work("product", "matmul", (m, n, k), flops, kernels.matmul, calls, (m, k), (n, k))
        for experts, m, n, k in GROUPED:
            flops = 2.0 * m * n * k * experts
            calls = int(np.clip(PRODUCTS_FLOPS / flops, 1, MAX_CALLS))
            counts = ms.Tensor(np.full(experts, m, np.int32))
            name, rows, weights = f"{experts} experts", (experts * m, k), (experts, k, n)
            grouped = kernels.grouped_matmul
            yield self._work("grouped", name, (m, n, k), flops, grouped, calls, rows, weights, extra=(counts,))
        for length, heads, size in ATTENTION:
            shape = (1, length, heads, size)
            flops = 2.0 * heads * size * length * length  # with the mask's empty half left out
            segment = ms.Tensor(np.zeros((1, length), np.int32))
            inputs = (shape, shape, shape)
            attention, sizes, calls = (
                kernels.attention,
                (length, heads, size),
                int(np.clip(ATTENTION_FLOPS // flops, 1, ATTENTION_CALLS)),
            )
            yield self._work("attention", "attention", sizes, flops, attention, calls, *inputs, extra=(segment,))
        moved = 4.0 * ROWS * WIDTH
        wide = (ROWS, 2 * WIDTH)
        yield self._work("vector", "swiglu", wide, 3 * moved, kernels.swiglu, VECTOR_CALLS, wide)
        rows = (ROWS, WIDTH)
        yield self._work("vector", "add", rows, 3 * moved, ops.add, VECTOR_CALLS, rows, rows)

        def norm(x: Any, w: Any) -> Any:
            return kernels.rms_norm(x, w, 1e-5)

        yield self._work("vector", "rms_norm", rows, 2 * moved, norm, VECTOR_CALLS, rows, (WIDTH,))
        yield self._work("operator", "add", (8,), 0.0, ops.add, OPERATOR_CALLS, (8,), (8,))

    def _work(
        self,
        kind: str,
        name: str,
        shape: tuple[int, ...],
        work: float,
        operator: Any,
        calls: int,
        *inputs: tuple[int, ...],
        extra: tuple[Any, ...] = (),
    ) -> WorkTime:
        generator = np.random.default_rng(0)
        tensors = [ms.Tensor(generator.standard_normal(each).astype(np.float32)) for each in inputs]
        chain = _Chain(operator, calls)
        rounds_s = self.slowest(lambda: chain(*tensors, *extra).asnumpy(), calls)
        return WorkTime(kind=kind, name=name, shape=shape, work=work, rounds_s=rounds_s)

    def dispatch_times(self, sizes: DispatchSizes, name: str) -> Iterator[WorkTime]:
        """The way of one micro-batch through a layer of experts in one process, forward, by these kernels."""
        kernels, (T, K, E, D, F) = self._kernels, dataclasses.astuple(sizes)
        generator = np.random.default_rng(0)
        expert_TK = np.argsort(generator.random((T, E)), axis=1)[:, :K].astype(np.int32)
        source_R = np.argsort(expert_TK.reshape(-1), kind="stable").astype(np.int32)
        row_TK = np.argsort(source_R).astype(np.int32).reshape(T, K)
        counts_E = np.bincount(expert_TK.reshape(-1), minlength=E).astype(np.int32)
        rows = T * K

        def made(*shape: int) -> Any:
            return ms.Tensor(generator.standard_normal(shape).astype(np.float32))

        def sort(expert_TK: Any, gate_TK: Any) -> Any:
            row_TK, _, _ = kernels.sort_by_expert(expert_TK, gate_TK, E, None, False)
            return row_TK

        def act(h_RF: Any, w_EFD: Any, counts_E: Any) -> Any:
            return kernels.swiglu_grouped_matmul(h_RF, w_EFD, counts_E, None)

        experts, row, source, counts = (ms.Tensor(each) for each in (expert_TK, row_TK, source_R, counts_E))
        gate = ms.Tensor(np.full((T, K), 1 / K, np.float32))
        ways: dict[str, tuple[Any, float, tuple[Any, ...]]] = {
            "sort": (sort, 4.0 * rows, (experts, gate)),
            "permute": (kernels.permute, 8.0 * rows * D, (made(T, D), row, source)),
            "first product": (kernels.grouped_matmul, 4.0 * rows * D * F, (made(rows, D), made(E, D, 2 * F), counts)),
            "second product": (act, 2.0 * rows * D * F, (made(rows, 2 * F), made(E, F, D), counts)),
            "combine": (kernels.combine, 4.0 * (rows + T) * D, (made(rows, D), gate, row, source)),
        }
        for way, (operator, work, inputs) in ways.items():
            chain = _Chain(operator, DISPATCH_CALLS)
            rounds_s = self.slowest(partial(_called, chain, inputs), DISPATCH_CALLS)
            kind = "experts" if "product" in way else "rows"
            yield WorkTime(kind=kind, name=f"{name}: {way}", shape=(T, K, E, D, F), work=work, rounds_s=rounds_s)

    def exchange_time(self, sizes: DispatchSizes) -> CommTime:
        """Rows on their way to the experts of all ranks, each of which has as many."""
        world, rows = self._comm.world, sizes.tokens * sizes.top_k
        send_n = np.full(world.size, rows // world.size, np.int32)
        send_n[: rows % world.size] += 1
        recv_n = np.array([each[world.index] for each in exchange_json(self._comm, send_n.tolist())], np.int32)
        x, out = np.ones((rows, sizes.hidden), np.float32), np.empty((int(recv_n.sum()), sizes.hidden), np.float32)
        rounds_s = self.slowest(lambda: self._comm.all_to_all_v(world, x, send_n, recv_n, len(out), out=out), 1)
        return CommTime(verb="all_to_all_v", size=world.size, payload_bytes=x.nbytes, rounds_s=rounds_s)

    def copy_bytes_per_s(self) -> float:
        """What each rank reads and writes of memory while all copy."""
        source = np.ones(COPY_BYTES // 4, np.float32)
        target = np.empty_like(source)
        return 2 * COPY_BYTES / min(self.slowest(lambda: np.copyto(target, source), 1))


def _times(calls: int, call: Callable[[], None]) -> None:
    for _ in range(calls):
        call()


def _called(chain: _Chain, inputs: tuple[Any, ...]) -> None:
    chain(*inputs).asnumpy()


def _dispatched(comm: Comm, sizes: DispatchSizes, rounds: int) -> tuple[list[CommTime], list[WorkTime]]:
    """By both sets of kernels, and the exchange if there is somebody to exchange with."""
    work: list[WorkTime] = []
    for name in ("portable", "auto"):
        kernels = choose(set_device("cpu"), name)
        if not any(each.name.startswith(f"{kernels.name}:") for each in work):
            work += Prober(comm, kernels, rounds).dispatch_times(sizes, kernels.name)
    prober = Prober(comm, choose(set_device("cpu"), "auto"), rounds)
    return ([prober.exchange_time(sizes)] if comm.world.size > 1 else []), work


def probe(asked: dict[str, Any], found: Path) -> None:
    """Measures what is asked for. Raises UserError subclasses."""
    comm = join_by_mpi()
    progress().phase("step", 1)
    kernels = choose(set_device("cpu"), "auto")
    prober = Prober(comm, kernels, asked["rounds"])
    copied = prober.copy_bytes_per_s()
    moved = list(prober.comm_times()) if COMM in asked["what"] else []
    made: list[WorkTime] = []
    if WORK in asked["what"]:
        made += prober.work_times()
    if DISPATCH in asked["what"]:
        exchanged, dispatched = _dispatched(comm, DispatchSizes(**asked["sizes"]), asked["rounds"])
        moved, made = moved + exchanged, made + dispatched
    probed = Probed(
        ranks=comm.world.size,
        threads=int(os.environ.get("OMP_NUM_THREADS", "1")),
        kernels=kernels.name,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // comm.world.size,
        copy_bytes_per_s=copied,
        comm=tuple(moved),
        work=tuple(made),
    )
    if comm.rank == 0:
        replace_file(found, [probed_json(probed)])
    comm.barrier(comm.world)


def main(folder: Path) -> tuple[int, str | None]:
    """Exit code, and for a user's mistake what was wrong."""
    try:
        probe(json.loads((folder / ASKED).read_text(encoding="utf-8")), folder / FOUND)
    except UserError as error:
        return EXIT_USER_ERROR, str(error)
    return 0, None


if __name__ == "__main__":
    given = Path(sys.argv[1])
    sys.exit(as_rank(lambda: main(given)))
