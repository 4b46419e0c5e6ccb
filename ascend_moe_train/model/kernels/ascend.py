"""Fused operators of Ascend NPUs, in half precision around fp32 weights. Shape letters: see protocol.py.

Not run on a device yet: their graphs pass MindSpore's front end (`amt check graph`), and `amt selftest` compares every
one of them with the portable kernels on the device itself. On a CPU some of them return nothing without an error, so
they are chosen by device alone (`select.choose`).
"""

from typing import Any

import mindspore as ms
from mindspore import ops
from mindspore.ops.auto_generate import (
    CrossEntropyLoss,
    FlashAttentionScore,
    GroupedMatmulV4,
    MoeTokenPermute,
    MoeTokenUnpermute,
    RmsNorm,
    RotaryPositionEmbedding,
    Swiglu,
)

from ascend_moe_train.model.kernels.constants import numbers
from ascend_moe_train.model.kernels.portable import PortableKernels

Tensor = Any

HEAD_MULTIPLE = 16  # of a head's size, for FlashAttentionScore
HALF_ROTATED = 0  # RotaryPositionEmbedding: pairs (i, i + Z/2)
_BY_COUNTS = (3, 0, 1)  # GroupedMatmulV4: split_item (one output), group_type (rows), group_list_type (counts)

_matmul, _adamw = ops.MatMul(transpose_b=True), ops.AdamWeightDecay()
_rope, _swiglu, _cross_entropy = RotaryPositionEmbedding(), Swiglu(), CrossEntropyLoss()
_permute, _unpermute, _grouped_matmul = MoeTokenPermute(), MoeTokenUnpermute(), GroupedMatmulV4()


class AscendKernels(PortableKernels):
    """`protocol.Kernels` whose activations are of `dtype`, as are weights where they meet them. Router, softmax, loss,
    moments and weights stay fp32. What has no fused operator is portable, and so is attention in fp32 or with sinks.
    """

    def __init__(self, dtype: Any) -> None:
        # held, not inherited: in a graph `super()` of a class's subclass is that class again
        self.portable = PortableKernels()
        self.dtype = dtype
        self.is_half = dtype != ms.float32
        self.name = f"ascend, {str(dtype).lower()}"

    def _own(self, x: Tensor) -> Tensor:
        return ops.cast(x, self.dtype)

    def matmul(self, x_TD: Tensor, w_FD: Tensor) -> Tensor:
        return _matmul(self._own(x_TD), self._own(w_FD))

    def embed(self, token_T: Tensor, w_VD: Tensor) -> Tensor:
        return self._own(ops.gather(w_VD, token_T, 0))

    def rms_norm(self, x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
        return self.fused_rms_norm(self._own(x_TD), self._own(w_D), eps)

    def rope(self, x_BSHZ: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        cos, sin = [self._own(ops.expand_dims(ops.concat((x, x), -1), 2)) for x in (cos_BSZ, sin_BSZ)]
        return self.fused_rope(x_BSHZ, cos, sin)

    def attention(
        self,
        q_BSHZ: Tensor,
        k_BSGZ: Tensor,
        v_BSGY: Tensor,
        segment_BS: Tensor,
        window: int | None = None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """The mask is whole, (B, 1, S, S) of one byte: documents end anywhere."""
        if sink_H is not None or not self.is_half:
            q, k, v = [ops.cast(x, ms.float32) for x in (q_BSHZ, k_BSGZ, v_BSGY)]
            return self._own(self.portable.attention(q, k, v, segment_BS, window, sink_H))
        Z, Y = q_BSHZ.shape[3], v_BSGY.shape[3]
        room = -(-Z // HEAD_MULTIPLE) * HEAD_MULTIPLE
        q, k, v = _widened(q_BSHZ, room), _widened(k_BSGZ, room), _widened(v_BSGY, room)
        hidden = ops.expand_dims(_hidden(segment_BS, window), 1)
        return self.fused_attention(q, k, v, hidden, Z**-0.5)[..., :Y]

    def attention_part(
        self, q_BSHZ: Tensor, k_BJGZ: Tensor, v_BJGY: Tensor, first_BS: Tensor, past_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = [ops.cast(x, ms.float32) for x in (q_BSHZ, k_BJGZ, v_BJGY)]
        return self.portable.attention_part(q, k, v, first_BS, past_BS)

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
        dout, q, k, v = [ops.cast(x, ms.float32) for x in (dout_BSHY, q_BSHZ, k_BJGZ, v_BJGY)]
        return self.portable.attention_part_gradient(dout, dot_BHS, log_sum_BHS, q, k, v, first_BS, past_BS)

    def swiglu(self, h_RF: Tensor) -> Tensor:
        return self.fused_swiglu(self._own(h_RF))

    def permute(self, x_TD: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        """By rows as if they were experts, each with one row; what is dropped comes last, and is cut off."""
        T, K = row_TK.shape
        R = source_R.shape[0]
        if R > T * K:
            return self.portable.permute(x_TD, row_TK, source_R)
        key_TK = ops.select(row_TK >= 0, row_TK, ops.full_like(row_TK, T * K))
        filled_R1 = ops.cast(ops.expand_dims(source_R, 1) >= 0, x_TD.dtype)
        return self.fused_permute(x_TD, key_TK, R) * filled_R1

    def combine(self, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        """The operator takes no row twice, so what is dropped gets rows of its own after the others, and no weight."""
        T, K = row_TK.shape
        N, (R, D) = T * K, y_RD.shape
        if R > N:
            return self.portable.combine(y_RD, self._own(gate_TK), row_TK, source_R)
        key_N = ops.reshape(ops.select(row_TK >= 0, row_TK, ops.full_like(row_TK, N)), (N,))
        order_N = ops.cast(ops.argsort(key_N), ms.int32)
        row_N = ops.tensor_scatter_elements(ops.zeros_like(key_N), order_N, numbers(N), 0)
        if R < N:
            y_RD = ops.concat((y_RD, ops.broadcast_to(_nothing(y_RD), (N - R, D))), 0)
        gate_TK = self._own(gate_TK * ops.cast(row_TK >= 0, gate_TK.dtype))
        return self.fused_combine(y_RD, row_N, gate_TK)

    def grouped_matmul(self, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
        """What the operator leaves in rows that no expert has is not said, forward and backward: it is made zero."""
        empty_R1 = ops.expand_dims(numbers(x_RD.shape[0]) >= ops.sum(counts_E), 1)
        x_RD = ops.masked_fill(self._own(x_RD), empty_R1, 0.0)
        found = self.fused_grouped_matmul(x_RD, self._own(w_EDF), ops.cast(counts_E, ms.int64))
        return ops.masked_fill(found, empty_R1, 0.0)

    def add_by_expert(self, x_RF: Tensor, b_EF: Tensor, counts_E: Tensor) -> Tensor:
        return self.portable.add_by_expert(x_RF, self._own(b_EF), counts_E)

    def cross_entropy(self, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        return self.fused_cross_entropy(ops.cast(logits_TV, ms.float32), target_T)

    def adamw(self, state: tuple[Tensor, Tensor, Tensor], grad: Tensor, scalars: Tensor, decays: bool) -> Tensor:
        """The operator multiplies the decay by the learning rate once more, and knows no scale of the gradient."""
        parameter, first, second = state
        lr, beta1, beta2, eps, decay, scale = [scalars[i] for i in (0, 1, 2, 5, 6, 7)]
        g = ops.masked_fill(grad * scale, scale <= 0, 0.0)
        decay = decay / ops.maximum(lr, ops.full_like(lr, 1e-30)) if decays else ops.zeros_like(decay)
        return self.fused_update(parameter, first, second, lr, beta1, beta2, eps, decay, g)

    def fused_rms_norm(self, x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
        """The operators alone, from here on, in the words of this project."""
        return RmsNorm(eps)(x_TD, w_D)[0]

    def fused_rope(self, x_BSHZ: Tensor, cos_BS1Z: Tensor, sin_BS1Z: Tensor) -> Tensor:
        """Pairs (i, i + Z/2), with an angle in both places."""
        return _rope(x_BSHZ, cos_BS1Z, sin_BS1Z, HALF_ROTATED)

    def fused_attention(self, q_BSHZ: Tensor, k_BSGZ: Tensor, v_BSGZ: Tensor, hidden: Tensor, scale: float) -> Tensor:
        """Softmax attention where `hidden` (B, 1, S, S) is False."""
        flash = FlashAttentionScore(q_BSHZ.shape[2], scale_value=scale, input_layout="BSND")
        return flash(q_BSHZ, k_BSGZ, v_BSGZ, None, None, None, hidden)[3]

    def fused_swiglu(self, h_RF: Tensor) -> Tensor:
        """silu(first half) * second half of the columns."""
        return _swiglu(h_RF, -1)

    def fused_permute(self, x_TD: Tensor, key_TK: Tensor, rows: int) -> Tensor:
        """The first `rows` of the assignments' tokens in the order of their keys."""
        return _permute(x_TD, key_TK, rows)[0]

    def fused_combine(self, y_ND: Tensor, row_N: Tensor, gate_TK: Tensor) -> Tensor:
        """Each token's sum of its rows, each row once, times the gates."""
        return _unpermute(y_ND, row_N, gate_TK, False, None)

    def fused_grouped_matmul(self, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
        """Rows of no expert are undefined, in the result and in the gradient."""
        none = (None,) * 6
        return _grouped_matmul((x_RD,), (w_EDF,), *none, counts_E, None, None, None, *_BY_COUNTS)[0]

    def fused_cross_entropy(self, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        """-log softmax(logits)[target], 0 where the target is -1."""
        return _cross_entropy(logits_TV, target_T, None, "none", -1, 0.0, 0.0, False)[0]

    def fused_update(self, *inputs: Tensor) -> Tensor:
        """Of weight, moments, lr, beta1, beta2, eps, decay and gradient, in place."""
        return _adamw(*inputs)[0]


def _widened(x_BSHZ: Tensor, room: int) -> Tensor:
    """Heads with zeros after their own columns, which change neither scores nor sums."""
    B, S, H, Z = x_BSHZ.shape
    return x_BSHZ if room == Z else ops.concat((x_BSHZ, ops.broadcast_to(_nothing(x_BSHZ), (B, S, H, room - Z))), -1)


def _hidden(segment_BS: Tensor, window: int | None) -> Tensor:
    """Whether a query (first) must not see a key: (B, S, S), bool."""
    place_S = numbers(segment_BS.shape[1])
    back_SS = ops.expand_dims(place_S, 1) - ops.expand_dims(place_S, 0)
    out_SS = back_SS < 0 if window is None else ops.logical_or(back_SS < 0, back_SS >= window)
    other_BSS = ops.expand_dims(segment_BS, 2) != ops.expand_dims(segment_BS, 1)
    return ops.logical_or(other_BSS, ops.expand_dims(out_SS, 0))


def _nothing(x: Tensor) -> Tensor:
    """A zero of x's dtype that comes after x: what is made of constants alone becomes a constant of the graph."""
    return ops.cast(ops.depend(numbers(1), x), x.dtype)
