"""What a checkpoint or a folder holds, and `amt convert inspect`."""

import json
from pathlib import Path

import numpy as np
import pytest

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.convert_import import import_folder
from ascend_moe_train.checkpoint.converted import MODEL
from ascend_moe_train.checkpoint.describe import describe
from ascend_moe_train.checkpoint.huggingface import tensor_shapes
from ascend_moe_train.cli import main as cli
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.model.counts import num_active_parameters, num_parameters
from ascend_moe_train.presets import tiny
from tests.hf_folders import EXTRAS, golden_folder, golden_model, silent, write_folder

QWEN3 = "qwen3_moe_tiny"


def test_both_sides_of_a_conversion_are_described_alike(tmp_path: Path) -> None:
    theirs = golden_folder(tmp_path / "hf", QWEN3, shards=2)
    import_folder(theirs, tmp_path / "ours", progress=silent)
    one, other = describe(theirs), describe(tmp_path / "ours")
    assert (one.format, other.format) == ("Hugging Face folder", "amt checkpoint")
    assert one.model == other.model and one.model is not None
    assert one.parameters == other.parameters == num_parameters(one.model)
    assert one.active_parameters == other.active_parameters == num_active_parameters(one.model)
    assert one.model_type == other.model_type == "qwen3_moe"
    assert one.layout == other.layout == "split"
    assert one.bytes_by_dtype == other.bytes_by_dtype == {"BF16": one.data_bytes}
    assert (one.files, one.step, other.step) == (2, None, 0)
    assert one.elements_by_part == other.elements_by_part == {"model": one.parameters}
    assert set(one.extras) == set(other.extras) == {"config.json", *EXTRAS}
    assert one.unusable is other.unusable is None


def test_a_run_is_described_by_its_newest_checkpoint(tmp_path: Path) -> None:
    model = tiny()
    weights = {MODEL + name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(model).items()}
    meta = {"config": {"model": model.model_dump(mode="json")}}
    for step in (5, 9):
        store.save(tmp_path, step, weights | {"optim.first.x": np.zeros(3, np.float32)}, meta, keep=3)
    found = describe(tmp_path)
    assert (found.step, found.other_steps, found.model, found.model_type) == (9, (5,), model, None)
    assert found.elements_by_part == {"model": num_parameters(model), "optim": 3}


def test_what_is_not_usable_is_described_all_the_same(tmp_path: Path) -> None:
    config, tensors = golden_model(QWEN3)
    folder = write_folder(tmp_path / "hf", config | {"model_type": "mamba"}, tensors)
    found = describe(folder)
    assert found.model is None and found.tensors == len(tensors)
    assert found.unusable is not None and "mamba" in found.unusable
    store.save(tmp_path / "other", 1, {"x": np.zeros(3, np.int64)}, {}, keep=1)
    assert "meta.model" in str(describe(tmp_path / "other").unusable)


@pytest.mark.parametrize("path", [".", "nothing"])
def test_nothing_to_describe(tmp_path: Path, path: str) -> None:
    with pytest.raises(CheckpointError, match=r"neither a checkpoint|no such folder"):
        describe(tmp_path / path)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = golden_folder(tmp_path / "hf", QWEN3)
    assert cli.main(["convert", "inspect", str(folder)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["family"] == "qwen3_moe"
    assert lines["experts"] == "8 in 2 layers, 3 per token"
    assert cli.main(["convert", "inspect", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"]["moe"]["num_experts"] == 8 and shown["path"] == str(folder)
