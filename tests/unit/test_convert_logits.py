"""What a converted checkpoint means in MindSpore: the logits of transformers, generated text, --verify logits."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ascend_moe_train.checkpoint.convert_import import import_folder
from ascend_moe_train.checkpoint.starting import Start, open_start
from ascend_moe_train.cli import main as cli
from ascend_moe_train.data.tokenizer import train_tokenizer
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.train import verify_logits
from tests.hf_folders import golden_folder, golden_model, read_folder, silent, write_folder
from tests.oracle.differences import relative_error
from tests.oracle.golden import golden, read_tensors

QWEN3 = "qwen3_moe_tiny"
HAS_TORCH = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None


@pytest.mark.parametrize("case", [QWEN3, "deepseek_v3_tiny"])
def test_imported_model_has_the_logits_of_transformers(tmp_path: Path, case: str) -> None:
    reference = golden(*read_tensors(case))
    import_folder(golden_folder(tmp_path / "hf", case, "F32"), tmp_path / "ours", progress=silent)
    tokens_1S = reference.tokens_BS[:1].astype(np.int32)
    found_SV = verify_logits.our_logits(open_start(tmp_path / "ours"), tokens_1S)
    assert relative_error(found_SV, reference.logits_BSV[0]) < verify_logits.TOLERANCE


def test_text_from_an_imported_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, tensors = golden_model(QWEN3)
    tokenizer = train_tokenizer(["hello world"], 257)
    rows = -(-257 // config["vocab_size"])
    name = "model.embed_tokens.weight"
    tensors[name] = np.concatenate([tensors[name]] * rows)[:257]
    extras = {"tokenizer.json": tokenizer.to_json().encode()}
    write_folder(tmp_path / "hf", config | {"vocab_size": 257}, tensors, extras=extras)
    import_folder(tmp_path / "hf", tmp_path / "ours", progress=silent)
    command = ["generate", "--checkpoint", str(tmp_path / "ours"), "--prompt", "hello", "--max-tokens", "3", "--json"]
    assert cli.main([*command, "--context", "16"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["text"].startswith("hello") and shown["tokens"] <= 3


def test_text_needs_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "hf", *golden_model(QWEN3), extras={})
    import_folder(tmp_path / "hf", tmp_path / "ours", progress=silent)
    assert cli.main(["generate", "--checkpoint", str(tmp_path / "ours"), "--prompt", "x"]) == 2
    assert "ours: came without tokenizer.json: name one with --tokenizer" in capsys.readouterr().err


@pytest.mark.skipif(HAS_TORCH, reason="torch is installed")
def test_verify_logits_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = golden_folder(tmp_path / "hf", QWEN3)
    assert cli.main(["convert", "import", str(folder), str(tmp_path / "ours"), "--verify", "logits"]) == 2
    assert "--verify logits needs torch and transformers: pip install" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def stood_in(start: Start, folder: Path, tokens_1S: NDArray[np.int32]) -> NDArray[np.float64]:
    return verify_logits.our_logits(start, tokens_1S)


def test_logits_that_differ_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers is stood in for by our own model of changed weights."""
    folder = golden_folder(tmp_path / "hf", QWEN3)
    import_folder(folder, tmp_path / "same", progress=silent)
    tensors = read_folder(folder)
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 2
    config, _ = golden_model(QWEN3)
    write_folder(tmp_path / "changed", config, tensors)
    import_folder(tmp_path / "changed", tmp_path / "other", progress=silent)
    monkeypatch.setattr(verify_logits, "find_spec", lambda name: "found")
    for stand_in, code in (("same", 0), ("other", 2)):
        start = open_start(tmp_path / stand_in)
        monkeypatch.setattr(
            verify_logits,
            "transformers_logits",
            lambda path, tokens, start=start: verify_logits.our_logits(start, tokens),
        )
        out = tmp_path / f"out-{stand_in}"
        assert cli.main(["convert", "import", str(folder), str(out), "--verify", "logits"]) == code
        assert out.exists() == (code == 0)
    assert "logits differ from those of" in capsys.readouterr().err


def test_too_large_for_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_folder(golden_folder(tmp_path / "hf", QWEN3), tmp_path / "ours", progress=silent)
    monkeypatch.setattr(verify_logits, "num_parameters", lambda model: 10**15)
    with pytest.raises(CheckpointError, match=r"has 4\.00 PB of fp32 weights, of memory .* are free"):
        verify_logits.compare_logits(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.skipif(not HAS_TORCH, reason="torch and transformers are not installed")
@pytest.mark.parametrize("case", [QWEN3, "mixtral_tiny", "deepseek_v3_tiny"])
def test_verify_logits_live(tmp_path: Path, case: str) -> None:
    folder = golden_folder(tmp_path / "hf", case)
    assert cli.main(["convert", "import", str(folder), str(tmp_path / "ours"), "--verify", "logits"]) == 0
    assert cli.main(["convert", "export", str(tmp_path / "ours"), str(tmp_path / "back"), "--verify", "logits"]) == 0
