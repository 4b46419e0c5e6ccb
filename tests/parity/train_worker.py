"""What each rank does for test_training.py: trains a tiny model for some steps, the way the trainer does."""

import gc
import os
from dataclasses import asdict
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np

from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.loader import Batch
from ascend_moe_train.optim.adamw import AdamW, step_factors
from ascend_moe_train.parallel.apply import parallelize, placed_by
from ascend_moe_train.parallel.comm import Array, Comm, Group, LocalComm, RecordingComm
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.mesh import Mesh, mesh_of, num_micro
from ascend_moe_train.parallel.pipeline import site_of
from ascend_moe_train.parallel.queued import QueuedComm
from ascend_moe_train.parallel.zero import check_adds_up
from ascend_moe_train.parallel.zero_costs import zero_sent
from ascend_moe_train.train.building import make_step
from ascend_moe_train.train.persist import Tensors
from ascend_moe_train.train.session import build_model
from tests.parity.layouts import STEPS, Case, global_batch

Pieces = dict[str, list[dict[str, Any]]]


class _Counting(RecordingComm):
    """Adds up the token rows, too, that ranks say they send across nodes."""

    crossing = 0

    def all_gather(self, group: Group, x: Array, out: Array | None = None) -> Array:
        if group.name == "ep across nodes":
            self.crossing += int(x.sum())
        return super().all_gather(group, x, out)


def on_rank(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `train` says of every case, in their order."""
    from ascend_moe_train.parallel.mpi import MpiComm

    comm = MpiComm()
    found = []
    for case in cases:
        found.append(train(Case(**case), comm))
        gc.collect()  # compiled graphs are in cycles of references, and many of them do not fit into memory
    return found


def train(case: Case, given: Comm | None = None) -> dict[str, Any]:
    """Figures of each step; this rank's pieces of all saved tensors after the first and the last; its collectives, and
    the payload of those of gradients and weights as it should be."""
    config = case.run()
    inner = given or LocalComm()
    recording = _Counting(inner)
    comm = QueuedComm(recording) if config.parallel.overlap else recording
    mesh = mesh_of(config, recording.world.size)
    data = inner.split("dp", mesh.groups(("dp",)))
    ms.set_seed(0)
    model, kernels, _ = build_model(config)
    collectives = HostOps(comm)
    sharded = parallelize(model, mesh, config, collectives)
    optimizer = AdamW(sharded.weights, config.optim, kernels, sharded.num_dims)
    placed = placed_by(config, mesh, recording.rank)
    check_adds_up(sharded.plan, placed, inner)
    tensors = Tensors(config, placed, model, sharded, optimizer)
    tensors.fill_first(None, {})
    site = site_of(config, mesh, comm, collectives if case.by_device else None) if mesh.pp > 1 else None
    step = make_step(config, mesh, inner, model, sharded, optimizer, site)
    figures, pieces, calls, crossing = [], {}, [], []
    for number in range(STEPS):
        recording.calls.clear()
        recording.crossing = 0
        control = np.array([*step_factors(config.optim, config.optim.lr, number + 1), 1.0, np.inf])
        result = step(_own(global_batch(number, case.sequences), config, mesh, data.index), 1000 + number, control)
        figures.append({**asdict(result), "counts_LE": result.counts_LE})
        crossing.append(recording.crossing)
        calls.append([[call.verb, call.group, call.content, call.payload_bytes] for call in recording.calls])
        if number in (0, STEPS - 1):
            pieces[str(number)] = _pieces(tensors)
    of_weights = zero_sent(sharded.plan, num_micro(config.batch, mesh))
    expected = [[*key, size_bytes] for key, (_, size_bytes) in of_weights.items()]
    return {"figures": figures, "pieces": pieces, "calls": calls, "expected": expected, "crossing": crossing}


def _own(batch: Batch, config: RunConfig, mesh: Mesh, dp_rank: int) -> Batch:
    """This dp rank's rows, micro-batch by micro-batch."""
    micro = config.batch.micro_sequences
    firsts = range(0, len(batch.tokens_BS), micro * mesh.dp)
    rows = [first + dp_rank * micro + row for first in firsts for row in range(micro)]
    return Batch(**{name: np.ascontiguousarray(value[rows]) for name, value in vars(batch).items()})


def _pieces(tensors: Tensors) -> Pieces:
    return {
        name: [{"box": piece.box, "value": piece.array} for piece in portion.pieces]
        for name, portion in tensors.portions().items()
    }
