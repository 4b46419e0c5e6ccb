"""What each rank does for test_reduction.py."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.model.kernels.portable import PortableKernels
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.parallel.comm import RecordingComm
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.shards import take
from ascend_moe_train.parallel.tensor import cut_weights
from ascend_moe_train.parallel.zero import Sharded, apply_zero
from ascend_moe_train.parallel.zero_costs import zero_traffic
from tests.parity.reduction_cases import CASES, QKV, ROWS, Case, brought, figures, random, total


class _Reduce(nn.Cell):
    """figures (5,), gradients -> figures and squares of the step, reduced gradients."""

    def __init__(self, reduction: Any) -> None:
        super().__init__()
        self.reduction, self.kernels = reduction, PortableKernels()

    def construct(self, figures: Any, *grads: Any) -> Any:
        grads = self.reduction.of_step(self.reduction.of_micro(grads))
        square_P = ops.concat([self.kernels.square_sum(grad) for grad in self.reduction.counted(grads)])
        return *self.reduction.across(figures, square_P, grads), *grads


class _Product(nn.Cell):
    """x, dy -> y, and the gradients of x and the weight of a linear layer."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear
        self.run = ops.value_and_grad(self.weighed, 0, ms.ParameterTuple([linear.weight]), has_aux=True)

    def weighed(self, x: Any, dy: Any) -> Any:
        y = self.linear(x)
        return ops.sum(y * dy), y

    def construct(self, x: Any, dy: Any) -> Any:
        (_, y), (dx, grads) = self.run(x, dy)
        return y, dx, grads[0]


def on_rank(names: list[str]) -> dict[str, Any]:
    """What every case gives on this rank."""
    from ascend_moe_train.parallel.mpi import MpiComm

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    comm = RecordingComm(MpiComm())
    return {name: reduced(CASES[name], comm) for name in names}


def reduced(case: Case, comm: RecordingComm) -> dict[str, Any]:
    """Figures, squares, reduced gradients by name with the places of their elements, traffic and its formula."""
    placed = case.placed(comm.rank)
    model = Transformer(case.run.model, PortableKernels(), 8)
    cut_weights(model, placed)
    sharded = apply_zero(model, placed, case.mesh, case.run, HostOps(comm))
    grads = [_given(each, placed, case, sharded, comm.rank) for each in sharded.owned]
    comm.calls.clear()
    step = _Reduce(sharded.reduction)
    found = [x.asnumpy().copy() for x in step(*map(ms.Tensor, (figures(case, comm.rank), *grads)))]
    in_backward = {share.name for share in sharded.plan.shares if share.form == "on_use"}
    sent = {" ".join(key): list(value) for key, value in comm.totals().items()}
    expected = zero_traffic(sharded.plan, 1)
    return {
        "figures": found[0],
        "squares": dict(zip(sharded.names, found[1].tolist(), strict=True)),
        "grads": {
            owned.name: {"start": owned.start, "stop": owned.stop, "value": grad}
            for owned, grad in zip(sharded.owned, found[2:], strict=True)
        },
        "sent": {key: value for key, value in sent.items() if not key.startswith("all_gather")},
        "expected_sent": {" ".join(k): list(v) for k, v in expected.items() if k[0] != "all_gather"},
        "product": _product(model, placed, sharded, comm.rank) if QKV in in_backward else None,
    }


def _given(owned: Any, placed: Any, case: Case, sharded: Sharded, rank: int) -> Any:
    """What the backward pass hands over: of weights put together on use, parts that are reduced already."""
    share = next(share for share in sharded.plan.shares if share.name == owned.name)
    if share.form != "on_use":
        return brought(owned.name, placed[owned.name], rank)
    part = np.zeros(share.part, np.float32)
    part[: owned.stop - owned.start] = take(total(owned.name, placed[owned.name]), placed[owned.name]).reshape(-1)[
        owned.start : owned.stop
    ]
    return part


def _product(model: Transformer, placed: Any, sharded: Sharded, rank: int) -> list[Any]:
    """y, dx and the part of dw of a layer whose weight is put together on use."""
    placement = placed[QKV]
    sharded.fill(QKV, take(random(QKV, 0, placement.shape), placement))
    graph = _Product(model.layers[0].attn.qkv)
    x, dy = (
        random("x", placement.index, (ROWS, placement.shape[1])),
        random("dy", rank, (ROWS, placement.local_shape[0])),
    )
    return [each.asnumpy().copy() for each in graph(ms.Tensor(x), ms.Tensor(dy))]
