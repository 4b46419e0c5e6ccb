"""New models from old ones: other vocabularies, experts from a dense model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.convert_export import export_folder
from ascend_moe_train.checkpoint.convert_import import import_folder
from ascend_moe_train.checkpoint.convert_target import ExportOptions
from ascend_moe_train.checkpoint.converted import MODEL, model_meta
from ascend_moe_train.checkpoint.derive import resize_vocabulary, upcycle
from ascend_moe_train.checkpoint.huggingface import from_hf, tensor_shapes
from ascend_moe_train.checkpoint.huggingface_config import model_config_from_hf
from ascend_moe_train.cli import main as cli
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.presets import tiny
from tests.hf_folders import golden_folder, golden_model, read_folder, same_tensors, silent
from tests.oracle.transformer import inputs, transformer

LLAMA, QWEN3, MIXTRAL = "llama_tiny", "qwen3_tiny", "mixtral_tiny"


def imported(tmp_path: Path, case: str, dtype: str = "BF16") -> Path:
    import_folder(golden_folder(tmp_path / "hf", case, dtype), tmp_path / "ours", progress=silent)
    return tmp_path / "ours"


def loaded(path: Path) -> tuple[dict[str, Any], ModelConfig]:
    tensors, meta = store.load(path)
    return {name.removeprefix(MODEL): value for name, value in tensors.items()}, model_meta(meta, "here").model


def make_moe(source: Path, out: Path, noise: float = 0.0, seed: int = 0) -> tuple[dict[str, Any], ModelConfig]:
    upcycle(source, out, num_experts=4, top_k=2, noise=noise, seed=seed, progress=silent)
    return loaded(out)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_added_rows_are_the_mean(tmp_path: Path, dtype: str) -> None:
    source = imported(tmp_path, MIXTRAL, dtype)
    before, model = loaded(source)
    resize_vocabulary(source, tmp_path / "grown", vocab_size=80, progress=silent)
    after, grown = loaded(tmp_path / "grown")
    assert grown == model.model_copy(update={"vocab_size": 80})
    for name in ("embed.weight", "head.weight"):
        rows = before[name].shape[0]
        mean = before[name].astype(np.float64).mean(axis=0).astype(before[name].dtype)
        same_tensors({name: after[name][:rows]}, {name: before[name]})
        for row in after[name][rows:]:
            np.testing.assert_allclose(
                row.astype(np.float32), mean.astype(np.float32), rtol=1e-2 if dtype == "BF16" else 1e-6
            )
    others = {name: value for name, value in before.items() if name not in ("embed.weight", "head.weight")}
    same_tensors({name: after[name] for name in others}, others)


def test_growing_and_cutting_gives_the_same_again(tmp_path: Path) -> None:
    config, tensors = golden_model(LLAMA)
    source = imported(tmp_path, LLAMA)
    resize_vocabulary(source, tmp_path / "grown", vocab_size=100, progress=silent)
    resize_vocabulary(tmp_path / "grown", tmp_path / "cut", vocab_size=config["vocab_size"], progress=silent)
    export_folder(tmp_path / "cut", tmp_path / "back", ExportOptions(), progress=silent)
    same_tensors(read_folder(tmp_path / "back"), tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_a_resized_model_is_exported_with_its_vocabulary(tmp_path: Path) -> None:
    source = imported(tmp_path, MIXTRAL)
    resize_vocabulary(source, tmp_path / "cut", vocab_size=50, progress=silent)
    export_folder(tmp_path / "cut", tmp_path / "back", ExportOptions(), progress=silent)
    config, _ = golden_model(MIXTRAL)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config | {"vocab_size": 50}
    assert read_folder(tmp_path / "back")["lm_head.weight"].shape[0] == 50


def test_many_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = imported(tmp_path, MIXTRAL)
    resize_vocabulary(source, tmp_path / "at-once", vocab_size=70, progress=silent)
    monkeypatch.setattr("ascend_moe_train.checkpoint.derive._ROWS_BYTES", 500)
    resize_vocabulary(source, tmp_path / "in-parts", vocab_size=70, progress=silent)
    one, other = loaded(tmp_path / "at-once")[0], loaded(tmp_path / "in-parts")[0]
    for name, value in one.items():
        np.testing.assert_allclose(value.astype(np.float32), other[name].astype(np.float32), rtol=1e-2)


@pytest.mark.parametrize("case", [LLAMA, QWEN3])
def test_upcycled_model_has_the_logits_of_the_dense_one(tmp_path: Path, case: str) -> None:
    source = imported(tmp_path, case, "F32")
    dense, dense_model = loaded(source)
    moe, model = make_moe(source, tmp_path / "moe")
    assert model.moe is not None and (model.moe.num_experts, model.moe.top_k, model.moe.normalize_topk) == (4, 2, True)
    assert {name: value.shape for name, value in moe.items()} == tensor_shapes(model)
    tokens_BS = np.random.default_rng(1).integers(0, model.vocab_size, (2, 11))
    given = inputs(tokens_BS, tokens_BS)
    as_fp64 = [{n: v.astype(np.float64) for n, v in weights.items()} for weights in (dense, moe)]
    before = transformer(as_fp64[0], dense_model, given)
    after = transformer(as_fp64[1], model, given)
    np.testing.assert_allclose(after.logits_BSV, before.logits_BSV, rtol=1e-10, atol=1e-12)


def test_upcycled_routers_spread_tokens_and_differ(tmp_path: Path) -> None:
    source = imported(tmp_path, QWEN3, "F32")
    moe, model = make_moe(source, tmp_path / "moe")
    routers = [value for name, value in moe.items() if name.endswith("router.weight")]
    assert len(routers) == model.num_layers
    assert all(0.5 * model.init_std < router.std() < 2 * model.init_std for router in routers)
    assert not np.array_equal(routers[0], routers[1])
    again, _ = make_moe(source, tmp_path / "again")
    same_tensors(again, moe)
    other, _ = make_moe(source, tmp_path / "other", seed=1)
    assert not np.array_equal(other["layers.0.moe.router.weight"], moe["layers.0.moe.router.weight"])


def test_noise_makes_experts_differ_by_its_share(tmp_path: Path) -> None:
    source = imported(tmp_path, QWEN3, "F32")
    dense, _ = loaded(source)
    moe, model = make_moe(source, tmp_path / "moe", noise=0.1)
    for layer in range(model.num_layers):
        for name in ("w13", "w2"):
            experts = moe[f"layers.{layer}.moe.experts.{name}"]
            original = dense[f"layers.{layer}.ffn.{name}.weight"].T
            changes = experts - original
            assert changes.std() == pytest.approx(0.1 * original.std(), rel=0.1)
            assert not np.array_equal(changes[0], changes[1])


@pytest.mark.parametrize(("case", "family"), [(LLAMA, "mixtral"), (QWEN3, "qwen3_moe")])
def test_upcycled_model_is_exported(tmp_path: Path, case: str, family: str) -> None:
    source = imported(tmp_path, case)
    moe, _ = make_moe(source, tmp_path / "moe")
    converted = export_folder(tmp_path / "moe", tmp_path / "back", ExportOptions(), progress=silent)
    assert converted.model_type == family
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    same_tensors(from_hf(read_folder(tmp_path / "back"), model_config_from_hf(config)), moe)


def test_a_training_run_is_upcycled_without_its_optimizer(tmp_path: Path) -> None:
    model = tiny().model_copy(update={"moe": None})
    weights = {name: np.ones(shape, np.float32) for name, shape in tensor_shapes(model).items()}
    tensors = {MODEL + name: value for name, value in weights.items()} | {"optim.first.norm.weight": np.ones(32)}
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    store.save(tmp_path / "run", 3, tensors, {"config": {"model": model.model_dump(mode="json")}}, keep=1)
    make_moe(tmp_path / "run", tmp_path / "moe")
    assert all(name.startswith(MODEL) for name in store.load(tmp_path / "moe")[0])


@pytest.mark.parametrize(
    ("case", "arguments", "says"),
    [
        (MIXTRAL, ["upcycle", "--experts", "4", "--top-k", "2"], "has 4 experts already"),
        (LLAMA, ["upcycle", "--experts", "4", "--top-k", "5"], "--top-k 5 is more than --experts 4"),
        (LLAMA, ["upcycle", "--experts", "1", "--top-k", "1"], "1 is not in the range"),
        (LLAMA, ["resize", "--vocab-size", "0"], "0 is not in the range"),
    ],
)
def test_what_is_impossible(
    tmp_path: Path, case: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = imported(tmp_path, case)
    verb, *options = arguments
    assert cli.main(["convert", verb, str(source), str(tmp_path / "out"), *options]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_with_a_tensor_missing(tmp_path: Path) -> None:
    source = imported(tmp_path, LLAMA)
    tensors, meta = store.load(source)
    del tensors[MODEL + "norm.weight"]
    broken = store.save(tmp_path / "broken", 0, tensors, meta, keep=1)
    with pytest.raises(CheckpointError, match=r"step-00000000: tensor norm\.weight is missing"):
        make_moe(broken, tmp_path / "moe")
