"""Grouped-query causal attention inside documents (Ainslie et al., 2023).

B batch, S sequence (queries), J sequence (keys), H query heads, G key-value heads (query head h reads h // (H/G)),
Z head size.
"""

import numpy as np

from tests.oracle.arrays import F64, I64, Flags, in_float64, softmax, softmax_vjp


def visible(segment_BS: I64) -> Flags:
    """Return (B, S, J): query s sees key j when j <= s and both lie in the same document."""
    length = segment_BS.shape[1]
    causal_SJ = np.tril(np.ones((length, length), dtype=np.bool_))
    same_BSJ = segment_BS[:, :, None] == segment_BS[:, None, :]
    both: Flags = causal_SJ & same_BSJ
    return both


@in_float64
def attention(q_BSHZ: F64, k_BJGZ: F64, v_BJGZ: F64, segment_BS: I64) -> F64:
    """Return out_BSHZ = softmax(q k^T / sqrt(Z), over visible keys) v."""
    weight_BHSJ = _attention_weights(q_BSHZ, k_BJGZ, segment_BS)
    out_BSHZ: F64 = np.einsum("bhsj,bjhz->bshz", weight_BHSJ, _per_query_head(v_BJGZ, q_BSHZ.shape[2]))
    return out_BSHZ


@in_float64
def attention_vjp(d_out_BSHZ: F64, q_BSHZ: F64, k_BJGZ: F64, v_BJGZ: F64, segment_BS: I64) -> tuple[F64, F64, F64]:
    """Return (d_q_BSHZ, d_k_BJGZ, d_v_BJGZ); a key-value head collects from every query head that read it."""
    heads, kv_heads, size = q_BSHZ.shape[2], k_BJGZ.shape[2], q_BSHZ.shape[3]
    weight_BHSJ = _attention_weights(q_BSHZ, k_BJGZ, segment_BS)
    d_v_BJHZ = np.einsum("bhsj,bshz->bjhz", weight_BHSJ, d_out_BSHZ)
    d_weight_BHSJ = np.einsum("bshz,bjhz->bhsj", d_out_BSHZ, _per_query_head(v_BJGZ, heads))
    d_score_BHSJ = softmax_vjp(d_weight_BHSJ, weight_BHSJ) / np.sqrt(size)
    d_q_BSHZ: F64 = np.einsum("bhsj,bjhz->bshz", d_score_BHSJ, _per_query_head(k_BJGZ, heads))
    d_k_BJHZ = np.einsum("bhsj,bshz->bjhz", d_score_BHSJ, q_BSHZ)
    return d_q_BSHZ, _per_kv_head(d_k_BJHZ, kv_heads), _per_kv_head(d_v_BJHZ, kv_heads)


def _attention_weights(q_BSHZ: F64, k_BJGZ: F64, segment_BS: I64) -> F64:
    k_BJHZ = _per_query_head(k_BJGZ, q_BSHZ.shape[2])
    score_BHSJ = np.einsum("bshz,bjhz->bhsj", q_BSHZ, k_BJHZ) / np.sqrt(q_BSHZ.shape[3])
    return softmax(np.where(visible(segment_BS)[:, None], score_BHSJ, -np.inf))


def _per_query_head(x_BJGZ: F64, heads: int) -> F64:
    return np.repeat(x_BJGZ, heads // x_BJGZ.shape[2], axis=2)


def _per_kv_head(d_BJHZ: F64, kv_heads: int) -> F64:
    batch, length, heads, size = d_BJHZ.shape
    summed: F64 = d_BJHZ.reshape(batch, length, kv_heads, heads // kv_heads, size).sum(axis=3)
    return summed
