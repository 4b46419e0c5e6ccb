"""Attention from MindSpore's own operators in memory that grows with the sequence, not with its square.

A loop of the graph goes through blocks of R queries, so that the graph does not grow with their number either. Inputs
and results are kept for the way back, which computes probabilities again. Within a block every key is multiplied,
whether it is seen or not. Shape letters: see protocol.py.
"""

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from ascend_moe_train.model.kernels.constants import numbers
from ascend_moe_train.model.kernels.scores import along_keys, collected, part_scores, products, weighted

Tensor = Any

# the scores of so many queries are in memory at once
BLOCK_QUERIES = 256
# up to here all scores at once take no more than what else there is of a sequence
SHORT_QUERIES = 512

# primitives: functions of mindspore.ops are graphs of their own, which MindSpore loses inside another's gradient
_zeros_like, _write_rows, _add_rows = ops.ZerosLike(), ops.TensorScatterUpdate(), ops.TensorScatterAdd()
_rows_of, _softmax, _largest = ops.Gather(), ops.Softmax(-1), ops.ReduceMax()


def long_attention(
    q_BSHZ: Tensor, k_BSGZ: Tensor, v_BSGY: Tensor, segment_BS: Tensor, window: int | None, sink_H: Tensor | None
) -> Tensor:
    """See `Kernels.attention`, for a block of queries or more."""
    B, S, H, _ = q_BSHZ.shape
    place_BS = ops.broadcast_to(ops.expand_dims(numbers(S), 0), (B, S))
    # segments do not fall, so that where one begins is found by bisection
    first_BS = ops.cast(ops.searchsorted(ops.stop_gradient(segment_BS), segment_BS), ms.int32)
    if window is not None:
        first_BS = ops.maximum(first_BS, place_BS - (window - 1))
    out, log_sum_BHS = _in_blocks(q_BSHZ, k_BSGZ, v_BSGY, first_BS, place_BS + 1)
    if sink_H is None:
        return out
    sink_BHS = ops.broadcast_to(ops.reshape(sink_H, (1, H, 1)), log_sum_BHS.shape)
    share_BSH = ops.transpose(ops.sigmoid(log_sum_BHS - sink_BHS), (0, 2, 1))
    return out * ops.broadcast_to(ops.expand_dims(share_BSH, 3), out.shape)


class _InBlocks(nn.Cell):
    """(q, k, v, first and past of `Kernels.attention_part`) -> output, and logsumexp of the scores (B, H, S)."""

    def construct(
        self, q_BSHZ: Tensor, k_BSGZ: Tensor, v_BSGY: Tensor, first_BS: Tensor, past_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        B, S, H, _ = q_BSHZ.shape
        q_SBHZ, first_SB, past_SB = (
            _places_first(q_BSHZ),
            ops.transpose(first_BS, (1, 0)),
            ops.transpose(past_BS, (1, 0)),
        )
        out_SBHY = _zeros_like(ops.broadcast_to(q_SBHZ[..., :1], (S, B, H, v_BSGY.shape[3])))
        log_sum_SBH = _zeros_like(q_SBHZ[..., 0])
        i = _zeros_like(first_SB[0, :1])
        while i < _num_blocks(S):
            row_R = _rows(i, S)
            first, past = _taken(first_SB, row_R, (1, 0)), _taken(past_SB, row_R, (1, 0))
            scores = part_scores(_taken(q_SBHZ, row_R, (1, 0, 2, 3)), k_BSGZ, first, past)
            p = _softmax(scores)
            # the largest probability is e^(largest score - logsumexp)
            log_sum_BHR = _largest(scores, -1) - ops.log(_largest(p, -1))
            row_R1 = ops.expand_dims(row_R, 1)
            out_SBHY = _write_rows(out_SBHY, row_R1, _places_first(weighted(p, v_BSGY)))
            log_sum_SBH = _write_rows(log_sum_SBH, row_R1, ops.transpose(log_sum_BHR, (2, 0, 1)))
            i = i + 1
        return ops.transpose(out_SBHY, (1, 0, 2, 3)), ops.transpose(log_sum_SBH, (1, 2, 0))

    def bprop(
        self, q_BSHZ: Tensor, k_BSGZ: Tensor, v_BSGY: Tensor, first_BS: Tensor, past_BS: Tensor, out: Any, dout: Any
    ) -> tuple[Tensor, ...]:
        S, scale = q_BSHZ.shape[1], q_BSHZ.shape[3] ** -0.5
        q_SBHZ, first_SB, past_SB = (
            _places_first(q_BSHZ),
            ops.transpose(first_BS, (1, 0)),
            ops.transpose(past_BS, (1, 0)),
        )
        dout_SBHY, log_sum_SBH = _places_first(dout[0]), ops.transpose(out[1], (2, 0, 1))
        dot_SBH = _places_first_of_sums(ops.sum(dout[0] * out[0], 3)) - ops.transpose(dout[1], (2, 0, 1))
        dq_SBHZ, dk, dv = _zeros_like(q_SBHZ), _zeros_like(k_BSGZ), _zeros_like(v_BSGY)
        i = _zeros_like(first_SB[0, :1])
        while i < _num_blocks(S):
            row_R = _rows(i, S)
            # rows of the last block that were in the one before have no gradient a second time
            is_new_R = ops.cast(row_R >= i * BLOCK_QUERIES, dout_SBHY.dtype)
            dout_BRHY = _taken(dout_SBHY, row_R, (1, 0, 2, 3))
            dout_BRHY = dout_BRHY * ops.broadcast_to(ops.reshape(is_new_R, (1, -1, 1, 1)), dout_BRHY.shape)
            dot_BHR = _taken(dot_SBH, row_R, (1, 2, 0))
            dot_BHR = dot_BHR * ops.broadcast_to(ops.reshape(is_new_R, (1, 1, -1)), dot_BHR.shape)
            q = _taken(q_SBHZ, row_R, (1, 0, 2, 3))
            scores = part_scores(q, k_BSGZ, _taken(first_SB, row_R, (1, 0)), _taken(past_SB, row_R, (1, 0)))
            p = ops.exp(scores - along_keys(_taken(log_sum_SBH, row_R, (1, 2, 0)), scores))
            dscores = p * (products(dout_BRHY, v_BSGY) - along_keys(dot_BHR, scores))
            dq_BRHZ = weighted(dscores, k_BSGZ) * scale
            dq_SBHZ = _add_rows(dq_SBHZ, ops.expand_dims(row_R, 1), _places_first(dq_BRHZ))
            dk, dv = dk + collected(dscores, q * scale, k_BSGZ), dv + collected(p, dout_BRHY, v_BSGY)
            i = i + 1
        return ops.transpose(dq_SBHZ, (1, 0, 2, 3)), dk, dv, _zeros_like(first_BS), _zeros_like(past_BS)


_in_blocks = _InBlocks()


def _num_blocks(S: int) -> int:
    return -(-S // BLOCK_QUERIES)


def _rows(i: Tensor, S: int) -> Tensor:
    """The queries of block i (1,), of which the last begins earlier so that it is whole: (R,)."""
    start = ops.minimum(i * BLOCK_QUERIES, _zeros_like(i) + (S - BLOCK_QUERIES))
    return ops.broadcast_to(start, (BLOCK_QUERIES,)) + numbers(BLOCK_QUERIES)


def _taken(x_S: Tensor, row_R: Tensor, order: tuple[int, ...]) -> Tensor:
    """Some rows, with the dims in another order."""
    return ops.transpose(_rows_of(x_S, row_R, 0), order)


def _places_first(x_BSHZ: Tensor) -> Tensor:
    """(S, B, H, Z)."""
    return ops.transpose(x_BSHZ, (1, 0, 2, 3))


def _places_first_of_sums(x_BSH: Tensor) -> Tensor:
    """(S, B, H)."""
    return ops.transpose(x_BSH, (1, 0, 2))
