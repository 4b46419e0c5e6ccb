"""Parts of attention from MindSpore's own operators: what queries and keys give. Shape letters: see protocol.py."""

from typing import Any

import mindspore as ms
from mindspore import ops

from ascend_moe_train.model.kernels.constants import numbers

Tensor = Any

# the primitive: ops.relu is a graph of its own, which MindSpore loses when a gradient is taken inside another
_relu = ops.ReLU()
_matmul, _matmul_t, _t_matmul = ops.BatchMatMul(), ops.BatchMatMul(transpose_b=True), ops.BatchMatMul(transpose_a=True)


def by_kv_head(x_BSHZ: Tensor, num_kv_heads: int) -> Tensor:
    """(B, S, H, Z) -> (B * G, H / G * S, Z)."""
    B, S, H, Z = x_BSHZ.shape
    return ops.reshape(ops.transpose(x_BSHZ, (0, 2, 1, 3)), (B * num_kv_heads, H // num_kv_heads * S, Z))


def products(q_BSHZ: Tensor, k_BJGZ: Tensor) -> Tensor:
    """Of each query with each key of its head: (B, H, S, J)."""
    B, S, H, _ = q_BSHZ.shape
    J, G = k_BJGZ.shape[1:3]
    found = _matmul_t(by_kv_head(q_BSHZ, G), by_kv_head(k_BJGZ, G))
    return ops.reshape(found, (B, H, S, J))


def weighted(p_BHSJ: Tensor, v_BJGY: Tensor) -> Tensor:
    """Sums over keys: (B, S, H, Y)."""
    B, H, S, J = p_BHSJ.shape
    G, Y = v_BJGY.shape[2:]
    sums = _matmul(ops.reshape(p_BHSJ, (B * G, H // G * S, J)), by_kv_head(v_BJGY, G))
    return ops.transpose(ops.reshape(sums, (B, H, S, Y)), (0, 2, 1, 3))


def collected(p_BHSJ: Tensor, x_BSHY: Tensor, like_BJGY: Tensor) -> Tensor:
    """Sums over queries, and over the heads that share one of keys: (B, J, G, Y)."""
    B, H, S, J = p_BHSJ.shape
    G, Y = like_BJGY.shape[2:]
    sums = _t_matmul(ops.reshape(p_BHSJ, (B * G, H // G * S, J)), by_kv_head(x_BSHY, G))
    return ops.transpose(ops.reshape(sums, (B, G, J, Y)), (0, 2, 1, 3))


def part_scores(q_BSHZ: Tensor, k_BJGZ: Tensor, first_BS: Tensor, past_BS: Tensor) -> Tensor:
    """Scaled, and unreachably low where a query does not see a key: (B, H, S, J)."""
    scores = products(q_BSHZ, k_BJGZ) * (q_BSHZ.shape[3] ** -0.5)
    B, S = first_BS.shape
    shape = (B, S, k_BJGZ.shape[1])
    key = ops.broadcast_to(ops.cast(numbers(k_BJGZ.shape[1]), ms.float32), shape)
    first = ops.broadcast_to(ops.expand_dims(ops.cast(first_BS, ms.float32), 2), shape)
    past = ops.broadcast_to(ops.expand_dims(ops.cast(past_BS, ms.float32), 2), shape)
    # how far a key is before the first that is seen, and after the last
    distance = _relu(first - key) + _relu(key - past + 1.0)
    return scores + ops.broadcast_to(ops.expand_dims(distance * -1e30, 1), scores.shape)


def along_keys(x_BHS: Tensor, scores: Tensor) -> Tensor:
    """In the shape of scores. On CPUs MindSpore keeps 16 bytes for each result of a sum of tensors of two shapes."""
    return ops.broadcast_to(ops.expand_dims(x_BHS, 3), scores.shape)
