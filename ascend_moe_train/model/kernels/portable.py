"""Kernels from MindSpore's own operators: they run everywhere, and are the oracle of the others.

Shape letters: see protocol.py; M rows of one block, Q blocks.
"""

from typing import Any

import mindspore as ms
from mindspore import ops
from mindspore.ops import constexpr

from ascend_moe_train.model.kernels.composed import ComposedKernels
from ascend_moe_train.model.kernels.constants import numbers
from ascend_moe_train.model.kernels.long_attention import BLOCK_QUERIES, SHORT_QUERIES, long_attention
from ascend_moe_train.model.kernels.scores import along_keys, collected, part_scores, products, weighted

Tensor = Any

BLOCK_ROWS = 64

# primitives that are made in a graph take longer to compile
_matmul, _batch_matmul, _batch_matmul_t = (
    ops.MatMul(transpose_b=True),
    ops.BatchMatMul(),
    ops.BatchMatMul(transpose_b=True),
)
_unstack, _zeros_like, _beside, _behind = ops.Unstack(), ops.ZerosLike(), ops.Concat(1), ops.Concat(2)


def _place_among_equals(expert_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Place of each assignment among those of its expert, in order, and counts per expert."""
    hot_NE = ops.cast(ops.expand_dims(expert_N, 1) == numbers(num_experts), ms.int32)
    upto_NE = ops.cumsum(hot_NE, 0)
    place_N = ops.sum(upto_NE * hot_NE, 1) - 1
    return ops.cast(place_N, ms.int32), ops.cast(ops.sum(hot_NE, 0), ms.int32)


def _exclusive_cumsum(x_E: Tensor) -> Tensor:
    return ops.cumsum(x_E, 0) - x_E


def _expert_of_row(num_rows: int, counts_E: Tensor) -> Tensor:
    """Expert of each row of the buffer, E for rows that are empty: (R,)."""
    row_R1 = ops.expand_dims(numbers(num_rows), 1)
    past_RE = ops.cast(row_R1 >= ops.expand_dims(ops.cumsum(counts_E, 0), 0), ms.int32)
    return ops.cast(ops.sum(past_RE, 1), ms.int32)


@constexpr
def _blocks(num_queries: int) -> tuple[slice, ...]:
    return tuple(slice(start, start + BLOCK_QUERIES) for start in range(0, num_queries, BLOCK_QUERIES))


class PortableKernels(ComposedKernels):
    """Reference implementation of `protocol.Kernels`."""

    name = "portable"

    def matmul(self, x_TD: Tensor, w_FD: Tensor) -> Tensor:
        return _matmul(x_TD, w_FD)

    def embed(self, token_T: Tensor, w_VD: Tensor) -> Tensor:
        return ops.gather(w_VD, token_T, 0)

    def rms_norm(self, x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
        return x_TD * ops.rsqrt(ops.mean(x_TD * x_TD, -1, True) + eps) * w_D

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return ops.split(x, sizes, -1)

    def rope(self, x_BSHZ: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        half = x_BSHZ.shape[-1] // 2
        a, b = x_BSHZ[..., :half], x_BSHZ[..., half:]
        cos, sin = ops.expand_dims(cos_BSZ, 2), ops.expand_dims(sin_BSZ, 2)
        return ops.concat((a * cos - b * sin, b * cos + a * sin), -1)

    def attention(
        self,
        q_BSHZ: Tensor,
        k_BSGZ: Tensor,
        v_BSGY: Tensor,
        segment_BS: Tensor,
        window: int | None = None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        if q_BSHZ.shape[1] > SHORT_QUERIES:
            return long_attention(q_BSHZ, k_BSGZ, v_BSGY, segment_BS, window, sink_H)
        B, S, H, Z = q_BSHZ.shape
        G, Y = k_BSGZ.shape[2], v_BSGY.shape[3]
        q = ops.reshape(ops.transpose(q_BSHZ, (0, 2, 1, 3)), (B * G, H // G * S, Z))
        k = ops.reshape(ops.transpose(k_BSGZ, (0, 2, 1, 3)), (B * G, S, Z))
        v = ops.reshape(ops.transpose(v_BSGY, (0, 2, 1, 3)), (B * G, S, Y))
        scores = ops.reshape(_batch_matmul_t(q, k), (B, H, S, S)) * (Z**-0.5)
        place_S = numbers(S)
        back_SS = ops.expand_dims(place_S, 1) - ops.expand_dims(place_S, 0)
        seen_SS = back_SS >= 0 if window is None else ops.logical_and(back_SS >= 0, back_SS < window)
        same_BSS = ops.expand_dims(segment_BS, 2) == ops.expand_dims(segment_BS, 1)
        seen = ops.expand_dims(ops.logical_and(same_BSS, ops.expand_dims(seen_SS, 0)), 1)
        scores = ops.select(ops.broadcast_to(seen, scores.shape), scores, ops.full_like(scores, -1e30))
        if sink_H is not None:
            sink = ops.broadcast_to(ops.reshape(sink_H, (1, H, 1, 1)), (B, H, S, 1))
            p = ops.softmax(ops.concat((scores, sink), -1), -1)[..., :S]
        else:
            p = ops.softmax(scores, -1)
        out = _batch_matmul(ops.reshape(p, (B * G, H // G * S, S)), v)
        return ops.transpose(ops.reshape(out, (B, H, S, Y)), (0, 2, 1, 3))

    def attention_part(
        self, q_BSHZ: Tensor, k_BJGZ: Tensor, v_BJGY: Tensor, first_BS: Tensor, past_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A block of queries after the other, so that memory is that of one block's scores."""
        outs, log_sums, before = [], [], k_BJGZ
        for block in _blocks(q_BSHZ.shape[1]):
            # all that a block starts from waits, else MindSpore computes the scores of many at once
            q, first, past = [ops.depend(x[:, block], before) for x in (q_BSHZ, first_BS, past_BS)]
            scores = part_scores(q, k_BJGZ, first, past)
            p = ops.softmax(scores, -1)
            # the largest probability is e^(largest score - logsumexp)
            log_sums.append(ops.amax(scores, -1) - ops.log(ops.amax(p, -1)))
            outs.append(weighted(p, v_BJGY))
            before = outs[-1], log_sums[-1]
        return _beside(outs), _behind(log_sums)

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
        """Probabilities are computed again, a block of queries after the other."""
        dq, dk, dv = [], _zeros_like(k_BJGZ), _zeros_like(v_BJGY)
        before = k_BJGZ
        for block in _blocks(q_BSHZ.shape[1]):
            q, first, past, dout = [ops.depend(x[:, block], before) for x in (q_BSHZ, first_BS, past_BS, dout_BSHY)]
            scores = part_scores(q, k_BJGZ, first, past)
            log_sum, dot = [ops.depend(x[:, :, block], before) for x in (log_sum_BHS, dot_BHS)]
            p = ops.exp(scores - along_keys(log_sum, scores))
            dproduct = products(dout, v_BJGY)
            dscores = p * (dproduct - along_keys(dot, scores)) * (q.shape[3] ** -0.5)
            dq.append(weighted(dscores, k_BJGZ))
            dk, dv = dk + collected(dscores, q, k_BJGZ), dv + collected(p, dout, v_BJGY)
            before = dq[-1], dk, dv
        return _beside(dq), dk, dv

    def swiglu(self, h_RF: Tensor) -> Tensor:
        half = h_RF.shape[-1] // 2
        gate = h_RF[..., :half]
        return gate * ops.sigmoid(gate) * h_RF[..., half:]

    def clamped_swiglu(self, h_RF: Tensor, alpha: float, limit: float) -> Tensor:
        half = h_RF.shape[-1] // 2
        highest = ops.full_like(h_RF, limit)
        low = ops.minimum(h_RF, highest)
        # what is not finite stays so: clamped, it would hide from whoever watches the loss
        low = ops.select(ops.isfinite(h_RF), low, h_RF)
        gate, up = low[..., :half], ops.maximum(low[..., half:], -highest[..., half:])
        return (up + 1.0) * gate * ops.sigmoid(alpha * gate)

    def sort_by_expert(
        self, expert_TK: Tensor, gate_TK: Tensor, num_experts: int, capacity: int | None, by_probability: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        T, K = expert_TK.shape
        N = T * K
        expert_N = ops.reshape(expert_TK, (N,))
        place_N, counts_E = _place_among_equals(expert_N, num_experts)
        rows = N
        if capacity is not None:
            rows = min(N, num_experts * capacity)
            kept_N = place_N < capacity
            if by_probability:
                order_N = ops.cast(ops.argsort(-ops.reshape(gate_TK, (N,)), 0), ms.int32)
                sorted_place_N, _ = _place_among_equals(ops.gather(expert_N, order_N, 0), num_experts)
                best_N = ops.tensor_scatter_elements(ops.zeros_like(expert_N), order_N, sorted_place_N, 0)
                kept_N = best_N < capacity
                # dropped assignments move to a group of their own, so that the kept ones are placed without gaps
                place_N, _ = _place_among_equals(
                    ops.select(kept_N, expert_N, ops.full_like(expert_N, num_experts)), num_experts + 1
                )
            counts_E = ops.minimum(counts_E, ops.full_like(counts_E, capacity))
        else:
            kept_N = place_N >= 0
        start_E = ops.cast(_exclusive_cumsum(counts_E), ms.int32)
        row_N = ops.select(kept_N, ops.gather(start_E, expert_N, 0) + place_N, ops.full_like(place_N, rows))
        # one spare row takes every dropped assignment, and is cut off
        source = ops.tensor_scatter_elements(ops.full((rows + 1,), -1, dtype=ms.int32), row_N, numbers(N), 0)
        row_N = ops.select(kept_N, row_N, ops.full_like(row_N, -1))
        return ops.reshape(row_N, (T, K)), source[:rows], counts_E

    def permute(self, x_TD: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        K = row_TK.shape[1]
        filled_R1 = ops.cast(ops.expand_dims(source_R, 1) >= 0, x_TD.dtype)
        token_R = ops.maximum(source_R, ops.zeros_like(source_R)) // K
        return ops.gather(x_TD, token_R, 0) * filled_R1

    def combine(self, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        T, K = row_TK.shape
        kept_TK = ops.cast(row_TK >= 0, y_RD.dtype)
        row_N = ops.reshape(ops.maximum(row_TK, ops.zeros_like(row_TK)), (T * K,))
        y_TKD = ops.reshape(ops.gather(y_RD, row_N, 0), (T, K, y_RD.shape[1]))
        return ops.sum(y_TKD * ops.expand_dims(gate_TK * kept_TK, 2), 1)

    def grouped_matmul(self, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
        """Each expert's rows are padded to whole blocks of M rows, so that one batched matmul with a static number of
        blocks, R / M + E, serves any routing (the idea of MegaBlocks: Gale et al., 2022, section 5)."""
        R, D = x_RD.shape
        E, _, F = w_EDF.shape
        M = BLOCK_ROWS
        Q = R // M + E
        blocks_E = (counts_E + (M - 1)) // M
        first_block_E = _exclusive_cumsum(blocks_E)
        row_R = numbers(R)
        expert_R = _expert_of_row(R, counts_E)
        inside_R = ops.cast(expert_R < E, ms.int32)
        expert_R = ops.cast(ops.minimum(expert_R, ops.full_like(expert_R, E - 1)), ms.int32)
        shift_E = ops.cast(first_block_E * M - _exclusive_cumsum(counts_E), ms.int32)
        place_R = ops.select(inside_R > 0, row_R + ops.gather(shift_E, expert_R, 0), ops.full_like(row_R, Q * M))
        from_row = ops.tensor_scatter_elements(ops.full((Q * M + 1,), R, dtype=ms.int32), place_R, row_R, 0)[: Q * M]
        x_padded = ops.concat((x_RD, ops.zeros((1, D), x_RD.dtype)), 0)
        x_QMD = ops.reshape(ops.gather(x_padded, from_row, 0), (Q, M, D))
        block_Q = numbers(Q)
        end_block_E = ops.cumsum(blocks_E, 0)
        expert_Q = ops.sum(ops.cast(ops.expand_dims(block_Q, 1) >= ops.expand_dims(end_block_E, 0), ms.int32), 1)
        expert_Q = ops.cast(ops.minimum(expert_Q, ops.full_like(expert_Q, E - 1)), ms.int32)
        y_QMF = _batch_matmul(x_QMD, ops.gather(w_EDF, expert_Q, 0))
        y_padded = ops.concat((ops.reshape(y_QMF, (Q * M, F)), ops.zeros((1, F), x_RD.dtype)), 0)
        return ops.gather(y_padded, place_R, 0)

    def add_by_expert(self, x_RF: Tensor, b_EF: Tensor, counts_E: Tensor) -> Tensor:
        expert_R = _expert_of_row(x_RF.shape[0], counts_E)
        return x_RF + ops.gather(ops.concat((b_EF, ops.zeros_like(b_EF[:1])), 0), expert_R, 0)

    def cross_entropy(self, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        counted_T = target_T >= 0
        index_T1 = ops.expand_dims(ops.maximum(target_T, ops.zeros_like(target_T)), 1)
        top_T1 = ops.stop_gradient(ops.amax(logits_TV, 1, True))
        log_sum_T = ops.log(ops.sum(ops.exp(logits_TV - top_T1), 1)) + ops.squeeze(top_T1, 1)
        loss_T = log_sum_T - ops.squeeze(ops.gather_elements(logits_TV, 1, index_T1), 1)
        return loss_T * ops.cast(counted_T, logits_TV.dtype)

    def square_sum(self, x: Tensor) -> Tensor:
        return ops.reshape(ops.sum(x * x), (1,))

    def adamw(self, state: tuple[Tensor, Tensor, Tensor], grad: Tensor, scalars: Tensor, decays: bool) -> Tensor:
        parameter, first, second = state
        lr, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, decay, scale = _unstack(scalars)
        # a skipped step has scale 0, and 0 * inf would be NaN
        g = ops.masked_fill(grad * scale, scale <= 0, 0.0)
        m = beta1 * first + one_minus_beta1 * g
        v = beta2 * second + one_minus_beta2 * g * g
        step = lr * m / (ops.sqrt(v) + eps)
        if decays:
            step = step + decay * parameter
        first = ops.assign(first, m)
        second = ops.assign(second, v)
        return ops.depend(ops.assign(parameter, parameter - step), (first, second))
