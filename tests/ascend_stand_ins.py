"""Ascend's fused operators as their documentation has them, from MindSpore's portable ones: what surrounds them in
`AscendKernels` can then be run, in fp32, against the oracles. What is undefined there is garbage here.

Shape letters: see model/kernels/protocol.py.
"""

from typing import Any

import mindspore as ms
from mindspore import ops

from ascend_moe_train.model.kernels.ascend import AscendKernels
from ascend_moe_train.model.kernels.constants import numbers
from ascend_moe_train.model.kernels.portable import PortableKernels

Tensor = Any
PORTABLE = PortableKernels()


class StandInKernels(AscendKernels):
    """Every fused operator stood in for, but for the update, whose operator runs on CPUs too."""

    def __init__(self) -> None:
        super().__init__(ms.float32)
        self.is_half = True  # else attention would not be the fused one

    def fused_rms_norm(self, x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
        return PORTABLE.rms_norm(x_TD, w_D, eps)

    def fused_rope(self, x_BSHZ: Tensor, cos_BS1Z: Tensor, sin_BS1Z: Tensor) -> Tensor:
        half = x_BSHZ.shape[-1] // 2
        return x_BSHZ * cos_BS1Z + ops.concat((-x_BSHZ[..., half:], x_BSHZ[..., :half]), -1) * sin_BS1Z

    def fused_attention(self, q_BSHZ: Tensor, k_BSGZ: Tensor, v_BSGZ: Tensor, hidden: Tensor, scale: float) -> Tensor:
        each = q_BSHZ.shape[2] // k_BSGZ.shape[2]
        q = ops.transpose(q_BSHZ, (0, 2, 1, 3))
        k, v = [ops.transpose(ops.repeat_interleave(x, each, 2), (0, 2, 1, 3)) for x in (k_BSGZ, v_BSGZ)]
        scores = ops.BatchMatMul(transpose_b=True)(q, k) * scale
        scores = ops.masked_fill(scores, ops.broadcast_to(hidden, scores.shape), -1e30)
        return ops.transpose(ops.BatchMatMul()(ops.softmax(scores, -1), v), (0, 2, 1, 3))

    def fused_swiglu(self, h_RF: Tensor) -> Tensor:
        return PORTABLE.swiglu(h_RF)

    def fused_permute(self, x_TD: Tensor, key_TK: Tensor, rows: int) -> Tensor:
        T, K = key_TK.shape
        order_N = ops.cast(ops.argsort(ops.reshape(key_TK, (T * K,))), ms.int32)
        return ops.gather(x_TD, order_N // K, 0)[:rows]

    def fused_combine(self, y_ND: Tensor, row_N: Tensor, gate_TK: Tensor) -> Tensor:
        T, K = gate_TK.shape
        y_TKD = ops.reshape(ops.gather(y_ND, row_N, 0), (T, K, y_ND.shape[1]))
        return ops.sum(y_TKD * ops.expand_dims(gate_TK, 2), 1)

    def fused_grouped_matmul(self, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
        counts_E = ops.cast(counts_E, ms.int32)
        y_RF = PORTABLE.grouped_matmul(x_RD, w_EDF, counts_E)
        is_undefined_R1 = ops.expand_dims(numbers(x_RD.shape[0]) >= ops.sum(counts_E), 1)
        return y_RF + ops.cast(is_undefined_R1, ms.float32) * 1e30

    def fused_cross_entropy(self, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        return PORTABLE.cross_entropy(logits_TV, target_T)
