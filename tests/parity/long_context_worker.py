"""What each rank does for test_long_context.py: a step on one long sequence, and the memory that it took."""

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import numpy as np

from ascend_moe_train.config import RunConfig, run_to_dict
from ascend_moe_train.data.loader import Batch
from ascend_moe_train.optim.adamw import AdamW, step_factors
from ascend_moe_train.parallel.apply import parallelize, placed_by
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.train.building import make_step
from ascend_moe_train.train.persist import Tensors
from ascend_moe_train.train.session import build_model
from tests.parity.layouts import MIXTRAL, run_config

VOCAB = 256


def config_of(seq_len: int, parallel: dict[str, Any]) -> RunConfig:
    """A run of one sequence a step; wide enough that what depends on the length is not lost beside the rest."""
    model = {**MIXTRAL, "vocab_size": VOCAB, "hidden": 128, "num_layers": 2}
    found = run_to_dict(run_config(model, {"global_sequences": 1, "micro_sequences": 1}, parallel))
    return RunConfig.model_validate_json(json.dumps({**found, "data": {**found["data"], "seq_len": seq_len}}))


def on_rank(case: dict[str, Any]) -> dict[str, float]:
    """`loss`, and `peak_bytes` of this process, which must be fresh."""
    from ascend_moe_train.parallel.mpi import MpiComm

    comm = MpiComm()
    config = config_of(case["seq_len"], case["parallel"])
    mesh = mesh_of(config, comm.world.size)
    model, kernels, _ = build_model(config)
    sharded = parallelize(model, mesh, config, HostOps(comm))
    optimizer = AdamW(sharded.weights, config.optim, kernels, sharded.num_dims)
    Tensors(config, placed_by(config, mesh, comm.rank), model, sharded, optimizer).fill_first(None, {})
    step = make_step(config, mesh, comm, model, sharded, optimizer, None)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, config.data.seq_len + 1)).astype(np.int32)
    batch = Batch(
        tokens_BS=np.ascontiguousarray(tokens[:, :-1]),
        targets_BS=np.ascontiguousarray(tokens[:, 1:]),
        segment_BS=np.zeros((1, config.data.seq_len), np.int32),
        position_BS=np.arange(config.data.seq_len, dtype=np.int32)[None],
    )
    result = step(batch, 1, np.array([*step_factors(config.optim, config.optim.lr, 1), 1.0, np.inf]))
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peak_bytes = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return {"loss": result.loss, "peak_bytes": peak_bytes}
