"""Adapters merged into their weights, and as PEFT reads them: each module's B A is its part of what was added."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.convert_export import export_folder
from ascend_moe_train.checkpoint.convert_import import import_folder
from ascend_moe_train.checkpoint.convert_target import ExportOptions
from ascend_moe_train.checkpoint.huggingface import to_hf
from ascend_moe_train.checkpoint.merge import merge_adapters
from ascend_moe_train.checkpoint.peft import export_adapters, peft_files
from ascend_moe_train.checkpoint.starting import open_start, open_whole, read_weights
from ascend_moe_train.cli import main as cli
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.adapters import adapters, delta
from ascend_moe_train.model.config import LoraConfig, ModelConfig
from tests.adapted import Array, random_adapters, weights, write_adapters, write_weights
from tests.hf_folders import golden_folder, read_folder
from tests.unit.test_starting import LORA, MODEL_CONFIG

OF_MOST = ("attn.qkv", "attn.out", "experts.w13", "experts.w2")
# Golden models, what of them is adapted, and the layout of their published files.
FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "mixtral_tiny": (OF_MOST, "mixtral"),
    "qwen3_moe_tiny": (OF_MOST, "split"),
    "olmoe_tiny": (OF_MOST, "split"),
    "llama_tiny": (("attn.qkv", "attn.out", "ffn.w13", "ffn.w2"), "split"),
    "deepseek_v2_tiny": (("q", "kv_down", "kv_up", "attn.out", "experts.w13", "experts.w2"), "split"),
    "deepseek_v3_tiny": (("q_down", "q_up", "kv_down", "kv_up", "attn.out", "experts.w13", "experts.w2"), "split"),
    "glm4_moe_tiny": (OF_MOST, "split"),
}


def silent(done_bytes: int, total_bytes: int) -> None:
    """No progress bar."""


def adapted_folder(folder: Path, case: str, targets: tuple[str, ...], dtype: str = "F32") -> tuple[Path, LoraConfig]:
    """A golden model, imported, with adapters on it."""
    source = golden_folder(folder / "hf", case, dtype)
    base = folder / "base" / "step-00000000"
    import_folder(source, base, progress=silent)
    lora = LoraConfig(r=3, alpha=5.0, targets=targets)
    model = open_whole(base).model
    return write_adapters(folder / "adapted", base, lora, random_adapters(model, lora)), lora


@pytest.mark.parametrize("case", FAMILIES)
def test_each_module_has_its_part_of_what_was_added(case: str, tmp_path: Path) -> None:
    targets, layout = FAMILIES[case]
    path, lora = adapted_folder(tmp_path, case, targets)
    start = open_start(path)
    export_adapters(path, tmp_path / "peft", "some/model")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert sorted(each.name for each in (tmp_path / "peft").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 5.0, "some/model")
    values = random_adapters(start.model, lora)
    added = {name: np.zeros(shape, np.float32) for name, shape in start.shapes.items()}
    added |= {adapter.weight: delta(adapter, values, lora) for adapter in adapters(start.model, lora)}
    seen = 0
    for name, expected in to_hf(added, start.model, layout).items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if not expected.any():
            assert f"{stem}.lora_A.weight" not in found
            continue
        a, b = found[f"{stem}.lora_A.weight"], found[f"{stem}.lora_B.weight"]
        assert (a.shape, b.shape) == ((3, expected.shape[1]), (expected.shape[0], 3))
        np.testing.assert_allclose(b @ a * (5.0 / 3.0), expected, rtol=1e-4, atol=1e-6)
        assert stem.rpartition(".")[2] in config["target_modules"]
        seen += 1
    assert len(found) == 2 * seen > 0


@pytest.mark.parametrize(
    ("case", "targets", "message"),
    [
        (
            "deepseek_v2_tiny",
            ("ffn.w13",),
            r"layers\.0\.ffn\.w13\.weight: PEFT cannot tell an adapter of ffn\.w13 from",
        ),
        (
            "deepseek_v2_tiny",
            ("shared.w2",),
            r"PEFT cannot tell an adapter of moe\.shared\.w2 from those of the experts",
        ),
        ("gpt_oss_tiny", ("experts.w13",), r"experts\.w13: is no module of its own there .*: merge the adapters"),
    ],
)
def test_what_peft_has_no_place_for(case: str, targets: tuple[str, ...], message: str, tmp_path: Path) -> None:
    path, _ = adapted_folder(tmp_path, case, targets)
    with pytest.raises(CheckpointError, match=message):
        export_adapters(path, tmp_path / "peft", "some/model")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapted", "base", "hf"]


@pytest.mark.parametrize(
    ("case", "dtype"), [("qwen3_moe_tiny", "F32"), ("mixtral_tiny", "BF16"), ("gpt_oss_tiny", "F32")]
)
def test_a_merged_checkpoint_exports_as_its_base_does(case: str, dtype: str, tmp_path: Path) -> None:
    path, _ = adapted_folder(tmp_path, case, ("attn.qkv", "experts.w13"), dtype)
    start = open_start(path)
    converted = merge_adapters(path, tmp_path / "merged", progress=silent)
    assert converted.notes == (f"4 weights of {tmp_path}/base/step-00000000 have their adapters added",)
    merged = open_whole(tmp_path / "merged")
    base = store.read_manifest(tmp_path / "base" / "step-00000000")
    expected = dict(read_weights(start, start.shapes))
    for name, value in read_weights(merged, merged.shapes):
        stored = merged.manifest.tensors[f"model.{name}"].dtype
        assert stored == base.tensors[f"model.{name}"].dtype
        rounded = expected[name] if stored == "F32" else expected[name].astype("bfloat16").astype(np.float32)
        np.testing.assert_array_equal(value, rounded)
    export_folder(tmp_path / "merged", tmp_path / "out", ExportOptions(), progress=silent)
    before, after = read_folder(tmp_path / "hf"), read_folder(tmp_path / "out")
    assert before.keys() == after.keys()
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert {name for name in before if before[name].tobytes() != after[name].tobytes()} == {
        name for name in before if not name.endswith("bias") and any(word in name for word in changed_words(case))
    }


def changed_words(case: str) -> tuple[str, ...]:
    attention = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    experts = {
        "mixtral_tiny": ("w1.weight", "w3.weight"),
        "qwen3_moe_tiny": ("gate_proj", "up_proj"),
        "gpt_oss_tiny": ("experts.gate_up_proj",),
    }[case]
    return (*attention, *experts)


@pytest.fixture
def adapted(tmp_path: Path) -> Path:
    base = write_weights(tmp_path / "base", MODEL_CONFIG, weights(MODEL_CONFIG, dtype="BF16"))
    return write_adapters(tmp_path / "adapted", base, LORA, random_adapters(MODEL_CONFIG, LORA))


def test_a_merge_in_another_precision(adapted: Path, tmp_path: Path) -> None:
    merge_adapters(adapted, tmp_path / "merged", dtype="fp32", progress=silent)
    start, merged = open_start(adapted), open_whole(tmp_path / "merged")
    assert {entry.dtype for entry in merged.manifest.tensors.values()} == {"F32"}
    expected = dict(read_weights(start, start.shapes))
    for name, value in read_weights(merged, merged.shapes):
        np.testing.assert_array_equal(value, expected[name])
    assert merged.lora is None
    assert merged.manifest.step == 7


COMMANDS: dict[str, tuple[list[str], str]] = {
    "merge of whole weights": (["merge", "{base}", "{out}"], r"holds whole weights already, there are no adapters"),
    "merge onto something": (["merge", "{adapted}", "{base}"], r"base/step-00000001: is there already"),
    "merge of nothing": (["merge", "{folder}", "{out}"], r"no checkpoint here"),
    "adapter of whole weights": (["adapter", "{base}", "{out}", "--base", "x"], r"holds whole weights, no adapters"),
    "export of adapters": (["export", "{adapted}", "{out}"], r"holds adapters only; `amt convert merge` makes whole"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_command_with(case: str, adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = COMMANDS[case]
    places: dict[str, Any] = {"adapted": adapted, "base": tmp_path / "base" / "step-00000001", "folder": tmp_path}
    arguments = [word.format(out=tmp_path / "out", **places) for word in words]
    assert cli.main(["convert", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(printed.err)
    assert printed.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapted", "base"]


def test_commands_say_what_they_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = adapted_folder(tmp_path, "mixtral_tiny", ("attn.out", "experts.w13"))
    assert cli.main(["convert", "merge", str(path), str(tmp_path / "merged")]) == 0
    assert "4 weights of" in capsys.readouterr().out
    assert cli.main(["convert", "adapter", str(path), str(tmp_path / "peft"), "--base", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modules"] == 2 * (1 + 2 * 4)


def test_peft_reads_the_adapter(tmp_path: Path) -> None:
    """Where PEFT is installed: a model of transformers with the adapter gives what merged weights give."""
    peft, torch, transformers = (pytest.importorskip(name) for name in ("peft", "torch", "transformers"))
    for case, (targets, _) in FAMILIES.items():
        folder = tmp_path / case
        path, _ = adapted_folder(folder, case, targets)
        export_adapters(path, folder / "peft", str(folder / "hf"))
        merge_adapters(path, folder / "merged", progress=silent)
        export_folder(folder / "merged", folder / "out", ExportOptions(), progress=silent)
        tokens = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(1))
        logits = []
        for name in ("hf", "out"):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
            if name == "hf":
                model = peft.PeftModel.from_pretrained(model, folder / "peft")
            with torch.no_grad():
                logits.append(model.eval()(input_ids=tokens).logits)
        difference = float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())
        assert difference < 1e-4, case


def test_a_dense_model_may_have_all_its_weights_adapted() -> None:
    model = ModelConfig(vocab_size=9, hidden=8, num_layers=1, num_heads=2, num_kv_heads=2, ffn=12)
    lora = LoraConfig(r=2, targets=("qkv", "out", "w13", "w2"))
    tensors: dict[str, Array] = random_adapters(model, lora)
    config, made = peft_files(model, lora, tensors, "split", "x")
    assert config["target_modules"] == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    assert len(made) == 14
