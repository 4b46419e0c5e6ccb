"""A Hugging Face model folder: its config, where its tensors lie, what else is in it. Pure; nothing in it is run."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_moe_train.checkpoint.files import naming, open_regular
from ascend_moe_train.checkpoint.layout import MAX_EXTRA_BYTES
from ascend_moe_train.checkpoint.safetensors_stream import Place, read_header
from ascend_moe_train.checkpoint.strict_json import one_line, parse_json
from ascend_moe_train.errors import CheckpointError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Files that describe the model or its tokenizer: kept as they are, so that an export has them again.
EXTRAS = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_INDEX_BYTES = 256 * 2**20
_MAX_SHARDS = 4096


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFolder:
    """What was found. `ignored` are files that are neither weights in use nor EXTRAS."""

    path: Path
    config: dict[str, Any]
    places: Mapping[str, Place]
    shards: tuple[str, ...]
    extras: Mapping[str, bytes]
    ignored: tuple[str, ...]


def open_folder(path: Path) -> HuggingFaceFolder:
    """Reads everything but the tensors' data.

    Raises:
        CheckpointError: no model folder, pickled weights, or an index, a shard or a header that is damaged; one line
            that names the file, and the tensor where there is one.
    """
    if path.name.endswith(_PICKLES) and not path.is_dir():
        raise _pickled(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}")
    with naming("read", path):
        names = sorted(entry.name for entry in path.iterdir())
    config = read_config(_bytes(path, CONFIG, MAX_EXTRA_BYTES), str(path / CONFIG))
    places, shards = _weights(path, names)
    extras = {name: _bytes(path, name, MAX_EXTRA_BYTES) for name in EXTRAS if name in names}
    used = {*shards, *extras, INDEX}
    return HuggingFaceFolder(
        path=path,
        config=config,
        places=places,
        shards=shards,
        extras=extras,
        ignored=tuple(name for name in names if name not in used),
    )


def read_config(text: bytes, where: str) -> dict[str, Any]:
    """The content of a config.json. Raises CheckpointError that starts with `where`."""
    config = parse_json(text, f"{where}: not valid JSON")
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: {one_line(config)}; allowed: a mapping")
    return config


def dump_config(config: Mapping[str, Any]) -> bytes:
    """A config.json as transformers lays it out."""
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _weights(path: Path, names: list[str]) -> tuple[dict[str, Place], tuple[str, ...]]:
    if SINGLE in names and INDEX in names:
        raise CheckpointError(f"{path}: has both {SINGLE} and {INDEX}: move away the one that is not meant")
    if SINGLE in names:
        return read_header(_resolved(path, SINGLE)), (SINGLE,)
    if INDEX in names:
        return _sharded(path)
    for name in names:
        if name.endswith(_PICKLES):
            raise _pickled(path / name)
    others = [name for name in names if name.endswith(".safetensors")]
    instead = f" ({others[0]} is there, but nothing says which files belong together)" if others else ""
    raise CheckpointError(f"{path}: neither {SINGLE} nor {INDEX} is there{instead}")


def _sharded(path: Path) -> tuple[dict[str, Place], tuple[str, ...]]:
    index_path = path / INDEX
    index = parse_json(_bytes(path, INDEX, _MAX_INDEX_BYTES), f"{index_path}: not valid JSON")
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index_path}: weight_map is missing; allowed: a mapping of tensors to files")
    for name, file in files.items():
        if not isinstance(file, str) or not _is_plain(file):
            raise CheckpointError(
                f"{index_path}: tensor {one_line(name)} is in file {one_line(file)}; allowed: the name of a "
                ".safetensors file of this folder"
            )
    shards = sorted(set(files.values()))
    if len(shards) > _MAX_SHARDS:
        raise CheckpointError(f"{index_path}: names {len(shards)} files; allowed: {_MAX_SHARDS}")
    places: dict[str, Place] = {}
    for file in shards:
        wanted = {name for name, shard in files.items() if shard == file}
        found = read_header(_resolved(path, file, f"{index_path} names it for tensor {one_line(min(wanted))}"))
        for name in sorted(wanted - found.keys()):
            raise CheckpointError(f"{path / file}: tensor {one_line(name)} is not there, but {INDEX} says so")
        for name in sorted(found.keys() - wanted):
            other = f"says that it is in {files[name]}" if name in files else "does not name it"
            raise CheckpointError(f"{path / file}: tensor {one_line(name)} is there, but {INDEX} {other}")
        places |= found
    return places, tuple(shards)


def _is_plain(file: str) -> bool:
    return file.endswith(".safetensors") and file.isprintable() and not file.startswith(".") and "/" not in file


def _bytes(path: Path, name: str, max_bytes: int) -> bytes:
    with open_regular(_resolved(path, name)) as stream, naming("read", path / name):
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes > max_bytes:
            raise CheckpointError(f"{path / name}: has {size_bytes} bytes; allowed: {max_bytes}")
        return stream.readall()


def _resolved(path: Path, name: str, why: str = "") -> Path:
    """The file itself. A link is followed within the folder, and where the hub's own cache keeps its files."""
    file = path / name
    if not os.path.lexists(file):
        raise CheckpointError(f"{file}: missing{f': {why}' if why else ''}")
    if not file.is_symlink():
        return file
    folder = Path(os.path.realpath(path))
    roots = [folder]
    if folder.parent.name == "snapshots":
        roots.append(folder.parent.parent / "blobs")
    target = Path(os.path.realpath(file))
    if not any(target.is_relative_to(root) for root in roots):
        raise CheckpointError(f"{file}: a symbolic link out of the folder, which is not followed: copy the file")
    return target


def _pickled(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: a pickle, which can run any code when it is read: make safetensors of it first, where you trust it, "
        "with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
    )
