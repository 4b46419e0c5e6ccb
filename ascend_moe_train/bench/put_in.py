"""What rungs of the ladder put into a model that no key of a run stands for, through its ports, before it is cut.

Shape letters: see model/kernels/protocol.py.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import mindspore as ms
from mindspore import ops

from ascend_moe_train.bench.ladder import PutIn
from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.parallel.tensor import blocks
from ascend_moe_train.train.session import build_kernels, set_device

Tensor = Any


class EveryToken:
    """A dispatcher that sorts nothing: every expert is given all tokens, and a gate of zero where it was not chosen."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        """-> the tokens as they are, each expert's gate of each (T, E), and that nothing is dropped."""
        gate_TE = ops.zeros((x_TD.shape[0], self.num_experts), ms.float32)
        for k in range(expert_TK.shape[1]):
            chosen_TE = ops.one_hot(
                expert_TK[:, k], self.num_experts, ms.Tensor(1.0, ms.float32), ms.Tensor(0.0, ms.float32)
            )
            gate_TE = gate_TE + chosen_TE * gate_TK[:, k : k + 1]
        nothing = ops.zeros((1,), ms.int32)
        return x_TD, gate_TE, (nothing, nothing, nothing)

    def combine(self, y_TD: Tensor, gate_TK: Tensor, meta: Any) -> Tensor:
        """What `one_by_one` has added up."""
        return y_TD


def one_by_one(experts: Any, x_TD: Tensor, gate_TE: Tensor) -> Tensor:
    """The port `MoE.compute`: a loop over experts, each a feed-forward over all tokens, as a layer is written that has
    a list of them and no dispatch. It costs E / K times the products that the tokens need."""
    w13 = ops.unstack(experts.w13, 0)
    w2 = ops.unstack(experts.w2, 0)
    y_TD = ops.zeros_like(x_TD)
    for e in range(len(w13)):
        h_TF = ops.matmul(x_TD, w13[e])
        if experts.has_w13_bias:
            h_TF = h_TF + experts.w13_bias[e]
        kernels, clamp = experts.kernels, experts.clamp
        h_TF = kernels.swiglu(h_TF) if clamp is None else kernels.clamped_swiglu(h_TF, clamp[0], clamp[1])
        out_TD = ops.matmul(h_TF, w2[e])
        if experts.has_w2_bias:
            out_TD = out_TD + experts.w2_bias[e]
        y_TD = y_TD + out_TD * gate_TE[:, e : e + 1]
    return y_TD


def put_one_by_one(model: Transformer) -> None:
    """Every expert by itself, in all layers that have some."""
    for layer in _layers(model):
        layer.dispatcher, layer.compute = EveryToken(layer.dispatcher.num_experts), one_by_one


def put_permute(model: Transformer, kernels: Any) -> None:
    """Other kernels for what sorts tokens and brings them back."""
    for layer in _layers(model):
        layer.dispatcher.kernels = kernels


def _layers(model: Transformer) -> list[Any]:
    return [block.moe for block in blocks(model) if block.is_moe]


def _fused_permute(model: Transformer, config: RunConfig) -> None:
    fused = config.run.model_copy(update={"kernels": "auto"})
    put_permute(model, build_kernels(fused, set_device(config.run.device, config.ascend)))


PUT_IN: Mapping[PutIn, Callable[[Transformer, RunConfig], None]] = MappingProxyType(
    {"one_by_one": lambda model, _: put_one_by_one(model), "permute": _fused_permute}
)
