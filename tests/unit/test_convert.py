"""Hugging Face folder to checkpoint and back: every family and dtype, byte for byte, and everything around it."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.convert_export import export_folder
from ascend_moe_train.checkpoint.convert_import import import_folder
from ascend_moe_train.checkpoint.convert_target import ExportOptions
from ascend_moe_train.checkpoint.converted import CARRIED, MODEL, PADDING, model_meta
from ascend_moe_train.checkpoint.huggingface import from_hf, tensor_shapes, to_hf
from ascend_moe_train.checkpoint.huggingface_config import model_config_from_hf
from ascend_moe_train.checkpoint.layout import Manifest
from ascend_moe_train.checkpoint.starting import open_start
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.presets import tiny
from tests.hf_folders import (
    EXTRAS,
    golden_folder,
    golden_model,
    read_folder,
    same_tensors,
    silent,
    write_folder,
)
from tests.oracle.golden import FAMILY_CASES

MIXTRAL, QWEN3, LLAMA, V3 = "mixtral_tiny", "qwen3_moe_tiny", "llama_tiny", "deepseek_v3_tiny"


def imported(source: Path, out: Path, **options: Any) -> tuple[dict[str, Any], Manifest]:
    import_folder(source, out, progress=silent, **options)
    return store.load(out)[0], store.read_manifest(out)


def exported(checkpoint: Path, out: Path, max_shard_bytes: int = 10**9, **options: Any) -> dict[str, Any]:
    export_folder(checkpoint, out, ExportOptions(**options), max_shard_bytes=max_shard_bytes, progress=silent)
    return read_folder(out)


@pytest.mark.parametrize("case", FAMILY_CASES)
@pytest.mark.parametrize(("dtype", "shards"), [("BF16", 3), ("F32", 1), ("F16", 2)])
def test_round_trip_is_byte_identical(tmp_path: Path, case: str, dtype: str, shards: int) -> None:
    config, tensors = golden_model(case, dtype)
    source = write_folder(tmp_path / "hf", config, tensors, shards=shards)
    ours, manifest = imported(source, tmp_path / "ours", max_file_bytes=20_000)
    model = model_meta(manifest.meta, "here").model
    expected = from_hf(tensors, model)
    same_tensors({name.removeprefix(MODEL): value for name, value in ours.items()}, expected)
    assert len(manifest.by_file()) > 1
    same_tensors(exported(tmp_path / "ours", tmp_path / "back", max_shard_bytes=30_000), tensors)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    for name, data in EXTRAS.items():
        assert (tmp_path / "back" / name).read_bytes() == data


def test_index_is_that_of_transformers(tmp_path: Path) -> None:
    _, tensors = golden_model(QWEN3)
    imported(golden_folder(tmp_path / "hf", QWEN3), tmp_path / "ours")
    exported(tmp_path / "ours", tmp_path / "back", max_shard_bytes=10_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert index["metadata"]["total_parameters"] == sum(value.size for value in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for file in files:
        size_bytes = sum(value.nbytes for name, value in tensors.items() if index["weight_map"][name] == file)
        assert size_bytes <= 10_000


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    imported(golden_folder(tmp_path / "hf", QWEN3), tmp_path / "ours")
    exported(tmp_path / "ours", tmp_path / "back")
    assert {path.name for path in (tmp_path / "back").iterdir()} == {"config.json", "model.safetensors", *EXTRAS}


def test_what_is_reported(tmp_path: Path) -> None:
    config, tensors = golden_model(QWEN3)
    source = write_folder(tmp_path / "hf", config, tensors, shards=2)
    (source / "modeling_custom.py").write_text("raise SystemExit")
    converted = import_folder(source, tmp_path / "ours", progress=silent)
    assert (converted.model_type, converted.experts) == ("qwen3_moe", config["num_local_experts"])
    assert converted.moe_layers == config["num_hidden_layers"]
    assert converted.tensors_read == len(tensors)
    assert converted.bytes_read == converted.bytes_written == sum(value.nbytes for value in tensors.values())
    assert converted.notes == ("not taken over: modeling_custom.py",)


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    import_folder(golden_folder(tmp_path / "hf", QWEN3), tmp_path / "ours", progress=lambda a, b: calls.append((a, b)))
    assert calls[-1][0] == calls[-1][1] > 0
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_fused_names_come_back_fused(tmp_path: Path) -> None:
    config, tensors = golden_model(QWEN3)
    model = model_config_from_hf(config)
    fused = to_hf(from_hf(tensors, model), model, "fused")
    imported(write_folder(tmp_path / "hf", config, fused), tmp_path / "ours")
    same_tensors(exported(tmp_path / "ours", tmp_path / "back"), fused)


def test_tied_copies_and_constants_come_back(tmp_path: Path) -> None:
    config, tensors = golden_model(QWEN3)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.arange(6, dtype=np.float32)
    source = write_folder(tmp_path / "hf", config, tensors)
    ours, _ = imported(source, tmp_path / "ours")
    assert MODEL + "head.weight" not in ours
    assert [name for name in ours if name.startswith(CARRIED)] == [
        CARRIED + "model.layers.0.self_attn.rotary_emb.inv_freq"
    ]
    same_tensors(exported(tmp_path / "ours", tmp_path / "back"), tensors)


def test_padded_vocabulary_is_dropped_and_restored(tmp_path: Path) -> None:
    config, tensors = golden_model(MIXTRAL)
    rows = config["vocab_size"]
    config["vocab_size"] = rows + 3
    rng = np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = rng.standard_normal((3, tensors[name].shape[1])).astype(tensors[name].dtype)
        tensors[name] = np.concatenate([tensors[name], more])
    source = write_folder(tmp_path / "hf", config, tensors)
    ours, manifest = imported(source, tmp_path / "ours", vocab_size=rows)
    assert ours[MODEL + "embed.weight"].shape[0] == ours[MODEL + "head.weight"].shape[0] == rows
    assert ours[PADDING + "embed.weight"].shape[0] == 3
    assert model_meta(manifest.meta, "here").model.vocab_size == rows
    same_tensors(exported(tmp_path / "ours", tmp_path / "back"), tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_padding_beyond_what_the_config_says(tmp_path: Path) -> None:
    """Tensors of Megatron's width, and a config.json that names the tokenizer's."""
    config, tensors = golden_model(LLAMA)
    name = "model.embed_tokens.weight"
    tensors |= {
        each: np.concatenate([tensors[each], tensors[each][:4]]) for each in (name, "lm_head.weight") if each in tensors
    }
    source = write_folder(tmp_path / "hf", config, tensors)
    with pytest.raises(CheckpointError, match=r"embed_tokens.* has shape .*: the config asks for"):
        import_folder(source, tmp_path / "ours", progress=silent)
    imported(source, tmp_path / "ours", vocab_size=config["vocab_size"])
    same_tensors(exported(tmp_path / "ours", tmp_path / "back"), tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_export_pads_with_zeros(tmp_path: Path) -> None:
    config, tensors = golden_model(MIXTRAL)
    imported(write_folder(tmp_path / "hf", config, tensors), tmp_path / "ours")
    back = exported(tmp_path / "ours", tmp_path / "back", vocab_size=64)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == 64
    rows = config["vocab_size"]
    same_tensors({"w": back["lm_head.weight"][:rows]}, {"w": tensors["lm_head.weight"]})
    assert back["lm_head.weight"].shape[0] == 64 and not back["lm_head.weight"][rows:].any()


def test_more_rows_than_there_are(tmp_path: Path) -> None:
    source = golden_folder(tmp_path / "hf", MIXTRAL)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight' has 61 rows: --vocab-size 62 is more"):
        import_folder(source, tmp_path / "ours", vocab_size=62, progress=silent)
    imported(source, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="--vocab-size 60 is less than the model's vocabulary of 61"):
        exported(tmp_path / "ours", tmp_path / "back", vocab_size=60)


def run_checkpoint(root: Path, **changes: Any) -> dict[str, Any]:
    """Saves what a training run saves, and returns the weights."""
    model = tiny().model_copy(update=changes)
    config = {"config": {"model": model.model_dump(mode="json"), "data": {"seq_len": 32}}, "state": {}}
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in tensor_shapes(model).items()}
    tensors = {MODEL + name: value for name, value in weights.items()}
    tensors |= {f"optim.first.{name}": value for name, value in weights.items()}
    store.save(root, 7, tensors, config, keep=1)
    return weights


def test_export_of_a_training_run(tmp_path: Path) -> None:
    weights = run_checkpoint(tmp_path / "run")
    back = exported(tmp_path / "run", tmp_path / "back", extras={"tokenizer.json": b"{}"})
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("mixtral", "float32")
    assert config["max_position_embeddings"] == 32
    same_tensors(from_hf(back, model_config_from_hf(config)), weights)
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == b"{}"


def test_export_rounds_to_the_dtype_asked_for(tmp_path: Path) -> None:
    weights = run_checkpoint(tmp_path / "run", qk_norm="head")
    back = exported(tmp_path / "run", tmp_path / "back", dtype="bf16")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("qwen3_moe", "bfloat16")
    rounded = {name: value.astype(ml_dtypes.bfloat16) for name, value in weights.items()}
    same_tensors(from_hf(back, model_config_from_hf(config)), rounded)


def test_what_a_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    config, tensors = golden_model(LLAMA, "F32")
    tensors["model.norm.weight"][0] = 1e6
    imported(write_folder(tmp_path / "hf", config, tensors), tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' as F16: holds infinities"):
        exported(tmp_path / "ours", tmp_path / "back", dtype="fp16")
    assert not (tmp_path / "back").exists()


def test_export_like_another_folder(tmp_path: Path) -> None:
    config, tensors = golden_model(MIXTRAL, "F32")
    source = write_folder(tmp_path / "hf", config, tensors)
    imported(source, tmp_path / "ours")
    loaded, manifest = store.load(tmp_path / "ours")[0], store.read_manifest(tmp_path / "ours")
    model = model_meta(manifest.meta, "here").model
    trained = {name: value * 2 for name, value in loaded.items()}
    store.save(tmp_path / "run", 1, trained, {"config": {"model": model.model_dump(mode="json")}}, keep=1)
    for like in (source, tmp_path / "ours"):
        back = exported(tmp_path / "run", tmp_path / f"back-{like.name}", like=like)
        same_tensors(back, {name: value * 2 for name, value in tensors.items()})
        found = json.loads((tmp_path / f"back-{like.name}" / "config.json").read_text())
        assert {key: found.get(key) for key in config if "dtype" not in key} == {
            key: value for key, value in config.items() if "dtype" not in key
        }
        assert (tmp_path / f"back-{like.name}" / "tokenizer.json").exists()


def test_a_fine_tuned_run_is_exported_as_what_it_started_from(tmp_path: Path) -> None:
    config, tensors = golden_model(MIXTRAL, "F32")
    imported(write_folder(tmp_path / "hf", config, tensors), tmp_path / "ours")
    start = open_start(tmp_path / "ours")
    meta = {"config": {"model": start.model.model_dump(mode="json")}, "started_from": start.record.model_dump()}
    store.save(tmp_path / "run", 1, store.load(tmp_path / "ours")[0], meta, keep=1)
    same_tensors(exported(tmp_path / "run", tmp_path / "back"), tensors)
    found = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key for key in found.keys() | config.keys() if found.get(key) != config.get(key)} <= {
        "dtype",
        "torch_dtype",
    }
    assert (tmp_path / "back" / "chat_template.jinja").exists()
    (tmp_path / "ours").rename(tmp_path / "moved")
    exported(tmp_path / "run", tmp_path / "without")
    assert not (tmp_path / "without" / "chat_template.jinja").exists()


def test_adapters_alone_are_not_a_model(tmp_path: Path) -> None:
    meta = {"config": {"model": tiny().model_dump(mode="json")}}
    store.save(tmp_path / "run", 1, {"adapters.x": np.zeros(3, np.float32)}, meta, keep=1)
    with pytest.raises(CheckpointError, match="holds adapters only; `amt convert merge`"):
        exported(tmp_path / "run", tmp_path / "back")


def test_export_like_another_model(tmp_path: Path) -> None:
    imported(golden_folder(tmp_path / "a", MIXTRAL), tmp_path / "ours")
    other = golden_folder(tmp_path / "b", QWEN3)
    with pytest.raises(CheckpointError, match=r"b: model\.\S+ is .* there, but .* in the checkpoint"):
        exported(tmp_path / "ours", tmp_path / "back", like=other)


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({}, {"model_type": "mixtrel"}, "'mixtrel' is unknown; allowed: .*did you mean mixtral"),
        ({}, {"model_type": "llama"}, "'llama' is no family of models with experts"),
        ({"qk_norm": "head"}, {"model_type": "mixtral"}, "'mixtral' computes model.qk_norm = none, .* has head"),
    ],
)
def test_families_that_do_not_compute_it(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    run_checkpoint(tmp_path / "run", **changes)
    with pytest.raises(CheckpointError, match=says):
        exported(tmp_path / "run", tmp_path / "back", **options)
    assert not (tmp_path / "back").exists()


def test_no_family_computes_it(tmp_path: Path) -> None:
    moe = tiny().moe
    assert moe is not None
    run_checkpoint(tmp_path / "run", moe=moe.model_copy(update={"shared_ffn": 7}), qk_norm="full")
    with pytest.raises(CheckpointError, match="no Hugging Face family computes this model: "):
        exported(tmp_path / "run", tmp_path / "back")
