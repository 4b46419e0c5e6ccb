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
from ascend_moe_train.model.config import LoraConfig, ModelConfig, MoEConfig
from ascend_moe_train.model.experts import GroupedExperts
from ascend_moe_train.model.layers import Linear
from ascend_moe_train.model.transformer import Transformer

Tensor = Any


class LoraLinear(Linear):
    """x W^T + alpha / r * (x A^T) B^T, plus a bias if there is one: (T, D) -> (T, F)."""

    def __init__(self, base: Linear, scale: float, adapter: Adapter, seed: int) -> None:
        outer, inner = base.weight.shape
        super().__init__(inner, outer, base.kernels, base.has_bias)
        _take_over(self, base)
        self.scale = scale
        self.lora_a, self.lora_b = _pair(adapter, seed)

    def product(self, x_TD: Tensor) -> Tensor:
        """x W^T with what the adapter adds."""
        low_TF = self.kernels.matmul(self.kernels.matmul(x_TD, self.lora_a), self.lora_b)
        return self.kernels.matmul(x_TD, self.weight) + low_TF * self.scale

    def of_swiglu(self, h_TF: Tensor) -> Tensor:
        """swiglu(h) W^T with what the adapter adds; h has twice as many columns."""
        return self.product(self.kernels.swiglu(h_TF))


class LoraExperts(GroupedExperts):
    """Experts with an adapter of each one's w13, w2, or both: (R, D), rows per expert (E,) -> (R, D)."""

    def __init__(
        self, base: GroupedExperts, config: MoEConfig, scale: float, by_weight: dict[str, Adapter], seed: int
    ) -> None:
        super().__init__(base.w13.shape[1], config, base.kernels)
        _take_over(self, base)
        self.scale = scale
        self.adapts_w13, self.adapts_w2 = "w13" in by_weight, "w2" in by_weight
        if self.adapts_w13:
            self.w13_lora_a, self.w13_lora_b = _pair(by_weight["w13"], seed)
        if self.adapts_w2:
            self.w2_lora_a, self.w2_lora_b = _pair(by_weight["w2"], seed)

    def w13_product(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """(R, D) -> (R, 2F)."""
        h_RF = self.kernels.grouped_matmul(x_RD, self.w13, counts_E)
        if self.adapts_w13:
            low_RW = self.kernels.grouped_matmul(x_RD, self.w13_lora_a, counts_E)
            h_RF = h_RF + self.kernels.grouped_matmul(low_RW, self.w13_lora_b, counts_E) * self.scale
        return h_RF

    def w2_product(self, h_RF: Tensor, counts_E: Tensor) -> Tensor:
        """Of the activated: (R, 2F) -> (R, D)."""
        if not self.adapts_w2:
            return super().w2_product(h_RF, counts_E)
        h_RF = self.activated(h_RF)
        low_RW = self.kernels.grouped_matmul(h_RF, self.w2_lora_a, counts_E)
        low_RD = self.kernels.grouped_matmul(low_RW, self.w2_lora_b, counts_E)
        return self.kernels.grouped_matmul(h_RF, self.w2, counts_E) + low_RD * self.scale

    def activated(self, h_RF: Tensor) -> Tensor:
        """(R, 2F) -> (R, F)."""
        if self.clamp is None:
            return self.kernels.swiglu(h_RF)
        return self.kernels.clamped_swiglu(h_RF, self.clamp[0], self.clamp[1])


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
        base, scale = cells[place], lora.alpha / lora.r
        if isinstance(base, Linear):
            setattr(cells[parent], attribute, LoraLinear(base, scale, by_weight["weight"], seed))
        elif config.moe is not None:
            setattr(cells[parent], attribute, LoraExperts(base, config.moe, scale, by_weight, seed))
    for name, parameter in model.weights():
        parameter.name = name  # a cell put into another renames its parameters by itself alone, alike in every layer


def _take_over(new: nn.Cell, base: nn.Cell) -> None:
    """Gives a new cell the parameters of the one that it replaces."""
    for name, parameter in base.parameters_and_names():
        setattr(new, name, parameter)


def _pair(adapter: Adapter, seed: int) -> tuple[Any, Any]:
    """The parameters A and B at their start."""
    generator = np.random.default_rng([seed, zlib.crc32(adapter.a.encode())])
    inner = adapter.a_shape[-1] if len(adapter.a_shape) == 2 else adapter.a_shape[-2]
    a: NDArray[np.float32] = generator.uniform(-1, 1, adapter.a_shape).astype(np.float32) / np.float32(np.sqrt(inner))
    b = np.zeros(adapter.b_shape, np.float32)
    return ms.Parameter(ms.Tensor(a)), ms.Parameter(ms.Tensor(b))
