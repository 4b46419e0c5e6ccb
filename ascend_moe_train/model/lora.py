"""Low-rank adapters in a finished model (LoRA: Hu et al., 2021, arXiv 2106.09685), put there from outside.

Shape letters: see kernels/protocol.py; W width of an adapter (r of LoRA).
"""

import zlib
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from ascend_moe_train.model.adapters import Adapter, adapters
from ascend_moe_train.model.config import LoraConfig, ModelConfig
from ascend_moe_train.model.experts import GroupedExperts
from ascend_moe_train.model.layers import Linear
from ascend_moe_train.model.transformer import Transformer

Tensor = Any


class LoraLinear(Linear):
    """x W^T + alpha / r * (x A^T) B^T: (T, D) -> (T, F). The weight keeps its name."""

    def __init__(self, base: Linear, scale: float, adapter: Adapter, seed: int) -> None:
        nn.Cell.__init__(self)  # the weights are those of `base`
        self.kernels, self.has_bias = base.kernels, base.has_bias
        self.scale = scale
        self.weight = base.weight
        if base.has_bias:
            self.bias = base.bias
        self.lora_a, self.lora_b = _pair(adapter, seed)

    def product(self, x_TD: Tensor) -> Tensor:
        low_TF = self.kernels.matmul(self.kernels.matmul(x_TD, self.lora_a), self.lora_b)
        return self.kernels.matmul(x_TD, self.weight) + low_TF * self.scale


class LoraExperts(GroupedExperts):
    """`GroupedExperts` with an adapter for each expert's w13, w2, or both: (R, D), rows per expert (E,) -> (R, D)."""

    def __init__(self, base: GroupedExperts, scale: float, by_weight: dict[str, Adapter], seed: int) -> None:
        nn.Cell.__init__(self)  # the weights are those of `base`
        self.kernels, self.has_bias = base.kernels, base.has_bias
        self.is_clamped, self.alpha, self.limit = base.is_clamped, base.alpha, base.limit
        self.scale = scale
        self.w13, self.w2 = base.w13, base.w2
        if base.has_bias:
            self.w13_bias, self.w2_bias = base.w13_bias, base.w2_bias
        self.adapts_w13, self.adapts_w2 = "w13" in by_weight, "w2" in by_weight
        if self.adapts_w13:
            self.w13_lora_a, self.w13_lora_b = _pair(by_weight["w13"], seed)
        if self.adapts_w2:
            self.w2_lora_a, self.w2_lora_b = _pair(by_weight["w2"], seed)

    def w13_product(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        grouped_matmul = self.kernels.grouped_matmul
        h_RF = grouped_matmul(x_RD, self.w13, counts_E)
        if self.adapts_w13:
            low_RW = grouped_matmul(x_RD, self.w13_lora_a, counts_E)
            h_RF = h_RF + grouped_matmul(low_RW, self.w13_lora_b, counts_E) * self.scale
        return h_RF

    def w2_product(self, h_RF: Tensor, counts_E: Tensor) -> Tensor:
        grouped_matmul = self.kernels.grouped_matmul
        y_RD = grouped_matmul(h_RF, self.w2, counts_E)
        if self.adapts_w2:
            low_RW = grouped_matmul(h_RF, self.w2_lora_a, counts_E)
            y_RD = y_RD + grouped_matmul(low_RW, self.w2_lora_b, counts_E) * self.scale
        return y_RD


def apply_lora(model: Transformer, config: ModelConfig, lora: LoraConfig, seed: int) -> None:
    """Freezes every weight and puts adapters beside those that `lora` names; the outputs stay what they were.

    A is uniform within 1 / sqrt(inner size), a function of (seed, its name); B is zero.
    """
    for _, parameter in model.weights():
        parameter.requires_grad = False
    if model.buffers():
        model.balance_bias_rate = 0.0  # its biases are frozen too
    by_cell: dict[str, dict[str, Adapter]] = {}
    for adapter in adapters(config, lora):
        place, _, attribute = adapter.weight.rpartition(".")
        by_cell.setdefault(place, {})[attribute] = adapter
    cells = dict(model.cells_and_names())
    for place, by_weight in by_cell.items():
        parent, _, attribute = place.rpartition(".")
        base = cells[place]
        new = (
            LoraLinear(base, lora.alpha / lora.r, by_weight["weight"], seed)
            if isinstance(base, Linear)
            else LoraExperts(base, lora.alpha / lora.r, by_weight, seed)
        )
        setattr(cells[parent], attribute, new)
    for name, parameter in model.weights():
        parameter.name = name  # a cell put into another renames its parameters by itself alone, alike in every layer


def _pair(adapter: Adapter, seed: int) -> tuple[Any, Any]:
    """The parameters A and B at their start."""
    generator = np.random.default_rng([seed, zlib.crc32(adapter.a.encode())])
    inner = adapter.a_shape[-1] if len(adapter.a_shape) == 2 else adapter.a_shape[-2]
    a: NDArray[np.float32] = generator.uniform(-1, 1, adapter.a_shape).astype(np.float32) / np.float32(np.sqrt(inner))
    b = np.zeros(adapter.b_shape, np.float32)
    return ms.Parameter(ms.Tensor(a)), ms.Parameter(ms.Tensor(b))
