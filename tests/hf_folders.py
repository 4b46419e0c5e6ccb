"""Hugging Face folders to convert: the tiny models of the golden files, under published names, in any dtype."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.oracle.golden import read_tensors

Array = NDArray[Any]

DTYPES: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
EXTRAS = {
    "generation_config.json": b'{"eos_token_id": 3}\n',
    "tokenizer.json": b'{"not": "read"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
}


def golden_model(case: str, dtype: str = "BF16") -> tuple[dict[str, Any], dict[str, Array]]:
    """The config.json and the tensors of a golden file. Buffers stay fp32, as in published files."""
    tensors, metadata = read_tensors(case)
    config: dict[str, Any] = json.loads(metadata["made_of"])["config"]
    weights = {name.removeprefix("weight."): value for name, value in tensors.items() if name.startswith("weight.")}
    kept = "e_score_correction_bias"
    return config, {n: v if n.endswith(kept) else v.astype(DTYPES[dtype]) for n, v in weights.items()}


def write_folder(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Array],
    *,
    shards: int = 1,
    extras: Mapping[str, bytes] = EXTRAS,
) -> Path:
    """Writes a folder with the safetensors library, tensors dealt out to `shards` files."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name, data in extras.items():
        (path / name).write_bytes(data)
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", {"format": "pt"})
        return path
    files = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    places = {name: files[index % shards] for index, name in enumerate(tensors)}
    for file in files:
        save_file({n: v for n, v in tensors.items() if places[n] == file}, path / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(v.nbytes for v in tensors.values())}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def golden_folder(path: Path, case: str, dtype: str = "BF16", *, shards: int = 1) -> Path:
    """A folder of a golden model."""
    return write_folder(path, *golden_model(case, dtype), shards=shards)


def read_folder(path: Path) -> dict[str, Array]:
    """All tensors of a folder, by the safetensors library."""
    tensors: dict[str, Array] = {}
    for file in sorted(path.glob("*.safetensors")):
        part = load_file(file)
        assert not tensors.keys() & part.keys()
        tensors |= {name: as_ours(value) for name, value in part.items()}
    return tensors


def as_ours(value: Array) -> Array:
    """MindSpore, once imported, has a bfloat16 of its own under that name."""
    return value.view(ml_dtypes.bfloat16) if value.dtype.name == "bfloat16" else value


def same_tensors(one: Mapping[str, Array], other: Mapping[str, Array]) -> None:
    """Asserts equal names, dtypes, shapes and bytes."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert value.tobytes() == other[name].tobytes(), name


def silent(done_bytes: int, total_bytes: int) -> None:
    """No progress."""
