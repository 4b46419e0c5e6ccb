"""Grouped-query attention around `core_attention` of the kernels. Shape letters: see kernels/protocol.py."""

from typing import Any

from mindspore import nn, ops

from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.layers import Linear, RMSNorm
from ascend_moe_train.model.rope import softmax_factor

Tensor = Any


class Attention(nn.Cell):
    """Grouped-query attention (Ainslie et al., 2023): (B*S, D) -> (B*S, D).

    q, k and v come from one matrix. What `qk_norm` asks for is normalised before the rotation: each head of q and k
    (Qwen3), or all heads of each as one vector (OLMoE).
    """

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        self.rotary_size, self.softmax_factor = config.rotary_size, softmax_factor(config.rope)
        self.q_size = self.num_heads * self.head_size
        self.kv_size = self.num_kv_heads * self.head_size
        self.qkv = Linear(config.hidden, self.q_size + 2 * self.kv_size, kernels)
        self.out = Linear(self.q_size, config.hidden, kernels)
        self.norms_heads, self.norms_all = config.qk_norm == "head", config.qk_norm == "full"
        if self.norms_heads or self.norms_all:
            self.q_norm = RMSNorm(self.head_size if self.norms_heads else self.q_size, config.norm_eps, kernels)
            self.k_norm = RMSNorm(self.head_size if self.norms_heads else self.kv_size, config.norm_eps, kernels)

    def construct(self, x_TD: Tensor, segment_BS: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        B, S = segment_BS.shape
        H, G, Z = self.num_heads, self.num_kv_heads, self.head_size
        qkv = self.qkv(x_TD)
        q, k = qkv[:, : self.q_size], qkv[:, self.q_size : self.q_size + self.kv_size]
        if self.norms_all:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = ops.reshape(q, (B, S, H, Z)), ops.reshape(k, (B, S, G, Z))
        v = ops.reshape(qkv[:, self.q_size + self.kv_size :], (B, S, G, Z))
        if self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotate(q, cos_BSZ, sin_BSZ), self.rotate(k, cos_BSZ, sin_BSZ)
        if self.softmax_factor != 1.0:
            q = q * self.softmax_factor
        o = self.kernels.attention(q, k, v, segment_BS)
        return self.out(ops.reshape(o, (B * S, self.q_size)))

    def rotate(self, x_BSHZ: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        """Turn the first `rotary_size` elements of each head."""
        if self.rotary_size == self.head_size:
            return self.kernels.rope(x_BSHZ, cos_BSZ, sin_BSZ)
        turned = self.kernels.rope(x_BSHZ[..., : self.rotary_size], cos_BSZ, sin_BSZ)
        return ops.concat((turned, x_BSHZ[..., self.rotary_size :]), -1)
