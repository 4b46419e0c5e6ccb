"""What each rank does for test_context.py. Shape letters: see model/kernels/protocol.py."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.model.kernels.rounded import RoundedKernels
from ascend_moe_train.model.kernels.select import choose
from ascend_moe_train.parallel.comm import Comm, RecordingComm
from ascend_moe_train.parallel.context import context_kernels
from ascend_moe_train.parallel.host_ops import HostOps
from tests.parity.context_cases import CASES, Case, data


class _Attention(nn.Cell):
    """(q, k, v, sink, start), dout -> output; gradients of all."""

    def __init__(self, kernels: Any, case: Case) -> None:
        super().__init__()
        self.kernels, self.window, self.has_sinks = kernels, case.window, case.has_sinks
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def attend(self, q: Any, k: Any, v: Any, sink_H: Any, start_BS: Any) -> Any:
        return self.kernels.attention(q, k, v, start_BS, self.window, sink_H if self.has_sinks else None)

    def construct(self, q: Any, k: Any, v: Any, sink_H: Any, start_BS: Any, dout: Any) -> Any:
        out = self.attend(q, k, v, sink_H, start_BS)
        return out, self.gradient(self.attend)(q, k, v, sink_H, start_BS, ops.depend(dout, out))


def on_rank(names: list[str]) -> dict[str, Any]:
    """Output, gradients and collectives of every case on this rank."""
    from ascend_moe_train.parallel.mpi import MpiComm

    comm = MpiComm()
    return {name: attended(CASES[name], comm) for name in names}


def attended(case: Case, comm: Comm) -> dict[str, Any]:
    """One case on the ranks of a comm, which are one cp group."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    recording = RecordingComm(comm)
    collectives = HostOps(recording)
    base = choose("cpu", case.kernels)
    kernels = RoundedKernels(base, ms.float16) if case.precision == "fp16" else base
    made = context_kernels(
        case.context,
        kernels,
        collectives,
        collectives.split("cp", [tuple(range(case.ranks))]),
        seq_len=case.seq_len,
        window=case.window,
        has_sinks=case.has_sinks,
    )
    given, rows = data(case), case.rows(comm.rank)
    dtype = np.float16 if case.precision == "fp16" else np.float32
    q, k, v, dout = (
        ms.Tensor(x[:, rows].astype(dtype)) for x in (given.q_BAHZ, given.k_BAGZ, given.v_BAGY, given.dout_BAHY)
    )
    sink_H, start_BS = ms.Tensor(given.sink_H.astype(np.float32)), ms.Tensor(given.start_BA[:, rows])
    recording.calls.clear()
    out, gradients = _Attention(made, case)(q, k, v, sink_H, start_BS, dout)
    found = dict(zip(("dq", "dk", "dv", "dsink"), gradients, strict=False)) | {"out": out}
    return {name: value.asnumpy().copy() for name, value in found.items()} | {
        "calls": [[call.verb, call.group, call.payload_bytes] for call in recording.calls]
    }
