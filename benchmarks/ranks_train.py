"""One rank of ranks.py: the demo model in several layouts, built as the trainer builds them, trained when told."""

import resource
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.bench.ladder import PutIn
from ascend_moe_train.bench.put_in import PUT_IN
from ascend_moe_train.cluster.rank import progress, unlink_shared_memory
from ascend_moe_train.config import RunConfig, load_run
from ascend_moe_train.data.loader import Batch
from ascend_moe_train.optim.adamw import AdamW, step_factors
from ascend_moe_train.parallel.apply import parallelize, placed_by
from ascend_moe_train.parallel.comm import Comm, Group, ObservedComm
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.mesh import Mesh, mesh_of
from ascend_moe_train.parallel.mpi import MpiComm
from ascend_moe_train.parallel.pipeline import site_of
from ascend_moe_train.train.building import make_step
from ascend_moe_train.train.persist import Tensors
from ascend_moe_train.train.session import build_model
from ascend_moe_train.train.step import TrainStep
from benchmarks.ranks_orders import Order, Reply, serve

RUN = Path(__file__).parents[1] / "examples" / "demo.yaml"


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class TimedComm(ObservedComm):
    """Notes of every collective of several ranks when it began and ended, by the machine's monotonic clock, and what it
    moved."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.clear()

    def clear(self) -> None:
        """Forgets."""
        self.spans_s: list[tuple[float, float]] = []
        self.payload_bytes = 0

    def _observe(self, verb: str, group: Group, payload: int, call: Callable[[], Any]) -> Any:
        start_s = time.monotonic()
        result = call()
        if group.size > 1:
            self.spans_s.append((start_s, time.monotonic()))
            self.payload_bytes += payload
        return result


class Layout:
    """A model and its training step, in one layout. `put_in`: see bench/put_in.py."""

    def __init__(self, config: RunConfig, comm: Comm, put_in: PutIn | None = None) -> None:
        self.config, self.comm = config, TimedComm(comm)
        self.mesh = mesh_of(config, comm.world.size)
        self.data = comm.split("dp", self.mesh.groups(("dp",)))
        self.number = 0
        self.step = training_step(config, self.mesh, self.comm, put_in)

    def run(self, steps: int) -> Reply:
        """Trains, from where it was. Times of a call are of one clock on all ranks."""
        self.comm.clear()
        step_s = []
        for _ in range(steps):
            batch = own_part(global_batch(self.config, self.number), self.mesh, self.data.index)
            self.number += 1
            control = control_of(self.config, self.number)
            start_s = time.monotonic()
            result = self.step(batch, self.number, control)
            step_s.append(time.monotonic() - start_s)
        return {
            "step_s": step_s,
            "spans_s": self.comm.spans_s,
            "payload_bytes": self.comm.payload_bytes,
            "loss": result.loss,
            "peak_bytes": peak_bytes(),
        }


def training_step(config: RunConfig, mesh: Mesh, comm: Comm, put_in: PutIn | None = None) -> TrainStep:
    """This rank's, as the trainer builds it, from first weights."""
    model, kernels, _ = build_model(config)
    if put_in is not None:
        PUT_IN[put_in](model, config)
    sharded = parallelize(model, mesh, config, HostOps(comm))
    optimizer = AdamW(sharded.weights, config.optim, kernels, sharded.num_dims)
    Tensors(config, placed_by(config, mesh, comm.rank), model, sharded, optimizer).fill_first(None, {})
    site = site_of(config, mesh, comm) if mesh.pp > 1 else None
    return make_step(config, mesh, comm, model, sharded, optimizer, site)


def control_of(config: RunConfig, number: int) -> NDArray[np.float64]:
    """Of a step that counts from 1: the rate of the run, no loss scale, and no loss too high."""
    return np.array([*step_factors(config.optim, config.optim.lr, number), 1.0, np.inf])


def global_batch(config: RunConfig, number: int) -> Batch:
    """Random tokens of a step, the same for every layout."""
    shape = (config.batch.global_sequences, config.data.seq_len)
    tokens = np.random.default_rng(number).integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), np.int32)
    return Batch(
        tokens_BS=tokens[:, :-1],
        targets_BS=tokens[:, 1:],
        segment_BS=np.zeros(shape, np.int32),
        position_BS=np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
    )


def own_part(batch: Batch, mesh: Mesh, dp_rank: int) -> Batch:
    """The sequences of a data parallel rank; which micro-batch they are in makes no difference to random ones."""
    count = len(batch.tokens_BS) // mesh.dp
    rows = slice(dp_rank * count, (dp_rank + 1) * count)
    return Batch(**{name: np.ascontiguousarray(value[rows]) for name, value in vars(batch).items()})


def main(path: str) -> None:
    """Serves until the benchmark is done."""
    comm = MpiComm()
    unlink_shared_memory()
    progress().phase("step")
    layout = cache(lambda put_in, *overrides: Layout(load_run(RUN, overrides), comm, put_in))
    facts = {"mindspore": ms.__version__, "rank": comm.rank, "bytes": peak_bytes()}

    def obey(order: Order) -> Reply:
        return layout(order.get("put_in"), *order["overrides"]).run(order["steps"])

    serve(path, comm.rank, facts, obey)
    progress().phase("done")


if __name__ == "__main__":
    main(sys.argv[1])
