"""The tokenizer's files of an export, and where `amt convert export` finds them."""

import json
from pathlib import Path

import numpy as np
import pytest

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.converted import MODEL
from ascend_moe_train.checkpoint.huggingface import tensor_shapes
from ascend_moe_train.cli import main as cli
from ascend_moe_train.data.tokenizer import train_tokenizer
from ascend_moe_train.data.tokenizer_files import tokenizer_files
from ascend_moe_train.errors import DataError
from ascend_moe_train.presets import tiny


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "corpus" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(train_tokenizer(["hello world"], 257).to_json())
    return path


def run_of(tmp_path: Path, tokenizer: Path) -> Path:
    model = tiny()
    tensors = {MODEL + name: np.ones(shape, np.float32) for name, shape in tensor_shapes(model).items()}
    config = {"model": model.model_dump(mode="json"), "data": {"tokenizer": str(tokenizer), "seq_len": 16}}
    store.save(tmp_path / "run", 1, tensors, {"config": config}, keep=1)
    return tmp_path / "run"


def test_what_is_made(tokenizer: Path) -> None:
    files = tokenizer_files(tokenizer)
    assert files["tokenizer.json"] == tokenizer.read_bytes()
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": 0}


def test_what_lies_beside_comes_along(tokenizer: Path) -> None:
    (tokenizer.parent / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (tokenizer.parent / "chat_template.jinja").write_text("{{ messages }}")
    (tokenizer.parent / "manifest.json").write_text("{}")
    files = tokenizer_files(tokenizer)
    assert files["tokenizer_config.json"] == b'{"chat_template": "x"}'
    assert files["chat_template.jinja"] == b"{{ messages }}"
    assert "manifest.json" not in files


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.json: no such file"):
        tokenizer_files(tmp_path / "nothing.json")


def test_an_export_has_the_tokenizer_of_its_run(tmp_path: Path, tokenizer: Path) -> None:
    run = run_of(tmp_path, tokenizer)
    assert cli.main(["convert", "export", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


def test_a_tokenizer_that_has_gone_is_said(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, tokenizer)
    moved = tokenizer.rename(tmp_path / "moved.json")
    assert cli.main(["convert", "export", str(run), str(tmp_path / "out")]) == 0
    assert "the run's tokenizer is not there any more: left out" in capsys.readouterr().err
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert cli.main(["convert", "export", str(run), str(tmp_path / "other"), "--tokenizer", str(moved)]) == 0
    assert (tmp_path / "other" / "tokenizer.json").exists()
