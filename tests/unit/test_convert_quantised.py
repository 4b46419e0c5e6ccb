"""Quantised weights: block-scaled float8 (DeepSeek, Qwen3), decoded as in fp8_cast_bf16.py, and MXFP4 (gpt-oss)."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ascend_moe_train.checkpoint import huggingface_quantized, store
from ascend_moe_train.checkpoint.convert_export import export_folder
from ascend_moe_train.checkpoint.convert_import import import_folder
from ascend_moe_train.checkpoint.convert_target import ExportOptions
from ascend_moe_train.checkpoint.converted import MODEL
from ascend_moe_train.checkpoint.huggingface import from_hf, name_table
from ascend_moe_train.checkpoint.huggingface_config import model_config_from_hf
from ascend_moe_train.errors import CheckpointError
from tests.hf_folders import Array, golden_model, read_folder, same_tensors, silent, write_folder

CASE = "deepseek_v3_tiny"
ROWS, COLUMNS = 16, 8  # of a block; the published ones are 128 x 128, these leave ragged ends in the tiny model
QUANTIZED = ("_proj.weight", "_proj_with_mqa.weight")
SCALE = "_scale_inv"


def quantize(value: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Float8 numbers and a factor per block; not the nearest to `value`: any will do."""
    blocks = (-(-value.shape[0] // ROWS), -(-value.shape[1] // COLUMNS))
    scale = rng.uniform(1e-3, 2e-3, blocks).astype(np.float32)
    numbers = (value.astype(np.float32) * 100).astype(ml_dtypes.float8_e4m3fn)
    return numbers, scale


def decode(numbers: Array, scale: Array) -> Array:
    """Element by element, to be read."""
    out = np.empty(numbers.shape, ml_dtypes.bfloat16)
    for row, column in np.ndindex(*numbers.shape):
        factor = np.float32(scale[row // ROWS, column // COLUMNS])
        out[row, column] = np.float32(numbers[row, column]) * factor
    return out


def float8_model() -> tuple[dict[str, Any], dict[str, Array], dict[str, Array]]:
    """(config, tensors as published, tensors decoded)."""
    config, tensors = golden_model(CASE)
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [ROWS, COLUMNS],
    }
    rng = np.random.default_rng(0)
    stored, decoded = dict(tensors), dict(tensors)
    for name in tensors:
        if name.endswith(QUANTIZED):
            stored[name], stored[name + SCALE] = quantize(tensors[name], rng)
            decoded[name] = decode(stored[name], stored[name + SCALE])
    assert len(stored) > len(decoded) + 30
    return config, stored, decoded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config, stored, _ = float8_model()
    return write_folder(tmp_path / "hf", config, stored)


def test_float8_blocks_are_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, stored, decoded = float8_model()
    monkeypatch.setattr(huggingface_quantized, "PIECE_BYTES", 2 * ROWS * 32)  # several strips per tensor
    out = folder.parent / "out"
    converted = import_folder(folder, out, progress=silent)
    assert converted.notes == ("quantised weights were decoded to bfloat16",)
    assert converted.tensors_read == len(stored)
    tensors, _ = store.load(out)
    expected = from_hf(decoded, model_config_from_hf(config))
    same_tensors({name.removeprefix(MODEL): value for name, value in tensors.items()}, expected)


def test_an_export_is_bfloat16_and_says_so(folder: Path) -> None:
    config, _, decoded = float8_model()
    import_folder(folder, folder.parent / "out", progress=silent)
    export_folder(folder.parent / "out", folder.parent / "back", ExportOptions(), progress=silent)
    same_tensors(read_folder(folder.parent / "back"), decoded)
    found = json.loads((folder.parent / "back" / "config.json").read_text())
    dtype = "torch_dtype" if "torch_dtype" in config else "dtype"
    del config["quantization_config"]
    assert found == config | {dtype: "bfloat16"}


def test_all_values_of_float8() -> None:
    every = np.arange(256, dtype=np.uint8)
    for byte in every:
        sign, exponent, fraction = int(byte) >> 7, (int(byte) >> 3) & 15, int(byte) & 7
        value = 2.0**-6 * fraction / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + fraction / 8)
        value = float("nan") if exponent == 15 and fraction == 7 else value
        np.testing.assert_equal(float(huggingface_quantized._FLOAT8_VALUES[byte]), -value if sign else value)


NAME = "model.layers.1.mlp.experts.0.up_proj.weight"


def spoil(tensors: dict[str, Array], name: str, value: object) -> None:
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[-1] = value


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda t: t.pop(NAME + SCALE), f"'{NAME}': is F8_E4M3, but '{NAME}_scale_inv' with its factors is missing"),
        (lambda t: t.update({NAME + SCALE: t[NAME + SCALE][:, 1:]}), f"'{NAME}_scale_inv': is F32 .*, but blocks"),
        (lambda t: t.update({NAME + SCALE: t[NAME + SCALE].astype(np.int32)}), f"'{NAME}_scale_inv': is I32"),
        (lambda t: t.update({NAME: t[NAME].reshape(-1)}), f"'{NAME}': is F8_E4M3 with shape .*; allowed: a matrix"),
        (lambda t: t.pop(NAME), f"{NAME} is missing"),
        (lambda t: spoil(t, NAME, np.nan), f"'{NAME}': holds infinities or NaN"),
        (lambda t: spoil(t, NAME + SCALE, np.inf), f"'{NAME}_scale_inv': holds infinities or NaN"),
        (lambda t: spoil(t, NAME + SCALE, 3e38), f"'{NAME}': holds infinities or NaN"),
    ],
)
def test_damaged_float8(tmp_path: Path, damage: Any, says: str) -> None:
    config, stored, _ = float8_model()
    damage(stored)
    stored = {name: np.ascontiguousarray(value) for name, value in stored.items()}
    source = write_folder(tmp_path / "hf", config, stored)
    with pytest.raises(CheckpointError, match=says) as caught:
        import_folder(source, tmp_path / "out", progress=silent)
    assert "model.safetensors" in str(caught.value) or "missing" in says
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_float8_without_a_word_in_the_config(tmp_path: Path) -> None:
    config, stored, _ = float8_model()
    del config["quantization_config"]
    source = write_folder(tmp_path / "hf", config, stored)
    with pytest.raises(CheckpointError, match=r"_scale_inv' is not a tensor of this model"):
        import_folder(source, tmp_path / "out", progress=silent)
    save_file({n: v for n, v in stored.items() if not n.endswith(SCALE)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is F8_E4M3; allowed: F32, F16, BF16"):
        import_folder(source, tmp_path / "out", progress=silent)


GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_float4(blocks: Array, powers: Array) -> Array:
    """(E, out, in / 32, 16) bytes and (E, out, in / 32) powers to (E, in, out), number by number, to be read."""
    experts, rows, groups = powers.shape
    out = np.empty((experts, groups * 32, rows), ml_dtypes.bfloat16)
    for e, row, group, byte in np.ndindex(*blocks.shape):
        for half in (0, 1):
            bits = int(blocks[e, row, group, byte]) >> (4 * half) & 15
            value = FLOAT4[bits & 7] * 2.0 ** (int(powers[e, row, group]) - 127)
            out[e, group * 32 + 2 * byte + half, row] = -value if bits & 8 else value
    return out


def float4_model() -> tuple[dict[str, Any], dict[str, Array], dict[str, Array]]:
    """(config, tensors as published, tensors decoded) of a gpt-oss of whole groups of 32."""
    config, _ = golden_model("gpt_oss_tiny")
    config |= {"hidden_size": 32, "intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    rng = np.random.default_rng(0)
    stored: dict[str, Array] = {}
    decoded: dict[str, Array] = {}
    for entry in name_table(model_config_from_hf(config), "gpt_oss"):
        for piece in entry.pieces:
            for name in piece.names:
                if name.endswith(("gate_up_proj", "down_proj")):
                    experts, inner, outer = piece.shape
                    stored[f"{name}_blocks"] = rng.integers(0, 256, (experts, outer, inner // 32, 16), np.uint8)
                    stored[f"{name}_scales"] = rng.integers(115, 125, (experts, outer, inner // 32)).astype(np.uint8)
                    decoded[name] = decode_float4(stored[f"{name}_blocks"], stored[f"{name}_scales"])
                else:
                    stored[name] = decoded[name] = rng.standard_normal(piece.shape).astype(ml_dtypes.bfloat16)
    return config, stored, decoded


def test_float4_is_decoded(tmp_path: Path) -> None:
    config, stored, decoded = float4_model()
    source = write_folder(tmp_path / "hf", config, stored)
    import_folder(source, tmp_path / "out", progress=silent)
    export_folder(tmp_path / "out", tmp_path / "back", ExportOptions(), progress=silent)
    same_tensors(read_folder(tmp_path / "back"), decoded)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda t: t.pop(GATE_UP + "_scales"), f"'{GATE_UP}_scales' with its powers of two is missing"),
        (lambda t: t.pop(GATE_UP + "_blocks"), f"{GATE_UP} is missing: '{GATE_UP}_scales' is there instead"),
        (lambda t: t.update({GATE_UP + "_blocks": t[GATE_UP + "_blocks"][..., 1:]}), "has shape .*; its powers need"),
        (lambda t: t.update({GATE_UP + "_scales": t[GATE_UP + "_scales"][0]}), "allowed: U8 of 3 dimensions"),
        (lambda t: spoil(t, GATE_UP + "_scales", 255), f"'{GATE_UP}_blocks': holds infinities or NaN"),
    ],
)
def test_damaged_float4(tmp_path: Path, damage: Any, says: str) -> None:
    config, stored, _ = float4_model()
    damage(stored)
    spoil(stored, GATE_UP.replace("layers.1", "layers.0") + "_blocks", 0x77)
    stored = {name: np.ascontiguousarray(value) for name, value in stored.items()}
    source = write_folder(tmp_path / "hf", config, stored)
    with pytest.raises(CheckpointError, match=says):
        import_folder(source, tmp_path / "out", progress=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
