"""Names, tensors and configs of Hugging Face models."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from ascend_moe_train.checkpoint import huggingface
from ascend_moe_train.checkpoint.huggingface import Array, from_hf, layout_of, name_table, to_hf
from ascend_moe_train.checkpoint.huggingface_config import model_config_from_hf
from ascend_moe_train.checkpoint.huggingface_families import FAMILIES
from ascend_moe_train.checkpoint.huggingface_names import LAYOUTS
from ascend_moe_train.errors import CheckpointError, ConfigError
from ascend_moe_train.model.config import AttentionConfig, ModelConfig, MoEConfig, MTPConfig
from ascend_moe_train.model.counts import parameter_shapes
from ascend_moe_train.presets import (
    deepseek_v2_lite,
    deepseek_v3,
    dots_llm1,
    glm_4_5,
    glm_4_5_air,
    gpt_oss_20b,
    gpt_oss_120b,
    llama3_8b,
    mixtral_8x7b,
    olmoe_1b_7b,
    qwen3_8b,
    qwen3_30b_a3b,
)
from tests.oracle.golden import FAMILY_CASES, golden, read_tensors
from tests.published_configs import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    DOTS_LLM1,
    GLM_4_5,
    GLM_4_5_AIR,
    GPT_OSS_20B,
    LLAMA,
    MIXTRAL,
    OLMOE,
    QWEN3,
    QWEN3_DENSE,
    YARN,
)


def test_published_configs_are_the_presets() -> None:
    assert model_config_from_hf(MIXTRAL) == mixtral_8x7b()
    assert model_config_from_hf(QWEN3) == qwen3_30b_a3b()
    assert model_config_from_hf(LLAMA) == llama3_8b()
    assert model_config_from_hf(QWEN3_DENSE) == qwen3_8b()
    assert model_config_from_hf(OLMOE) == olmoe_1b_7b()
    assert model_config_from_hf(DEEPSEEK_V2_LITE) == deepseek_v2_lite()
    said_elsewhere = {"aux_loss_alpha": 0.0001, "num_nextn_predict_layers": 0}
    assert model_config_from_hf(DEEPSEEK_V3 | said_elsewhere) == deepseek_v3()
    assert model_config_from_hf(DEEPSEEK_V3).mtp == MTPConfig(depth=1, loss_coef=0.3)
    assert model_config_from_hf(GLM_4_5 | said_elsewhere) == glm_4_5()
    assert model_config_from_hf(GLM_4_5_AIR | said_elsewhere) == glm_4_5_air()
    assert model_config_from_hf(GPT_OSS_20B) == gpt_oss_20b()
    assert model_config_from_hf(DOTS_LLM1 | said_elsewhere) == dots_llm1()


def test_gpt_oss_by_default_is_the_larger_one() -> None:
    bare = {"model_type": "gpt_oss"} | {key: GPT_OSS_20B[key] for key in ("vocab_size", "hidden_size")}
    sizes = {"num_hidden_layers": 36, "num_local_experts": 128, "intermediate_size": 2880, "num_attention_heads": 64}
    rest = {"num_key_value_heads": 8, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.9}
    assert model_config_from_hf(bare | sizes | rest) == gpt_oss_120b()


def test_defaults_are_those_of_the_family() -> None:
    bare = {key: value for key, value in QWEN3.items() if key not in ("norm_topk_prob", "rope_theta", "rms_norm_eps")}
    cfg = model_config_from_hf(bare)
    assert cfg.moe is not None
    assert (cfg.moe.normalize_topk, cfg.rope.theta, cfg.norm_eps) == (False, 10000.0, 1e-6)
    assert model_config_from_hf({k: v for k, v in MIXTRAL.items() if k != "rope_theta"}).rope.theta == 1e6


@pytest.mark.parametrize(
    ("changes", "dense_layers"),
    [
        ({"mlp_only_layers": [0, 2]}, (0, 2)),
        ({"decoder_sparse_step": 3}, (0, 1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (0, 1, 2)),
        ({"mlp_only_layers": None}, ()),
    ],
    ids=str,
)
def test_dense_layers(changes: dict[str, object], dense_layers: tuple[int, ...]) -> None:
    cfg = model_config_from_hf({**QWEN3, "num_hidden_layers": 4, **changes})
    assert cfg.moe is not None
    assert cfg.moe.dense_layers == dense_layers


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}, "rope_theta": 1.0},
    ],
    ids=str,
)
def test_rope_scaling_of_both_ages(rope: dict[str, object]) -> None:
    cfg = model_config_from_hf({**MIXTRAL, **rope})
    assert (cfg.rope.theta, cfg.rope.scaling, cfg.rope.factor) == (500.0, "linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mixtrel"}, "model_type.*mixtrel.*did you mean mixtral"),
        ({"model_type": ["mixtral"]}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, 'hidden_act: "gelu".*"silu"'),
        ({"attention_dropout": 0.1}, "attention_dropout: 0.1"),
        ({"sliding_window": 4096}, "sliding_window: 4096 .*null"),
        ({"sliding_window": False}, "sliding_window: false"),
        ({"router_jitter_noise": 0.01}, "router_jitter_noise"),
        ({"hidden_size": "4096"}, 'hidden_size: hidden: "4096".*whole number'),
        ({"hidden_size": 4096.0}, "hidden_size.*whole number"),
        ({"hidden_size": -1}, "hidden_size.*greater than 0"),
        ({"hidden_size": True}, "hidden_size.*whole number"),
        ({"num_attention_heads": 5}, "num_heads 5"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: 1000000000000.*from 1 to 1024"),
        ({"num_hidden_layers": True}, "num_hidden_layers: true"),
        ({"num_local_experts": 10**9}, "num_experts"),
        ({"num_experts_per_tok": 9}, "top_k 9"),
        ({"num_experts_per_tok": 10**4000}, "num_experts_per_tok"),
        ({"router_aux_loss_coef": "x" * 1000}, "router_aux_loss_coef"),
        ({"router_aux_loss_coef": float("nan")}, "router_aux_loss_coef: NaN"),
        ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef: -0.1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps.*greater than 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings.*true or false"),
        ({"rope_scaling": "linear"}, "rope_scaling.*mapping"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            'rope_scaling.rope_type: "dynamic".*linear, llama3, yarn',
        ),
        ({"rope_scaling": {"type": ["yarn"], "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: null"),
        ({"rope_scaling": {**YARN, "factor": None}}, "rope_scaling.factor: null"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_positions is missing: scaling 'yarn' needs it"),
        ({"rope_scaling": {**YARN, "beta_slow": 40}}, "beta_slow 40.0 is not below beta_fast 32.0"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate.*true or false"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.2}}, "rope_scaling.attention_factor: 1.2"),
        ({"rope_scaling": {**YARN, "mscale_all_dim": 1.0}}, "rope_scaling.mscale_all_dim: 1.0.*does not scale"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor.*at least 1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": "big"}, "rope_parameters.*theta"),
        ({"hidden_act": "x\ny"}, "hidden_act"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_hostile_config_is_one_line(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        model_config_from_hf({**MIXTRAL, **changes})
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "changes", [{"mlp_only_layers": [48]}, {"mlp_only_layers": 3}, {"mlp_only_layers": ["0"]}], ids=str
)
def test_hostile_dense_layers(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"mlp_only_layers.*from 0 to 47"):
        model_config_from_hf({**QWEN3, **changes})


@pytest.mark.parametrize("step", [0, -1, 1.5, None])
def test_hostile_sparse_step(step: object) -> None:
    with pytest.raises(ConfigError, match="decoder_sparse_step"):
        model_config_from_hf({**QWEN3, "decoder_sparse_step": step})


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_local_experts", "vocab_size"])
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        model_config_from_hf({name: value for name, value in MIXTRAL.items() if name != key})


@pytest.mark.parametrize("config", [None, [], "mixtral", 3, {}], ids=str)
def test_no_config(config: object) -> None:
    with pytest.raises(ConfigError):
        model_config_from_hf(config)


def small(**changes: object) -> ModelConfig:
    """Two layers, the second dense."""
    values: dict[str, object] = {
        "vocab_size": 11,
        "hidden": 8,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn": 6,
        "moe": {"num_experts": 3, "top_k": 2, "ffn": 5},
    }
    return ModelConfig.model_validate(values | changes)


def random_tensors(cfg: ModelConfig) -> dict[str, Array]:
    """Every element different, so that a swap shows."""
    shapes, start, tensors = parameter_shapes(cfg), 0, {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(start, start + size, dtype=np.float32).reshape(shape)
        start += size
    return tensors


CONFIGS: dict[str, ModelConfig] = {
    "mixtral": small(),
    "split": small(qk_norm="head", head_dim=6, moe=MoEConfig(num_experts=3, top_k=2, ffn=5, dense_layers=(1,))),
    "gpt_oss": small(
        attention=AttentionConfig(bias="all", sinks=True),
        moe=MoEConfig(num_experts=3, top_k=2, ffn=5, router_bias=True, expert_bias=True),
    ),
    "fused": small(tie_embeddings=True, moe=MoEConfig(num_experts=3, top_k=2, ffn=5, dense_layers=(0,))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip(layout: str) -> None:
    cfg = CONFIGS[layout]
    ours = random_tensors(cfg)
    theirs = to_hf(ours, cfg, layout)
    assert layout_of(theirs, cfg) == layout
    assert all(tensor.flags.c_contiguous for tensor in theirs.values())
    back = from_hf(theirs, cfg)
    assert back.keys() == ours.keys()
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, ours[name], err_msg=name)
        assert tensor.flags.c_contiguous
    assert sum(t.size for t in theirs.values()) == sum(t.size for t in ours.values())


def test_names_by_hand() -> None:
    ours = random_tensors(CONFIGS["mixtral"])
    theirs = to_hf(ours, CONFIGS["mixtral"], "mixtral")
    w13, qkv = ours["layers.1.moe.experts.w13"], ours["layers.0.attn.qkv.weight"]
    expert = "model.layers.1.block_sparse_moe.experts.2"
    np.testing.assert_array_equal(theirs[f"{expert}.w1.weight"], w13[2, :, :5].T)
    np.testing.assert_array_equal(theirs[f"{expert}.w3.weight"], w13[2, :, 5:].T)
    np.testing.assert_array_equal(theirs[f"{expert}.w2.weight"], ours["layers.1.moe.experts.w2"][2].T)
    np.testing.assert_array_equal(theirs["model.layers.0.self_attn.q_proj.weight"], qkv[:8])
    np.testing.assert_array_equal(theirs["model.layers.0.self_attn.k_proj.weight"], qkv[8:12])
    np.testing.assert_array_equal(theirs["model.layers.0.self_attn.v_proj.weight"], qkv[12:])


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_golden_weights_return_to_the_published_names_and_bytes(case: str) -> None:
    tensors, metadata = read_tensors(case)
    reference = golden(tensors, metadata)
    layout = FAMILIES[json.loads(metadata["made_of"])["config"]["model_type"]].layout
    back = to_hf(reference.weights, reference.config, layout)
    published = {name.removeprefix("weight."): t for name, t in tensors.items() if name.startswith("weight.")}
    assert back.keys() == published.keys()
    for name, tensor in back.items():
        assert tensor.tobytes() == published[name].tobytes(), name


def test_full_size_tables() -> None:
    expert_tensors = 48 * 128 * 3
    attention_and_norms = 48 * (4 + 2 + 2 + 1)
    table = name_table(qwen3_30b_a3b(), "split")
    assert (
        sum(len(piece.names) for entry in table for piece in entry.pieces) == expert_tensors + attention_and_norms + 3
    )
    assert len(name_table(mixtral_8x7b(), "mixtral")) == 3 + 32 * (2 + 2 + 3)


def _drop(name: str) -> Callable[[dict[str, Array]], object]:
    return lambda tensors: tensors.pop(name)


def _put(name: str, tensor: Array) -> Callable[[dict[str, Array]], object]:
    return lambda tensors: tensors.update({name: tensor})


EXPERT = "model.layers.0.block_sparse_moe.experts.1.w2.weight"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_drop(EXPERT), f"{EXPERT} is missing"),
        (
            _put("model.layers.2.input_layernorm.weight", np.zeros(8, np.float32)),
            "layers.2.*not a tensor of this model",
        ),
        (_put(EXPERT, np.zeros((8, 4), np.float32)), r"shape \[8, 4\]: the config asks for \[8, 5\]"),
        (_put(EXPERT, np.zeros((8, 5), np.float16)), f"{EXPERT} is float16 but"),
        (_put("model.norm.weight", np.zeros(8, np.int32)), "model.norm.weight is int32"),
        (lambda tensors: tensors.clear(), "is missing"),
    ],
)
def test_damaged_model_names_the_tensor(damage: Callable[[dict[str, Array]], object], says: str) -> None:
    cfg = CONFIGS["mixtral"]
    tensors = to_hf(random_tensors(cfg), cfg, "mixtral")
    damage(tensors)
    with pytest.raises(CheckpointError, match=says) as caught:
        from_hf(tensors, cfg)
    assert "\n" not in str(caught.value)


def test_misspelt_tensor_is_pointed_at() -> None:
    cfg = CONFIGS["mixtral"]
    tensors = to_hf(random_tensors(cfg), cfg, "mixtral")
    tensors["model.norms.weight"] = tensors.pop("model.norm.weight")
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight is missing: 'model\.norms\.weight' is there instead"
    ):
        from_hf(tensors, cfg)


def test_tied_copy_and_old_constants_are_accepted() -> None:
    cfg = CONFIGS["fused"]
    tensors = to_hf(random_tensors(cfg), cfg, "fused")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    assert from_hf(tensors, cfg).keys() == parameter_shapes(cfg).keys()
    tensors["lm_head.weight"][0, 0] += 1.0
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        from_hf(tensors, cfg)


@pytest.mark.parametrize(
    ("cfg", "layout", "says"),
    [
        (CONFIGS["split"], "mixtral", r"layers\.0\.attn\.q_norm\.weight: .*'mixtral' has no place"),
        (CONFIGS["fused"], "mixtral", r"layers\.0\.ffn\.w13\.weight"),
        (CONFIGS["mixtral"], "llama", "layout 'llama' is unknown: must be one of mixtral"),
    ],
    ids=["q_norm", "dense", "unknown"],
)
def test_model_that_a_layout_cannot_hold(cfg: ModelConfig, layout: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        to_hf(random_tensors(cfg), cfg, layout)


def test_model_that_no_layout_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = small(moe=MoEConfig(num_experts=3, top_k=2, ffn=5, shared_ffn=4))
    monkeypatch.setattr(huggingface, "LAYOUTS", {"mixtral": LAYOUTS["mixtral"]})
    with pytest.raises(CheckpointError, match=r"layers\.0\.moe\.shared\.w13\.weight"):
        from_hf({}, cfg)
