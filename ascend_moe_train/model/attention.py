"""Grouped-query attention around `core_attention` of the kernels. Shape letters: see kernels/protocol.py."""

from typing import Any

from mindspore import nn, ops

from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.layers import Linear, RMSNorm

Tensor = Any


class Attention(nn.Cell):
    """Grouped-query attention (Ainslie et al., 2023): (B*S, D) -> (B*S, D).

    q, k and v come from one matrix. With `qk_norm: head`, each head of q and k is normalised before the rotation
    (Qwen3).
    """

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        self.q_size = self.num_heads * self.head_size
        self.kv_size = self.num_kv_heads * self.head_size
        self.qkv = Linear(config.hidden, self.q_size + 2 * self.kv_size, kernels)
        self.out = Linear(self.q_size, config.hidden, kernels)
        self.has_qk_norm = config.qk_norm == "head"
        if self.has_qk_norm:
            self.q_norm = RMSNorm(self.head_size, config.norm_eps, kernels)
            self.k_norm = RMSNorm(self.head_size, config.norm_eps, kernels)

    def construct(self, x_TD: Tensor, segment_BS: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        B, S = segment_BS.shape
        H, G, Z = self.num_heads, self.num_kv_heads, self.head_size
        qkv = self.qkv(x_TD)
        q = ops.reshape(qkv[:, : self.q_size], (B, S, H, Z))
        k = ops.reshape(qkv[:, self.q_size : self.q_size + self.kv_size], (B, S, G, Z))
        v = ops.reshape(qkv[:, self.q_size + self.kv_size :], (B, S, G, Z))
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q = self.kernels.rope(q, cos_BSZ, sin_BSZ)
        k = self.kernels.rope(k, cos_BSZ, sin_BSZ)
        o = self.kernels.attention(q, k, v, segment_BS)
        return self.out(ops.reshape(o, (B * S, self.q_size)))
