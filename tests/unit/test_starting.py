"""Starting from a checkpoint: whole or adapters, in any precision; what does not fit is one line."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.converted import MODEL, converted_meta
from ascend_moe_train.checkpoint.starting import (
    check_model,
    open_start,
    open_whole,
    read_adapters,
    read_weights,
    weights_sha256,
)
from ascend_moe_train.config import load_run
from ascend_moe_train.errors import CheckpointError, ConfigError
from ascend_moe_train.model.adapters import adapters, delta
from ascend_moe_train.model.config import LoraConfig, ModelConfig, MoEConfig, MTPConfig, RopeConfig
from ascend_moe_train.train.inputs import model_of_run, open_first_weights
from tests.adapted import Array, random_adapters, weights, write_adapters, write_weights

MODEL_CONFIG = ModelConfig(
    vocab_size=20,
    hidden=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    ffn=12,
    moe=MoEConfig(num_experts=3, top_k=2, ffn=6, score="sigmoid", balance_bias_rate=0.01),
)
LORA = LoraConfig(r=2, alpha=3.0, targets=("attn.qkv", "experts.w13", "experts.w2"))


def read(path: Path) -> dict[str, Array]:
    start = open_start(path)
    return dict(read_weights(start, start.shapes))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_weights_are_widened_without_loss(dtype: str, tmp_path: Path) -> None:
    tensors = weights(MODEL_CONFIG, dtype=dtype)
    found = read(write_weights(tmp_path, MODEL_CONFIG, tensors))
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], value.astype(np.float32))


def test_a_folder_of_checkpoints_or_of_a_run_means_the_newest(tmp_path: Path) -> None:
    checkpoints = tmp_path / store.CHECKPOINTS
    write_weights(checkpoints, MODEL_CONFIG, weights(MODEL_CONFIG), step=3)
    newest = write_weights(checkpoints, MODEL_CONFIG, weights(MODEL_CONFIG, seed=5), step=20)
    assert open_whole(checkpoints).path == open_whole(tmp_path).path == newest
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        open_whole(tmp_path / "absent")


def test_a_hugging_face_folder_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint here; .* amt convert import"):
        open_whole(tmp_path)


def test_only_what_is_asked_for_is_read_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascend_moe_train.checkpoint.starting._GROUP_BYTES", 600)
    tensors = weights(MODEL_CONFIG)
    start = open_whole(write_weights(tmp_path, MODEL_CONFIG, tensors))
    names = ["norm.weight", "layers.1.moe.experts.w13", "embed.weight"]
    found = list(read_weights(start, names))
    assert [name for name, _ in found] == names
    for name, value in found:
        np.testing.assert_array_equal(value, tensors[name])


def without(name: str) -> Callable[[dict[str, Array]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, value: Array) -> Callable[[dict[str, Array]], None]:
    return lambda tensors: tensors.__setitem__(name, value)


# What is done to the tensors, or to `meta`, and what the line says.
DAMAGED: dict[str, tuple[Callable[[dict[str, Array]], None], dict[str, Any], str]] = {
    "a missing tensor": (without("norm.weight"), {}, r"step-00000001: tensor norm\.weight is missing"),
    "a missing bias": (
        without("layers.0.moe.router.balance_bias"),
        {},
        r"layers\.0\.moe\.router\.balance_bias is miss",
    ),
    "an unknown tensor": (put("norms.weight", np.ones(8, np.float32)), {}, r"'norms\.weight' is not a tensor of this"),
    "another shape": (put("norm.weight", np.ones(9, np.float32)), {}, r"norm\.weight has shape \[9\]: .* \[8\]"),
    "whole numbers": (put("norm.weight", np.ones(8, np.int32)), {}, r"norm\.weight is I32: a weight must be F32, F16"),
    "no model": (without("norm.weight"), {"model": None}, r"step-00000001.*: meta\.model = None"),
    "a model of ten thousand layers": (
        without("norm.weight"),
        {"model": MODEL_CONFIG.model_copy(update={"num_layers": 10**4}).model_dump(mode="json")},
        r"step-00000001: \d+ tensors are too few for model\.num_layers 10000",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_checkpoints_with(case: str, tmp_path: Path) -> None:
    change, meta, message = DAMAGED[case]
    tensors = weights(MODEL_CONFIG)
    change(tensors)
    named = {MODEL + name: value for name, value in tensors.items()}
    path = store.save(tmp_path, 1, named, converted_meta(MODEL_CONFIG, None) | meta, keep=1)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_whole(path)
    assert "\n" not in str(raised.value)


def changed(**changes: Any) -> ModelConfig:
    assert MODEL_CONFIG.moe is not None
    moe = {key: changes.pop(key) for key in list(changes) if key in MoEConfig.model_fields}
    return MODEL_CONFIG.model_copy(update={"moe": MODEL_CONFIG.moe.model_copy(update=moe), **changes})


@pytest.mark.parametrize(
    "model",
    [
        changed(aux_loss_coef=0.5, jitter=0.2, capacity_factor=1.5, balance_bias_rate=0.2),
        changed(init_std=0.5, head_dim=4),
    ],
)
def test_what_changes_no_output_may_differ(model: ModelConfig, tmp_path: Path) -> None:
    check_model(open_whole(write_weights(tmp_path, MODEL_CONFIG, weights(MODEL_CONFIG))), model)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            changed(norm_eps=0.5),
            r"holds a model with model\.norm_eps = 1e-05, this run has 0\.5: set it as it is there",
        ),
        (changed(rope=RopeConfig(theta=7.0)), r"model\.rope\.theta = 10000\.0, this run has 7\.0"),
        (changed(top_k=1), r"model\.moe\.top_k = 2, this run has 1"),
        (changed(vocab_size=21), r"model\.vocab_size = 20, this run has 21"),
        (changed(balance_bias_rate=None), r"tensor layers\.0\.moe\.router\.balance_bias has no place in this run's"),
        (changed(mtp=MTPConfig()), r"tensor mtp\.0\.embed_norm\.weight is missing: leave out of the model what has it"),
    ],
)
def test_what_changes_outputs_may_not(model: ModelConfig, message: str, tmp_path: Path) -> None:
    start = open_whole(write_weights(tmp_path, MODEL_CONFIG, weights(MODEL_CONFIG)))
    with pytest.raises(CheckpointError, match=message):
        check_model(start, model)


YARN = RopeConfig(scaling="yarn", factor=4.0, original_positions=8)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (RopeConfig(), RopeConfig(scaling="linear", factor=2.0)),
        (RopeConfig(), YARN),
        (YARN, YARN.model_copy(update={"factor": 8.0})),
    ],
)
def test_positions_may_be_scaled_to_reach_farther(then: RopeConfig, now: RopeConfig, tmp_path: Path) -> None:
    start = open_whole(write_weights(tmp_path, changed(rope=then), weights(MODEL_CONFIG)))
    check_model(start, changed(rope=now))


@pytest.mark.parametrize(
    ("then", "now", "key"),
    [
        (YARN, RopeConfig(), "factor"),
        (YARN, YARN.model_copy(update={"factor": 2.0}), "factor"),
        (YARN, YARN.model_copy(update={"factor": 8.0, "original_positions": 16}), "factor"),
        (YARN, RopeConfig(scaling="linear", factor=8.0), "factor"),
        (RopeConfig(), RopeConfig(scaling="linear", factor=1.0), "scaling"),
        (RopeConfig(), YARN.model_copy(update={"theta": 7.0}), "factor"),
    ],
)
def test_positions_may_not_be_scaled_in_another_way(
    then: RopeConfig, now: RopeConfig, key: str, tmp_path: Path
) -> None:
    start = open_whole(write_weights(tmp_path, changed(rope=then), weights(MODEL_CONFIG)))
    with pytest.raises(CheckpointError, match=rf"holds a model with model\.rope\.{key} = "):
        check_model(start, changed(rope=now))


def test_multi_token_prediction_may_be_left_out(tmp_path: Path) -> None:
    model = changed(mtp=MTPConfig())
    start = open_whole(write_weights(tmp_path, model, weights(model)))
    check_model(start, MODEL_CONFIG)


# Adapters


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_weights(tmp_path / "base", MODEL_CONFIG, weights(MODEL_CONFIG, dtype="BF16"))


@pytest.fixture
def adapted(base: Path, tmp_path: Path) -> Path:
    return write_adapters(tmp_path / "adapted", base, LORA, random_adapters(MODEL_CONFIG, LORA))


def test_adapters_are_read_with_the_weights_that_they_adapt(base: Path, adapted: Path) -> None:
    plain, found, values = read(base), read(adapted), random_adapters(MODEL_CONFIG, LORA)
    changes = {adapter.weight: delta(adapter, values, LORA) for adapter in adapters(MODEL_CONFIG, LORA)}
    assert len(changes) == 6
    for name, value in plain.items():
        np.testing.assert_array_equal(found[name], value + changes[name] if name in changes else value)
    alone = read_adapters(open_start(adapted))
    assert alone.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(alone[name], value)


def test_a_checksum_is_of_weights_alone(base: Path, tmp_path: Path) -> None:
    same = write_weights(tmp_path / "same", MODEL_CONFIG, weights(MODEL_CONFIG, dtype="BF16"), step=9)
    other = write_weights(tmp_path / "other", MODEL_CONFIG, weights(MODEL_CONFIG, seed=8, dtype="BF16"))
    wide = write_weights(tmp_path / "wide", MODEL_CONFIG, weights(MODEL_CONFIG))
    sums = [weights_sha256(store.read_manifest(path)) for path in (base, same, other, wide)]
    assert sums[0] == sums[1]
    assert len(set(sums)) == 3


def rewrite_base(base: Path, adapted: Path) -> None:
    write_weights(base.parent, MODEL_CONFIG, weights(MODEL_CONFIG, seed=8, dtype="BF16"))


def remove_base(base: Path, adapted: Path) -> None:
    shutil.rmtree(base)


def adapt_without_a_tensor(base: Path, adapted: Path) -> None:
    values = random_adapters(MODEL_CONFIG, LORA)
    del values["layers.1.attn.qkv.lora_b"]
    write_adapters(adapted.parent, base, LORA, values)


def adapt(lora: Mapping[str, Any] | None = None, **changes: Any) -> Callable[[Path, Path], None]:
    def write(base: Path, adapted: Path) -> None:
        config = {"model": MODEL_CONFIG.model_dump(mode="json"), "lora": lora or LORA.model_dump(mode="json")}
        write_adapters(adapted.parent, base, LORA, random_adapters(MODEL_CONFIG, LORA), config=config, **changes)

    return write


def adapt_adapters(base: Path, adapted: Path) -> None:
    record = open_start(adapted).record.model_dump()
    moved = adapted.rename(adapted.parent.parent / "step-00000007")
    record["path"] = str(moved)
    write_adapters(adapted.parent, base, LORA, random_adapters(MODEL_CONFIG, LORA), started_from=record)


ADAPTED: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "other weights below": (rewrite_base, r"adapts the weights that .*base/step-00000001 had then, it has others now"),
    "nothing below": (remove_base, r"step-00000007: adapts .*base/step-00000001, which is not there any more"),
    "a missing tensor": (adapt_without_a_tensor, r"step-00000007: tensor layers\.1\.attn\.qkv\.lora_b is missing"),
    "adapters below": (adapt_adapters, r"step-00000007: holds adapters only; `amt convert merge` makes whole weights"),
    "no word of what is below": (adapt(started_from=None), r"meta\.started_from is missing: the weights that are adap"),
    "words of another kind": (
        adapt(started_from={"path": 3}),
        r"manifest\.json: meta\.started_from\.path: Input should",
    ),
    "impossible settings": (adapt({"r": 0}), r"manifest\.json: meta\.config\.lora\.r: Input should be greater than 0"),
    "targets of another model": (
        adapt({"targets": ["w7"]}),
        r"manifest\.json: meta\.config: lora\.targets: 'w7' names",
    ),
}


@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_with(case: str, base: Path, adapted: Path) -> None:
    change, message = ADAPTED[case]
    change(base, adapted)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_start(adapted)
    assert "\n" not in str(raised.value)


def test_whole_weights_are_no_adapters(base: Path, adapted: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-00000007: holds adapters only; `amt convert merge`"):
        open_whole(adapted)
    with pytest.raises(CheckpointError, match=r"step-00000001: holds whole weights, no adapters"):
        read_adapters(open_start(base))


RUN = """\
run: {{dir: {folder}/run, steps: 4, init_from: {init_from}}}
model: {{vocab_size: 20, hidden: 8, num_layers: 2, num_heads: 2, num_kv_heads: 1, ffn: 12,
  moe: {{num_experts: 3, top_k: 2, ffn: 6, score: sigmoid, balance_bias_rate: 0.01}}}}
data: {{train: [{{path: x}}], tokenizer: x, seq_len: 8}}
optim: {{warmup_steps: 1}}
"""


def test_weights_are_read_once_or_always_below_adapters(base: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path, init_from=base.parent))
    plain = load_run(tmp_path / "run.yaml")
    with_lora = load_run(tmp_path / "run.yaml", ["lora.r=2"])
    random = load_run(tmp_path / "run.yaml", ["run.init_from=null"])
    assert open_first_weights(random) is None
    for config in (plain, with_lora):
        start = open_first_weights(config)
        assert start is not None and start.path == base
    write_weights(tmp_path / "run" / "checkpoints", MODEL_CONFIG, weights(MODEL_CONFIG))
    assert open_first_weights(plain) is None
    assert open_first_weights(with_lora) is not None


def test_the_model_is_that_of_the_checkpoint_unless_a_preset_is_named(base: Path, tmp_path: Path) -> None:
    text = RUN.format(folder=tmp_path, init_from=base.parent)
    head, _, tail = text.partition("model:")
    (tmp_path / "run.yaml").write_text(head + tail.partition("}}\n")[2])
    assert load_run(tmp_path / "run.yaml", (), model_of_run).model == MODEL_CONFIG
    changed_loss = load_run(tmp_path / "run.yaml", ["model.moe.aux_loss_coef=0.5"], model_of_run).model
    assert changed_loss == changed(aux_loss_coef=0.5)
    assert load_run(tmp_path / "run.yaml", ["model.preset=tiny"], model_of_run).model.hidden == 32
    with pytest.raises(ConfigError, match="model"):
        load_run(tmp_path / "run.yaml", ["run.init_from=null"], model_of_run)
    with pytest.raises(CheckpointError, match="absent: no checkpoint here"):
        load_run(tmp_path / "run.yaml", [f"run.init_from={tmp_path}/absent"], model_of_run)
    own = changed(aux_loss_coef=0.25)
    write_weights(tmp_path / "run" / "checkpoints", own, weights(own))
    assert load_run(tmp_path / "run.yaml", [f"run.init_from={tmp_path}/absent"], model_of_run).model == own
