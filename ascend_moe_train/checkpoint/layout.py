"""What a checkpoint folder looks like: names, the manifest, the safetensors files. Pure: reads and writes nothing.

    step-00000200/
        tensors-00000.safetensors    at most about 1 GiB each, unless a single tensor is larger
        manifest.json                which tensors, where, how long, which checksum; step; meta
        huggingface/                 only in a converted one: the source's config, tokenizer and the like, as they were

The manifest alone determines every byte of a file's header (tensors lie without gaps, by falling item size and then by
name), so a reader computes the header and compares it: the header in the file is never parsed. A sha256 per tensor
covers the data, one over the manifest covers the rest. sha256 because it runs at more than 1 GB/s on one core with the
SHA instructions of x86 and Arm, faster than a disk that is made to fsync, and because every tool can recompute it.
Safetensors format: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, data; little-endian).
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import ml_dtypes
import numpy as np
from pydantic import Field, ValidationError

from ascend_moe_train.checkpoint.strict_json import one_line, parse_json
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.part import Part

FORMAT = "amt-checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
EXTRAS_FOLDER = "huggingface"
MAX_MANIFEST_BYTES = 256 * 2**20
MAX_FILE_BYTES = 2**30
MAX_EXTRA_BYTES = 256 * 2**20
MAX_STEP = 10**12 - 1
MAX_DIMENSIONS = 32

Dtype = Literal["F32", "F16", "BF16", "I64", "I32", "U8", "BOOL"]
DTYPES: Mapping[Dtype, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ExtraName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
_TENSOR_NAME = re.compile(r"[!-~]{1,512}")
_FOLDER_NAME = re.compile(r"step-([0-9]{8,12})")
# Keys of a file's header that safetensors does not treat as a tensor.
_RESERVED_NAMES = frozenset({"__metadata__"})


class TensorSpec(Part):
    """Type and shape of one tensor. A dimension is bounded so that no product of them overflows unnoticed."""

    dtype: Dtype
    # JSON has lists only, hence strict=False for the tuple; its items stay strict.
    shape: Annotated[tuple[Annotated[int, Field(ge=0, le=2**48)], ...], Field(strict=False, max_length=MAX_DIMENSIONS)]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of data."""
        return self.elements * DTYPES[self.dtype].itemsize


class TensorEntry(TensorSpec):
    """One tensor of a manifest: which file of the folder holds it, and the sha256 of its bytes."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors$")]
    sha256: Sha256


class ExtraFile(Part):
    """A file of EXTRAS_FOLDER: its length, and the sha256 of its bytes."""

    size_bytes: Annotated[int, Field(ge=0, le=MAX_EXTRA_BYTES)]
    sha256: Sha256


class Manifest(Part):
    """Everything a checkpoint says about itself. `meta` is the caller's: JSON values only."""

    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    tensors: dict[str, TensorEntry]
    extras: dict[ExtraName, ExtraFile] = Field(default_factory=dict)
    meta: dict[str, Any]

    def by_file(self) -> dict[str, dict[str, TensorEntry]]:
        """The tensors of each file, files in order of name."""
        files: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self.tensors.items():
            files.setdefault(entry.file, {})[name] = entry
        return dict(sorted(files.items()))


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """One safetensors file: its first bytes, then each tensor at its offset from the start of the file."""

    header: bytes
    offsets_bytes: Mapping[str, int]
    total_bytes: int


def folder_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a folder's name, None when it is not the name of a checkpoint folder."""
    match = _FOLDER_NAME.fullmatch(name)
    if match is None or folder_name(int(match[1])) != name:
        return None
    return int(match[1])


def tensor_specs(tensors: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, TensorSpec]:
    """Describes arrays that are to be saved.

    Raises:
        CheckpointError: a name or a dtype that a checkpoint cannot hold.
    """
    specs = {}
    for name, array in tensors.items():
        _check_tensor_name(name, "checkpoint")
        tag = _TAGS.get(array.dtype)
        if tag is None:
            raise CheckpointError(
                f"checkpoint: tensor {name!r} has dtype {array.dtype}; allowed: "
                f"{', '.join(str(dtype) for dtype in DTYPES.values())}"
            )
        specs[name] = TensorSpec(dtype=tag, shape=array.shape)
    return specs


def plan_files(specs: Mapping[str, TensorSpec], max_file_bytes: int) -> dict[str, list[str]]:
    """Shares tensors out to files of at most `max_file_bytes` of data; a larger tensor gets a file of its own."""
    groups: list[list[str]] = []
    room_bytes = 0
    for name in _storage_order(specs):
        size_bytes = specs[name].size_bytes
        if not groups or size_bytes > room_bytes:
            groups.append([])
            room_bytes = max_file_bytes
        groups[-1].append(name)
        room_bytes -= size_bytes
    return {f"tensors-{index:05d}.safetensors": names for index, names in enumerate(groups)}


def file_layout(specs: Mapping[str, TensorSpec]) -> FileLayout:
    """The layout of the file that holds exactly these tensors."""
    starts: dict[str, int] = {}
    header: dict[str, object] = {}
    end = 0
    for name in _storage_order(specs):
        spec = specs[name]
        starts[name], end = end, end + spec.size_bytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [starts[name], end]}
    first_bytes = header_bytes(header)
    return FileLayout(
        header=first_bytes,
        offsets_bytes={name: len(first_bytes) + start for name, start in starts.items()},
        total_bytes=len(first_bytes) + end,
    )


def header_bytes(header: Mapping[str, object]) -> bytes:
    """The first bytes of a safetensors file: length of the header, header, spaces that align the data to 8 bytes."""
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def dump_manifest(manifest: Manifest) -> bytes:
    """The content of manifest.json.

    Raises:
        CheckpointError: `meta` holds something that JSON does not (the message gives its key).
    """
    _check_json(manifest.meta, "meta")
    content = {"format": FORMAT, "version": VERSION, **manifest.model_dump()}
    content["sha256"] = _content_sha256(content)
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode("ascii")


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Reads the content of manifest.json, which may have been written by anybody.

    Raises:
        CheckpointError: one line that starts with `where` and names the tensor where there is one.
    """
    content = parse_json(text, f"{where}: not a valid JSON manifest")
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise CheckpointError(f"{where}: not a checkpoint manifest: format is not {FORMAT!r}")
    version = content.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise CheckpointError(f"{where}: version {one_line(version)} cannot be read; allowed: {VERSION}")
    found = content.pop("sha256", None)
    if found != _content_sha256({"format": FORMAT, "version": VERSION, **content}, where):
        raise CheckpointError(f"{where}: sha256 does not match the content: damaged or edited")
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{where}: {_first_problem(error)}") from error
    for name in manifest.tensors:
        _check_tensor_name(name, where)
    return manifest


def _storage_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Wide items first, so that every tensor is aligned to its item size, as safetensors' own writer does."""
    return sorted(specs, key=lambda name: (-DTYPES[specs[name].dtype].itemsize, name))


def _check_tensor_name(name: str, where: str) -> None:
    if not _TENSOR_NAME.fullmatch(name) or name in _RESERVED_NAMES:
        raise CheckpointError(
            f"{where}: tensor name {one_line(name)} cannot be used; allowed: 1 to 512 printable ASCII characters, "
            f"no space, not {', '.join(sorted(_RESERVED_NAMES))}"
        )


def _content_sha256(content: Mapping[str, object], where: str = MANIFEST_NAME) -> str:
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {one_line(error)}") from error
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _check_json(value: object, key: str) -> None:
    """Refuses what `json` would turn into something else (keys that are no strings) or into no JSON (NaN)."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise CheckpointError(f"checkpoint: {key} has the key {name!r}; allowed: strings")
            _check_json(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{key}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"checkpoint: {key} is {value}; allowed: finite numbers")
    elif not isinstance(value, None | bool | int | float | str):
        raise CheckpointError(f"checkpoint: {key} is a {type(value).__name__}; allowed: JSON values")


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    place = [str(part) for part in problem["loc"]]
    tensor = f"tensor {one_line(place[1])}: " if place[0] == "tensors" and len(place) > 1 else ""
    key = ".".join(place[2:] if tensor else place)
    if problem["type"] == "missing":
        return f"{tensor}{key} is missing"
    return f"{tensor}{key} = {one_line(problem['input'])}: {problem['msg']}"
