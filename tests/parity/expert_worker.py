"""What each rank does for test_expert.py. Shape letters: see model/kernels/protocol.py."""

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.model.kernels.rounded import RoundedKernels
from ascend_moe_train.model.kernels.select import choose
from ascend_moe_train.model.router import balance_loss
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.parallel.comm import Comm, RecordingComm
from ascend_moe_train.parallel.expert import apply_expert
from ascend_moe_train.parallel.host_ops import HostOps
from tests.parity.expert_cases import (
    BALANCE,
    CASES,
    DISPATCHED,
    EVEN,
    SKEWED,
    Case,
    Data,
    Z,
    data,
    own_tokens,
    own_weight,
)

NOISE_SEED = 7


class _Layer(nn.Cell):
    """x (T, D), dy (T, D) -> output and figures; gradients of x and the weights."""

    def __init__(self, moe: Any, case: Case, weights: Sequence[Any]) -> None:
        super().__init__()
        self.moe, self.sequences, self.top_k = moe, case.sequences, case.moe_config.top_k
        self.per_sequence = case.moe_config.aux_loss_scope == "sequence"
        self.run = ops.value_and_grad(self.loss, 0, ms.ParameterTuple(weights), has_aux=True)

    def loss(self, x_TD: Any, dy_TD: Any, seed: Any) -> Any:
        y_TD, probability_BE, z, counts_BE, dropped = self.moe(x_TD, self.sequences, seed)
        balance = balance_loss(counts_BE, probability_BE, self.top_k, self.per_sequence)
        total = ops.sum(ops.cast(y_TD, ms.float32) * dy_TD) + BALANCE * balance + Z * z
        return total, y_TD, probability_BE, balance, z, counts_BE, dropped

    def construct(self, x_TD: Any, dy_TD: Any, seed: Any) -> Any:
        return self.run(x_TD, dy_TD, seed)


class _Dispatch(nn.Cell):
    """x (T, D), what is moved (T, 1) -> the rows of this rank's experts (R, 1), and how many of each."""

    def __init__(self, moe: Any, sequences: int) -> None:
        super().__init__()
        self.moe, self.sequences = moe, sequences

    def construct(self, x_TD: Any, moved_T1: Any, seed: Any) -> Any:
        expert_TK, gate_TK, _, _, _ = self.moe.router(x_TD, self.sequences, seed)
        rows_R1, counts_E, _ = self.moe.dispatcher.dispatch(moved_T1, expert_TK, gate_TK)
        return rows_R1, counts_E


def dispatched(case: Case, comm: Comm) -> dict[str, Any]:
    """The numbers of the tokens that this rank's experts see, and how many each sees."""
    given, rows = data(case, EVEN), own_tokens(case, comm.rank)
    moe = _moe_of(case, comm)
    _cut(moe, case, comm.rank, given)
    numbers_T1 = rows.astype(np.float32)[:, None]
    x_TD, seed = given.x_UD[rows].astype(np.float32), np.array([NOISE_SEED], np.int32)
    rows_R1, counts_E = _Dispatch(moe, case.sequences)(ms.Tensor(x_TD), ms.Tensor(numbers_T1), ms.Tensor(seed))
    return {"rows": rows_R1.asnumpy().copy(), "counts": counts_E.asnumpy().copy()}


def on_rank(names: list[str]) -> dict[str, Any]:
    """Results of every case on this rank, by case and routing; of DISPATCHED, what is dispatched too."""
    from ascend_moe_train.parallel.mpi import MpiComm

    comm, found = MpiComm(), {}
    for name in names:
        found[name] = layer_results(CASES[name], comm)
        if name in DISPATCHED:
            found[name]["dispatched"] = dispatched(CASES[name], comm)
    return found


def layer_results(case: Case, comm: Comm) -> dict[str, Any]:
    """Of both routings, from one compiled graph. A comm of one rank computes the whole layer."""
    recording = RecordingComm(comm)
    is_part = comm.world.size > 1
    moe = _moe_of(case, recording)
    weights = _cut(moe, case, comm.rank if is_part else None, data(case, EVEN))
    layer = _Layer(moe, case, list(weights.values()))
    results = {}
    for routing in (EVEN, SKEWED):
        given = data(case, routing)
        moe.router.bias.set_data(ms.Tensor(given.params["router.bias"].astype(np.float32)))
        recording.calls.clear()
        results[routing] = _run(layer, case, given, own_tokens(case, comm.rank) if is_part else slice(None), weights)
        results[routing]["calls"] = [[call.verb, call.group, call.payload_bytes] for call in recording.calls]
    return results


def _moe_of(case: Case, comm: Comm) -> Any:
    """That of a rank, the whole one if there is only one."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    base = choose("cpu", case.kernels)
    kernels = RoundedKernels(base, ms.float16) if case.precision == "fp16" else base
    model = Transformer(case.run.model, kernels, case.seq_len)
    if comm.world.size > 1:
        apply_expert(model, case.mesh, case.run, HostOps(comm))
    return model.layers[0].moe


def _cut(moe: Any, case: Case, rank: int | None, given: Data) -> dict[str, Any]:
    """Gives a layer its part of the weights, all of them without a rank; name -> parameter."""
    cells = {"router": moe.router, "experts": moe.experts}
    weights = {}
    for name, whole in given.params.items():
        cell, attribute = name.split(".")
        index = (slice(None),) if rank is None else own_weight(name, case.mesh.coordinates(rank), case.mesh)
        if index is None:
            delattr(cells[cell], attribute)
            setattr(cells[cell], f"has_{attribute}", False)
            continue
        setattr(cells[cell], attribute, ms.Parameter(ms.Tensor(whole[index].astype(np.float32)), name=name))
        weights[name] = getattr(cells[cell], attribute)
    return weights


def _run(layer: _Layer, case: Case, given: Data, rows: Any, weights: dict[str, Any]) -> dict[str, Any]:
    dtype = np.float16 if case.precision == "fp16" else np.float32
    x, dy = given.x_UD[rows].astype(dtype), given.dy_UD[rows].astype(np.float32)
    seed = ms.Tensor(np.array([NOISE_SEED], np.int32))
    outputs, (dx, grads) = layer(ms.Tensor(x), ms.Tensor(dy), seed)
    names = ("total", "y", "probability", "balance", "z", "counts", "dropped")
    found = {name: value.asnumpy().copy() for name, value in zip(names, outputs, strict=True)}
    found["dx"] = dx.asnumpy().copy()
    found["grads"] = {name: grad.asnumpy().copy() for name, grad in zip(weights, grads, strict=True)}
    return found
