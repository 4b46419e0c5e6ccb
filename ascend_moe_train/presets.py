"""Named model shapes. Pure.

A run file names one with `model: {preset: demo}` and may override any key. The published ones carry their sources; each
is counted against its published size in the tests. Where transformers trains with `router_aux_loss_coef`, our
`aux_loss_coef` is that times top_k (see MoEConfig).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ascend_moe_train.model.config import (
    AttentionConfig,
    ClampedSwiGLUConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)


def tiny() -> ModelConfig:
    """The smallest model that has every part: for tests."""
    return ModelConfig(
        vocab_size=64,
        hidden=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn=64,
        moe=MoEConfig(num_experts=4, top_k=2, ffn=48),
    )


def demo() -> ModelConfig:
    """14.2 million parameters (4.7 million active): learns Python source on two CPU cores within minutes."""
    return ModelConfig(
        vocab_size=1024,
        hidden=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        ffn=512,
        moe=MoEConfig(num_experts=8, top_k=2, ffn=512),
    )


def mixtral_8x7b() -> ModelConfig:
    """Mixtral 8x7B (Jiang et al., 2024, arXiv 2401.04088; config.json of mistralai/Mixtral-8x7B-v0.1)."""
    return ModelConfig(
        vocab_size=32000,
        hidden=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        ffn=14336,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e6),
        moe=MoEConfig(num_experts=8, top_k=2, ffn=14336, aux_loss_coef=0.02 * 2, aux_loss_scope="model"),
    )


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen3-30B-A3B (Qwen team, 2025, arXiv 2505.09388; config.json of Qwen/Qwen3-30B-A3B)."""
    return ModelConfig(
        vocab_size=151936,
        hidden=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn=6144,
        qk_norm="head",
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        moe=MoEConfig(num_experts=128, top_k=8, ffn=768, aux_loss_coef=0.001 * 8, aux_loss_scope="model"),
    )


def mixtral_8x22b() -> ModelConfig:
    """Mixtral 8x22B (config.json of mistralai/Mixtral-8x22B-v0.1)."""
    return ModelConfig(
        vocab_size=32000,
        hidden=6144,
        num_layers=56,
        num_heads=48,
        num_kv_heads=8,
        ffn=16384,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e6),
        moe=MoEConfig(num_experts=8, top_k=2, ffn=16384, aux_loss_coef=0.001 * 2, aux_loss_scope="model"),
    )


def qwen3_235b_a22b() -> ModelConfig:
    """Qwen3-235B-A22B (Qwen team, 2025, arXiv 2505.09388; config.json of Qwen/Qwen3-235B-A22B)."""
    return ModelConfig(
        vocab_size=151936,
        hidden=4096,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        ffn=12288,
        qk_norm="head",
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        moe=MoEConfig(num_experts=128, top_k=8, ffn=1536, aux_loss_coef=0.001 * 8, aux_loss_scope="model"),
    )


def olmoe_1b_7b() -> ModelConfig:
    """OLMoE-1B-7B (Muennighoff et al., 2024, arXiv 2409.02060; config.json of allenai/OLMoE-1B-7B-0924)."""
    return ModelConfig(
        vocab_size=50304,
        hidden=2048,
        num_layers=16,
        num_heads=16,
        num_kv_heads=16,
        ffn=1024,
        qk_norm="full",
        norm_eps=1e-5,
        moe=MoEConfig(
            num_experts=64, top_k=8, ffn=1024, normalize_topk=False, aux_loss_coef=0.01 * 8, aux_loss_scope="model"
        ),
    )


def llama3_8b() -> ModelConfig:
    """Llama 3.1 8B, dense (Llama team, 2024, arXiv 2407.21783; config.json of meta-llama/Llama-3.1-8B)."""
    return ModelConfig(
        vocab_size=128256,
        hidden=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        ffn=14336,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0, scaling="llama3", factor=8.0, original_positions=8192),
    )


def qwen3_8b() -> ModelConfig:
    """Qwen3-8B, dense (Qwen team, 2025, arXiv 2505.09388; config.json of Qwen/Qwen3-8B)."""
    return ModelConfig(
        vocab_size=151936,
        hidden=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn=12288,
        qk_norm="head",
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
    )


def deepseek_v2_lite() -> ModelConfig:
    """DeepSeek-V2-Lite (DeepSeek-AI, 2024, arXiv 2405.04434, appendix B; deepseek-ai/DeepSeek-V2-Lite)."""
    return ModelConfig(
        vocab_size=102400,
        hidden=2048,
        num_layers=27,
        num_heads=16,
        num_kv_heads=16,
        ffn=10944,
        norm_eps=1e-6,
        rope=RopeConfig(scaling="yarn", factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707),
        attention=AttentionConfig(mla=MLAConfig(kv_latent=512, nope_dim=128, rope_dim=64, value_dim=128)),
        moe=MoEConfig(
            num_experts=64,
            top_k=6,
            ffn=1408,
            shared_ffn=2 * 1408,
            dense_layers=(0,),
            normalize_topk=False,
            aux_loss_coef=0.001,
            aux_loss_scope="sequence",
        ),
    )


def deepseek_v3() -> ModelConfig:
    """DeepSeek-V3 and R1 (DeepSeek-AI, 2024, arXiv 2412.19437, section 4.2; config.json of deepseek-ai/DeepSeek-V3).

    `mtp: {depth: 1}` adds the block of multi-token prediction that it was trained and is published with.
    """
    return ModelConfig(
        vocab_size=129280,
        hidden=7168,
        num_layers=61,
        num_heads=128,
        num_kv_heads=128,
        ffn=18432,
        norm_eps=1e-6,
        rope=RopeConfig(scaling="yarn", factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0),
        attention=AttentionConfig(
            mla=MLAConfig(kv_latent=512, q_latent=1536, nope_dim=128, rope_dim=64, value_dim=128)
        ),
        moe=MoEConfig(
            num_experts=256,
            top_k=8,
            ffn=2048,
            shared_ffn=2048,
            dense_layers=(0, 1, 2),
            score="sigmoid",
            num_groups=8,
            top_groups=4,
            groups_by="best_two",
            balance_bias_rate=0.001,
            routed_scale=2.5,
            aux_loss_coef=0.0001,
            aux_loss_scope="sequence",
        ),
    )


def glm_4_5() -> ModelConfig:
    """GLM-4.5 (GLM-4.5 team, 2025, arXiv 2508.06471; config.json of zai-org/GLM-4.5), without its block of multi-token
    prediction, which `mtp: {depth: 1}` adds."""
    return ModelConfig(
        vocab_size=151552,
        hidden=5120,
        num_layers=92,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        ffn=12288,
        qk_norm="head",
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e6, fraction=0.5),
        attention=AttentionConfig(bias="qkv"),
        moe=MoEConfig(
            num_experts=160,
            top_k=8,
            ffn=1536,
            shared_ffn=1536,
            dense_layers=(0, 1, 2),
            score="sigmoid",
            balance_bias_rate=0.001,
            routed_scale=2.5,
            aux_loss_coef=0.0001,
            aux_loss_scope="sequence",
        ),
    )


def glm_4_5_air() -> ModelConfig:
    """GLM-4.5-Air (config.json of zai-org/GLM-4.5-Air), the smaller of `glm_4_5`."""
    return ModelConfig(
        vocab_size=151552,
        hidden=4096,
        num_layers=46,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        ffn=10944,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e6, fraction=0.5),
        attention=AttentionConfig(bias="qkv"),
        moe=MoEConfig(
            num_experts=128,
            top_k=8,
            ffn=1408,
            shared_ffn=1408,
            dense_layers=(0,),
            score="sigmoid",
            balance_bias_rate=0.001,
            aux_loss_coef=0.0001,
            aux_loss_scope="sequence",
        ),
    )


def dots_llm1() -> ModelConfig:
    """dots.llm1 (rednote-hilab, 2025, arXiv 2506.05767; config.json of rednote-hilab/dots.llm1.base)."""
    return ModelConfig(
        vocab_size=152064,
        hidden=4096,
        num_layers=62,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        ffn=10944,
        qk_norm="head",
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e7),
        moe=MoEConfig(
            num_experts=128,
            top_k=6,
            ffn=1408,
            shared_ffn=2 * 1408,
            dense_layers=(0,),
            score="sigmoid",
            balance_bias_rate=0.001,
            routed_scale=2.5,
            aux_loss_coef=0.0001,
            aux_loss_scope="sequence",
        ),
    )


def gpt_oss_20b() -> ModelConfig:
    """gpt-oss-20b (OpenAI, 2025, arXiv 2508.10925; config.json of openai/gpt-oss-20b)."""
    return _gpt_oss(num_layers=24, num_experts=32)


def gpt_oss_120b() -> ModelConfig:
    """gpt-oss-120b (OpenAI, 2025, arXiv 2508.10925; config.json of openai/gpt-oss-120b)."""
    return _gpt_oss(num_layers=36, num_experts=128)


def _gpt_oss(num_layers: int, num_experts: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=201088,
        hidden=2880,
        num_layers=num_layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        ffn=2880,
        norm_eps=1e-5,
        rope=RopeConfig(theta=150000.0, scaling="yarn", factor=32.0, original_positions=4096, truncate=False),
        attention=AttentionConfig(bias="all", sinks=True, window=128, window_layers=tuple(range(0, num_layers, 2))),
        moe=MoEConfig(
            num_experts=num_experts,
            top_k=4,
            ffn=2880,
            score_order="after_topk",
            router_bias=True,
            expert_bias=True,
            clamped_swiglu=ClampedSwiGLUConfig(),
            aux_loss_coef=0.9 * 4,
            aux_loss_scope="model",
        ),
    )


PRESETS: Mapping[str, Callable[[], ModelConfig]] = MappingProxyType(
    {
        preset.__name__: preset
        for preset in (
            tiny,
            demo,
            llama3_8b,
            qwen3_8b,
            mixtral_8x7b,
            mixtral_8x22b,
            qwen3_30b_a3b,
            qwen3_235b_a22b,
            olmoe_1b_7b,
            deepseek_v2_lite,
            deepseek_v3,
            glm_4_5,
            glm_4_5_air,
            dots_llm1,
            gpt_oss_20b,
            gpt_oss_120b,
        )
    }
)
