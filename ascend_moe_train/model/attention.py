"""Grouped-query and multi-head latent attention around that of the kernels. Shape letters: see kernels/protocol.py."""

from typing import Any

from mindspore import nn, ops

from ascend_moe_train.model.config import MLAConfig, ModelConfig
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.layers import Linear, RMSNorm, empty, in_any_order
from ascend_moe_train.model.rope import softmax_factor

Tensor = Any


class Attention(nn.Cell):
    """Grouped-query attention (Ainslie et al., 2023): (B*S, D) -> (B*S, D).

    q, k and v come from one matrix. What `qk_norm` asks for is normalised before the rotation: each head of q and k
    (Qwen3), or all heads of each as one vector (OLMoE). Biases, sinks and windows: see `AttentionConfig`.
    """

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        self.rotary_size, self.softmax_factor = config.rotary_size, softmax_factor(config.rope)
        self.q_size = self.num_heads * self.head_size
        self.kv_size = self.num_kv_heads * self.head_size
        options = config.attention
        self.window = options.window if layer in options.window_layers else None
        self.qkv = Linear(config.hidden, self.q_size + 2 * self.kv_size, kernels, options.bias != "none")
        self.has_sinks = options.sinks
        if self.has_sinks:
            self.sinks = empty(self.num_heads)
        self.norms_heads, self.norms_all = config.qk_norm == "head", config.qk_norm == "full"
        if self.norms_heads or self.norms_all:
            self.q_norm = RMSNorm(self.head_size if self.norms_heads else self.q_size, config.norm_eps, kernels)
            self.k_norm = RMSNorm(self.head_size if self.norms_heads else self.kv_size, config.norm_eps, kernels)
        self.out = Linear(self.q_size, config.hidden, kernels, options.bias == "all")

    def construct(self, x_TD: Tensor, segment_BS: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        B, S = segment_BS.shape
        H, G, Z = self.num_heads, self.num_kv_heads, self.head_size
        qkv = self.qkv(x_TD)
        q, k, v = self.kernels.split(qkv, (self.q_size, self.kv_size, self.kv_size))
        if self.norms_all:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = ops.reshape(q, (B, S, H, Z)), ops.reshape(k, (B, S, G, Z)), ops.reshape(v, (B, S, G, Z))
        if self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotate(q, cos_BSZ, sin_BSZ), self.rotate(k, cos_BSZ, sin_BSZ)
        if self.softmax_factor != 1.0:
            q = q * self.softmax_factor
        sink_H = self.sinks if self.has_sinks else None
        o = self.kernels.attention(q, k, v, segment_BS, self.window, sink_H)
        return self.out(ops.reshape(o, (B * S, self.q_size)))

    def rotate(self, x_BSHZ: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        """Turn the first `rotary_size` elements of each head."""
        if self.rotary_size == self.head_size:
            return self.kernels.rope(x_BSHZ, cos_BSZ, sin_BSZ)
        turned = self.kernels.rope(x_BSHZ[..., : self.rotary_size], cos_BSZ, sin_BSZ)
        return ops.concat((turned, x_BSHZ[..., self.rotary_size :]), -1)


class LatentAttention(nn.Cell):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): (B*S, D) -> (B*S, D).

    Keys and values are unfolded from a normed latent vector, queries from another or straight from the input. Only the
    last `rope_dim` elements of each query and key are rotated; in the key they are one vector for all heads. Port:
    `in_order` of queries, and of keys and values.
    """

    def __init__(self, config: ModelConfig, mla: MLAConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.num_heads, self.kv_latent = config.num_heads, mla.kv_latent
        self.nope_dim, self.rope_dim, self.value_dim = mla.nope_dim, mla.rope_dim, mla.value_dim
        self.softmax_factor = softmax_factor(config.rope)
        q_size = self.num_heads * config.head_size
        self.has_q_latent = mla.q_latent is not None
        if mla.q_latent is not None:
            self.q_down = Linear(config.hidden, mla.q_latent, kernels)
            self.q_latent_norm = RMSNorm(mla.q_latent, mla.norm_eps, kernels)
            self.q_up = Linear(mla.q_latent, q_size, kernels)
        else:
            self.q = Linear(config.hidden, q_size, kernels)
        self.in_order = in_any_order
        self.kv_down = Linear(config.hidden, mla.kv_latent + mla.rope_dim, kernels)
        self.kv_latent_norm = RMSNorm(mla.kv_latent, mla.norm_eps, kernels)
        self.kv_up = Linear(mla.kv_latent, self.num_heads * (mla.nope_dim + mla.value_dim), kernels)
        self.out = Linear(self.num_heads * mla.value_dim, config.hidden, kernels)

    def construct(self, x_TD: Tensor, segment_BS: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        B, S = segment_BS.shape
        H, nope = self.num_heads, self.nope_dim
        q = self.q_up(self.q_latent_norm(self.q_down(x_TD))) if self.has_q_latent else self.q(x_TD)
        q, x_TD = self.in_order(q, x_TD)
        q = ops.reshape(q, (B, S, H, nope + self.rope_dim))
        q = ops.concat((q[..., :nope], self.kernels.rope(q[..., nope:], cos_BSZ, sin_BSZ)), -1)
        if self.softmax_factor != 1.0:
            q = q * self.softmax_factor
        down = self.kv_down(x_TD)
        k_turned = ops.reshape(down[:, self.kv_latent :], (B, S, 1, self.rope_dim))
        k_turned = ops.broadcast_to(self.kernels.rope(k_turned, cos_BSZ, sin_BSZ), (B, S, H, self.rope_dim))
        kv = self.kv_up(self.kv_latent_norm(down[:, : self.kv_latent]))
        kv = ops.reshape(kv, (B, S, H, nope + self.value_dim))
        k = ops.concat((kv[..., :nope], k_turned), -1)
        o = self.kernels.attention(q, k, kv[..., nope:], segment_BS)
        return self.out(ops.reshape(o, (B * S, H * self.value_dim)))
