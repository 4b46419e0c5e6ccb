"""Grouped-query causal attention inside documents (Ainslie et al., 2023).

B batch, S sequence (queries), J sequence (keys), H query heads, G key-value heads (query head h reads h // (H/G)),
Z head size, Y head size of values.
"""

import numpy as np

from tests.oracle.arrays import F64, I64, Flags, in_float64, softmax, softmax_vjp


def visible(segment_BS: I64, window: int | None = None) -> Flags:
    """Return (B, S, J): query s sees key j when j <= s, both lie in the same document, and s - j < window."""
    length = segment_BS.shape[1]
    near_SJ = np.tril(np.ones((length, length), dtype=np.bool_))
    if window is not None:
        near_SJ = near_SJ & ~np.tril(near_SJ, -window)
    same_BSJ = segment_BS[:, :, None] == segment_BS[:, None, :]
    both: Flags = near_SJ & same_BSJ
    return both


@in_float64
def attention(
    q_BSHZ: F64, k_BJGZ: F64, v_BJGY: F64, segment_BS: I64, window: int | None = None, sink_H: F64 | None = None
) -> F64:
    """Return out_BSHY = softmax(q k^T / sqrt(Z), over visible keys) v.

    A head's sink is one more score of every query, whose probability is spent on nothing (gpt-oss, 2025).
    """
    weight_BHSJ = _attention_weights(q_BSHZ, k_BJGZ, segment_BS, window, sink_H)[..., : segment_BS.shape[1]]
    out_BSHY: F64 = np.einsum("bhsj,bjhy->bshy", weight_BHSJ, _per_query_head(v_BJGY, q_BSHZ.shape[2]))
    return out_BSHY


@in_float64
def attention_vjp(
    d_out_BSHY: F64,
    q_BSHZ: F64,
    k_BJGZ: F64,
    v_BJGY: F64,
    segment_BS: I64,
    window: int | None = None,
    sink_H: F64 | None = None,
) -> tuple[F64, F64, F64, F64]:
    """Return (d_q_BSHZ, d_k_BJGZ, d_v_BJGY, d_sink_H); a key-value head collects from every query head that read it.

    d_sink_H is zero without sinks.
    """
    heads, kv_heads, size, length = q_BSHZ.shape[2], k_BJGZ.shape[2], q_BSHZ.shape[3], segment_BS.shape[1]
    weight = _attention_weights(q_BSHZ, k_BJGZ, segment_BS, window, sink_H)
    d_v_BJHY = np.einsum("bhsj,bshy->bjhy", weight[..., :length], d_out_BSHY)
    d_weight = np.zeros_like(weight)
    d_weight[..., :length] = np.einsum("bshy,bjhy->bhsj", d_out_BSHY, _per_query_head(v_BJGY, heads))
    d_logit = softmax_vjp(d_weight, weight)
    d_score_BHSJ = d_logit[..., :length] / np.sqrt(size)
    d_q_BSHZ: F64 = np.einsum("bhsj,bjhz->bshz", d_score_BHSJ, _per_query_head(k_BJGZ, heads))
    d_k_BJHZ = np.einsum("bhsj,bshz->bjhz", d_score_BHSJ, q_BSHZ)
    d_sink_H = d_logit[..., length:].sum(axis=(0, 2, 3))
    return d_q_BSHZ, _per_kv_head(d_k_BJHZ, kv_heads), _per_kv_head(d_v_BJHY, kv_heads), d_sink_H


@in_float64
def attention_part(q_BSHZ: F64, k_BJGZ: F64, v_BJGY: F64, seen_BSJ: Flags) -> tuple[F64, F64]:
    """Return attention to the keys that are seen, out_BSHY, and the logarithm of the sum of the scores' exponentials,
    log_sum_BHS. Where nothing is seen they are 0 and -inf."""
    score_BHSJ = _scores(q_BSHZ, k_BJGZ, seen_BSJ)
    with np.errstate(divide="ignore"):
        log_sum_BHS = np.log(np.exp(score_BHSJ).sum(axis=-1))
    weight_BHSJ = _weights(score_BHSJ, log_sum_BHS)
    out_BSHY: F64 = np.einsum("bhsj,bjhy->bshy", weight_BHSJ, _per_query_head(v_BJGY, q_BSHZ.shape[2]))
    return out_BSHY, log_sum_BHS


@in_float64
def attention_part_vjp(
    d_out_BSHY: F64, out_BSHY: F64, log_sum_BHS: F64, q_BSHZ: F64, k_BJGZ: F64, v_BJGY: F64, seen_BSJ: Flags
) -> tuple[F64, F64, F64]:
    """Return what these keys add to d_q_BSHZ, and their d_k_BJGZ and d_v_BJGY, where output and logarithm are those of
    attention to these keys and others together."""
    heads, kv_heads = q_BSHZ.shape[2], k_BJGZ.shape[2]
    weight_BHSJ = _weights(_scores(q_BSHZ, k_BJGZ, seen_BSJ), log_sum_BHS)
    d_weight = np.einsum("bshy,bjhy->bhsj", d_out_BSHY, _per_query_head(v_BJGY, heads))
    dot_BHS = np.einsum("bshy,bshy->bhs", d_out_BSHY, out_BSHY)
    d_score_BHSJ = weight_BHSJ * (d_weight - dot_BHS[..., None]) / np.sqrt(q_BSHZ.shape[3])
    d_q_BSHZ: F64 = np.einsum("bhsj,bjhz->bshz", d_score_BHSJ, _per_query_head(k_BJGZ, heads))
    d_k_BJHZ = np.einsum("bhsj,bshz->bjhz", d_score_BHSJ, q_BSHZ)
    d_v_BJHY = np.einsum("bhsj,bshy->bjhy", weight_BHSJ, d_out_BSHY)
    return d_q_BSHZ, _per_kv_head(d_k_BJHZ, kv_heads), _per_kv_head(d_v_BJHY, kv_heads)


def _scores(q_BSHZ: F64, k_BJGZ: F64, seen_BSJ: Flags) -> F64:
    """Return (B, H, S, J), -inf where a key is not seen."""
    score_BHSJ = np.einsum("bshz,bjhz->bhsj", q_BSHZ, _per_query_head(k_BJGZ, q_BSHZ.shape[2]))
    hidden: F64 = np.where(seen_BSJ[:, None], score_BHSJ / np.sqrt(q_BSHZ.shape[3]), -np.inf)
    return hidden


def _weights(score_BHSJ: F64, log_sum_BHS: F64) -> F64:
    """Return probabilities, 0 where nothing is seen."""
    finite_BHS = np.where(np.isfinite(log_sum_BHS), log_sum_BHS, 0.0)
    weight: F64 = np.exp(score_BHSJ - finite_BHS[..., None])
    return weight


def _attention_weights(q_BSHZ: F64, k_BJGZ: F64, segment_BS: I64, window: int | None, sink_H: F64 | None) -> F64:
    """Return (B, H, S, J) probabilities, with a last column for the sink if there is one."""
    score_BHSJ = _scores(q_BSHZ, k_BJGZ, visible(segment_BS, window))
    if sink_H is None:
        return softmax(score_BHSJ)
    sink_BHS1 = np.broadcast_to(sink_H[None, :, None, None], (*score_BHSJ.shape[:3], 1))
    return softmax(np.concatenate([score_BHSJ, sink_BHS1], axis=-1))


def _per_query_head(x_BJGZ: F64, heads: int) -> F64:
    return np.repeat(x_BJGZ, heads // x_BJGZ.shape[2], axis=2)


def _per_kv_head(d_BJHZ: F64, kv_heads: int) -> F64:
    batch, length, heads, size = d_BJHZ.shape
    summed: F64 = d_BJHZ.reshape(batch, length, kv_heads, heads // kv_heads, size).sum(axis=3)
    return summed
