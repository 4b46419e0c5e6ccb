"""Half-precision activations around fp32 kernels. Shape letters: see protocol.py."""

from typing import Any

import mindspore as ms
from mindspore import ops

from ascend_moe_train.model.kernels.composed import ComposedKernels
from ascend_moe_train.model.kernels.protocol import Kernels

Tensor = Any


class RoundedKernels(ComposedKernels):
    """Activations and the weights they meet are rounded to `dtype` (fp16 or bf16); sums, softmax, norms and the loss
    are taken in fp32, weights, moments and their update stay fp32 (Micikevicius et al., 2018, section 3).

    Gradients pass through the same roundings, so fp16 overflows where it would on a device, and needs a loss scale.
    """

    def __init__(self, base: Kernels, dtype: Any) -> None:
        self.base = base
        self.dtype = dtype
        self.name = f"{base.name}, rounded to {str(dtype).lower()}"

    def _wide(self, x: Tensor) -> Tensor:
        return ops.cast(ops.cast(x, self.dtype), ms.float32)

    def _narrow(self, x: Tensor) -> Tensor:
        return ops.cast(x, self.dtype)

    def matmul(self, x_TD: Tensor, w_FD: Tensor) -> Tensor:
        return self._narrow(self.base.matmul(self._wide(x_TD), self._wide(w_FD)))

    def embed(self, token_T: Tensor, w_VD: Tensor) -> Tensor:
        return self._narrow(self.base.embed(token_T, w_VD))

    def rms_norm(self, x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
        return self._narrow(self.base.rms_norm(self._wide(x_TD), w_D, eps))

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple([self._narrow(part) for part in self.base.split(self._wide(x), sizes)])

    def rope(self, x_BSHZ: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        return self._narrow(self.base.rope(self._wide(x_BSHZ), cos_BSZ, sin_BSZ))

    def attention(
        self,
        q_BSHZ: Tensor,
        k_BSGZ: Tensor,
        v_BSGY: Tensor,
        segment_BS: Tensor,
        window: int | None = None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        wide = (self._wide(q_BSHZ), self._wide(k_BSGZ), self._wide(v_BSGY))
        return self._narrow(self.base.attention(*wide, segment_BS, window, sink_H))

    def attention_part(
        self, q_BSHZ: Tensor, k_BJGZ: Tensor, v_BJGY: Tensor, first_BS: Tensor, past_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = (self._wide(q_BSHZ), self._wide(k_BJGZ), self._wide(v_BJGY))
        return self.base.attention_part(*wide, first_BS, past_BS)

    def attention_part_gradient(
        self,
        dout_BSHY: Tensor,
        dot_BHS: Tensor,
        log_sum_BHS: Tensor,
        q_BSHZ: Tensor,
        k_BJGZ: Tensor,
        v_BJGY: Tensor,
        first_BS: Tensor,
        past_BS: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = (self._wide(q_BSHZ), self._wide(k_BJGZ), self._wide(v_BJGY))
        return self.base.attention_part_gradient(dout_BSHY, dot_BHS, log_sum_BHS, *wide, first_BS, past_BS)

    def swiglu(self, h_RF: Tensor) -> Tensor:
        return self._narrow(self.base.swiglu(self._wide(h_RF)))

    def clamped_swiglu(self, h_RF: Tensor, alpha: float, limit: float) -> Tensor:
        return self._narrow(self.base.clamped_swiglu(self._wide(h_RF), alpha, limit))

    def sort_by_expert(
        self, expert_TK: Tensor, gate_TK: Tensor, num_experts: int, capacity: int | None, by_probability: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.base.sort_by_expert(expert_TK, gate_TK, num_experts, capacity, by_probability)

    def permute(self, x_TD: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        return self._narrow(self.base.permute(self._wide(x_TD), row_TK, source_R))

    def combine(self, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        return self._narrow(self.base.combine(self._wide(y_RD), gate_TK, row_TK, source_R))

    def grouped_matmul(self, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
        return self._narrow(self.base.grouped_matmul(self._wide(x_RD), self._wide(w_EDF), counts_E))

    def add_by_expert(self, x_RF: Tensor, b_EF: Tensor, counts_E: Tensor) -> Tensor:
        return self._narrow(self.base.add_by_expert(self._wide(x_RF), self._wide(b_EF), counts_E))

    def cross_entropy(self, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        return self.base.cross_entropy(ops.cast(logits_TV, ms.float32), target_T)

    def square_sum(self, x: Tensor) -> Tensor:
        return self.base.square_sum(x)

    def adamw(self, state: tuple[Tensor, Tensor, Tensor], grad: Tensor, scalars: Tensor, decays: bool) -> Tensor:
        return self.base.adamw(state, grad, scalars, decays)
