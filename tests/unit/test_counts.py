from collections.abc import Callable
from math import prod

import pytest

from ascend_moe_train.model.config import ModelConfig, MoEConfig, MTPConfig
from ascend_moe_train.model.counts import (
    buffer_shapes,
    forward_flops_per_token,
    num_active_parameters,
    num_parameters,
    parameter_shapes,
    parameters_by_part,
    training_flops_per_token,
)
from ascend_moe_train.presets import (
    PRESETS,
    deepseek_v3,
    demo,
    glm_4_5,
    glm_4_5_air,
    gpt_oss_20b,
    gpt_oss_120b,
    qwen3_30b_a3b,
    tiny,
)

# Everything that a count can depend on, once.
EVERY_PART = ModelConfig(
    vocab_size=100,
    hidden=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    ffn=56,
    qk_norm="head",
    tie_embeddings=True,
    moe=MoEConfig(num_experts=6, top_k=2, ffn=16, shared_ffn=12, dense_layers=(0,)),
)


# Total: sums of the tensor sizes in the safetensors indexes of the models that the presets name. Active: the same sums
# without the experts that a token does not meet; published as 12.9B, 39B, 3.3B, 22B and 1.3B (the model cards).
# DeepSeek counts active ones without the embedding, 2.4B and 37B (arXiv 2405.04434, 2412.19437), so does OpenAI, 3.6B
# and 5.1B (arXiv 2508.10925); GLM's are given as 32B and 12B (arXiv 2508.06471).
PUBLISHED = {
    "llama3_8b": (8_030_261_248, 8_030_261_248),
    "qwen3_8b": (8_190_735_360, 8_190_735_360),
    "mixtral_8x7b": (46_702_792_704, 12_879_925_248),
    "mixtral_8x22b": (140_620_634_112, 39_152_031_744),
    "qwen3_30b_a3b": (30_532_122_624, 3_353_032_704),
    "qwen3_235b_a22b": (235_093_634_560, 22_190_763_520),
    "olmoe_1b_7b": (6_919_161_856, 1_282_017_280),
    "deepseek_v2_lite": (15_706_484_224, 2_661_150_208),
    "deepseek_v3": (671_026_404_352, 37_552_282_624),
    "glm_4_5": (352_797_814_784, 33_632_251_904),
    "glm_4_5_air": (106_852_245_504, 13_424_123_904),
    "dots_llm1": (142_774_373_888, 14_016_581_120),
    "gpt_oss_20b": (20_914_757_184, 4_187_440_704),
    "gpt_oss_120b": (116_829_156_672, 5_711_982_912),
}


def test_every_published_preset_is_counted() -> None:
    assert PUBLISHED.keys() == PRESETS.keys() - {"tiny", "demo"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    config = PRESETS[name]()
    assert (num_parameters(config), num_active_parameters(config)) == PUBLISHED[name]


def test_deepseek_v3_as_its_files_hold_it() -> None:
    # README_WEIGHTS.md of deepseek-ai/DeepSeek-V3: beside the 671B main model, one block of multi-token prediction that
    # repeats embedding and head. The metadata of its safetensors: 3,918,786,560 BF16 and 680,571,043,840 F8 numbers.
    main = deepseek_v3()
    biases = sum(prod(shape) for shape in buffer_shapes(main).values())
    assert num_parameters(main) + biases == 671_026_419_200
    whole = main.model_copy(update={"mtp": MTPConfig(depth=1)})
    copies = 2 * whole.vocab_size * whole.hidden
    assert num_parameters(whole) + copies == 3_918_786_560 + 680_571_043_840
    assert len(buffer_shapes(whole)) == 58 + 1


@pytest.mark.parametrize(
    ("preset", "published"), [(glm_4_5, 358_337_791_296), (glm_4_5_air, 110_468_824_832)], ids=["355B", "106B"]
)
def test_glm_as_its_files_hold_it(preset: Callable[[], ModelConfig], published: int) -> None:
    # Metadata of the safetensors of zai-org/GLM-4.5 and GLM-4.5-Air: with the biases, and with a block of multi-token
    # prediction that repeats embedding and head.
    whole = preset().model_copy(update={"mtp": MTPConfig(depth=1)})
    biases = sum(prod(shape) for shape in buffer_shapes(whole).values())
    assert num_parameters(whole) + biases + 2 * whole.vocab_size * whole.hidden == published


@pytest.mark.parametrize(
    ("preset", "billions"),
    [(gpt_oss_20b, (19.12, 0.64, 1.16, 3.61)), (gpt_oss_120b, (114.71, 0.96, 1.16, 5.13))],
    ids=["20b", "120b"],
)
def test_gpt_oss_by_part(preset: Callable[[], ModelConfig], billions: tuple[float, ...]) -> None:
    # The model card (arXiv 2508.10925), table 1: MLP, attention, embedding and unembedding, active without embedding.
    config, parts = preset(), parameters_by_part(preset())
    active = num_active_parameters(config) - parts["embedding"]
    found = (parts["experts"] + parts["routers"], parts["attention"], parts["embedding"] + parts["head"], active)
    assert [round(number / 1e9, 2) for number in found] == pytest.approx(billions, abs=0.011)


def test_shapes_of_every_part() -> None:
    shapes = parameter_shapes(EVERY_PART)
    assert list(shapes) == [
        "embed.weight",
        *(
            f"layers.{layer}.{name}"
            for layer in range(3)
            for name in (
                "attn_norm.weight",
                "attn.qkv.weight",
                "attn.q_norm.weight",
                "attn.k_norm.weight",
                "attn.out.weight",
                "ffn_norm.weight",
                *(
                    ("ffn.w13.weight", "ffn.w2.weight")
                    if layer == 0
                    else (
                        "moe.router.weight",
                        "moe.experts.w13",
                        "moe.experts.w2",
                        "moe.shared.w13.weight",
                        "moe.shared.w2.weight",
                    )
                ),
            )
        ),
        "norm.weight",
    ]
    assert shapes["layers.0.attn.qkv.weight"] == ((4 + 2 * 2) * 10, 24)
    assert shapes["layers.0.attn.out.weight"] == (24, 40)
    assert shapes["layers.0.ffn.w13.weight"] == (112, 24)
    assert shapes["layers.1.moe.experts.w13"] == (6, 24, 32)
    assert shapes["layers.1.moe.experts.w2"] == (6, 16, 24)
    assert shapes["layers.1.moe.shared.w13.weight"] == (24, 24)


def test_untied_head_is_last() -> None:
    assert list(parameter_shapes(tiny()).items())[-1] == ("head.weight", (64, 32))


@pytest.mark.parametrize("cfg", [*(preset() for preset in PRESETS.values()), EVERY_PART])
def test_parts_add_up(cfg: ModelConfig) -> None:
    assert sum(parameters_by_part(cfg).values()) == sum(prod(shape) for shape in parameter_shapes(cfg).values())


def test_dense_model_is_active_whole() -> None:
    dense = EVERY_PART.model_copy(update={"moe": None})
    assert num_active_parameters(dense) == num_parameters(dense)
    assert parameters_by_part(dense)["experts"] == 0


@pytest.mark.parametrize("cfg", [tiny(), demo(), qwen3_30b_a3b(), EVERY_PART])
def test_flops_are_two_per_active_weight_and_attention(cfg: ModelConfig) -> None:
    parts = parameters_by_part(cfg)
    head = cfg.vocab_size * cfg.hidden
    weights = num_active_parameters(cfg) - parts["embedding"] - parts["head"] - parts["norms"] + head
    seq_len = 96
    scores_and_values = cfg.num_layers * 4 * seq_len * cfg.num_heads * cfg.head_size
    assert forward_flops_per_token(cfg, seq_len, causal=False) == 2 * weights + scores_and_values
    assert forward_flops_per_token(cfg, seq_len) == 2 * weights + scores_and_values // 2
    assert training_flops_per_token(cfg, seq_len) == 3 * forward_flops_per_token(cfg, seq_len)
