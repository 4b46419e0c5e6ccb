"""What a checkpoint folder looks like: names, the manifest, the safetensors files. Pure: reads and writes nothing.

    step-00000200/
        tensors-00000.safetensors    at most about 1 GiB each; those of writer 3: tensors-r00003-00000.safetensors
        manifest.json                which tensors, their pieces, where, which checksums; step; meta
        huggingface/                 only in a converted one: the source's config, tokenizer and the like, as they were

A tensor is stored as pieces, boxes of at most MAX_PIECE_BYTES in its own coordinates, that have each of its elements
once; a small tensor of one writer is a single piece. In a file a piece has the tensor's name, and where it is a part
the box beside it: `embed.weight[0:1024,0:512]`.

The manifest alone determines every byte of a file's header (pieces lie without gaps, by falling item size and then by
name), so a reader computes the header and compares it: the header in the file is never parsed. A sha256 per piece
covers the data, one over the manifest covers the rest. sha256 because it runs at more than 1 GB/s on one core with the
SHA instructions of x86 and Arm, faster than a disk that is made to fsync, and because every tool can recompute it.
Safetensors format: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, data; little-endian).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from pydantic import Field, ValidationError

from ascend_moe_train import boxes
from ascend_moe_train.boxes import Box
from ascend_moe_train.checkpoint.sealed import check_json, dump_sealed, parse_sealed
from ascend_moe_train.checkpoint.strict_json import one_line
from ascend_moe_train.errors import CheckpointError
from ascend_moe_train.part import Part

FORMAT = "amt-checkpoint"
VERSION = 2
MANIFEST_NAME = "manifest.json"
EXTRAS_FOLDER = "huggingface"
FILE_STEM = "tensors"
MAX_MANIFEST_BYTES = 256 * 2**20
MAX_FILE_BYTES = 2**30
MAX_PIECE_BYTES = 256 * 2**20
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
# A dim is bounded so that no product of them overflows unnoticed.
Size = Annotated[int, Field(ge=0, le=2**48)]
# JSON has lists only, hence strict=False for tuples; their items stay strict.
Interval = Annotated[tuple[Size, Size], Field(strict=False)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ExtraName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
_TENSOR_NAME = re.compile(r"[!-~]{1,512}")
_FOLDER_NAME = re.compile(r"step-([0-9]{8,12})")
# Keys of a file's header that safetensors does not treat as a tensor.
_RESERVED_NAMES = frozenset({"__metadata__"})


class TensorSpec(Part):
    """Type and shape of one tensor, or of a piece of one."""

    dtype: Dtype
    shape: Annotated[tuple[Size, ...], Field(strict=False, max_length=MAX_DIMENSIONS)]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of data."""
        return self.elements * DTYPES[self.dtype].itemsize


class PieceEntry(Part):
    """One piece of a tensor: which part it is, which file of the folder holds it, and the sha256 of its bytes."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors$")]
    box: Annotated[tuple[Interval, ...], Field(strict=False, max_length=MAX_DIMENSIONS)]
    sha256: Sha256


class TensorEntry(TensorSpec):
    """One tensor of a manifest: its shape as a whole, and its pieces."""

    pieces: Annotated[tuple[PieceEntry, ...], Field(strict=False)]


class ExtraFile(Part):
    """A file of EXTRAS_FOLDER: its length, and the sha256 of its bytes."""

    size_bytes: Annotated[int, Field(ge=0, le=MAX_EXTRA_BYTES)]
    sha256: Sha256


class StoredPiece(NamedTuple):
    """A piece as a file holds it: of which tensor, which part, its own type and shape, its checksum."""

    tensor: str
    box: Box
    dtype: Dtype
    shape: tuple[int, ...]
    sha256: str

    @property
    def size_bytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


Spec = TensorSpec | StoredPiece
"""What decides how much room something takes in a file: type and shape."""


class Manifest(Part):
    """Everything a checkpoint says about itself. `meta` is the caller's: JSON values only."""

    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    tensors: dict[str, TensorEntry]
    extras: dict[ExtraName, ExtraFile] = Field(default_factory=dict)
    meta: dict[str, Any]

    def by_file(self) -> dict[str, dict[str, StoredPiece]]:
        """The pieces of each file by their names there, files in order of name."""
        files: dict[str, dict[str, StoredPiece]] = {}
        for name, entry in self.tensors.items():
            for piece in entry.pieces:
                key = piece_key(name, entry.shape, piece.box)
                file = files.setdefault(piece.file, {})
                if key in file:
                    raise CheckpointError(f"{piece.file} would hold two pieces with the name {one_line(key)}")
                file[key] = StoredPiece(name, piece.box, entry.dtype, boxes.box_shape(piece.box), piece.sha256)
        return dict(sorted(files.items()))


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """One safetensors file: its first bytes, then each tensor or piece at its offset from the start of the file."""

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


def piece_key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """What a piece is called in its file."""
    if box == boxes.whole(shape):
        return name
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def dtype_tag(name: str, dtype: np.dtype[Any]) -> Dtype:
    """The name of an array's type in a file.

    Raises:
        CheckpointError: a name or a dtype that a checkpoint cannot hold.
    """
    _check_tensor_name(name, "checkpoint")
    tag = _TAGS.get(dtype)
    if tag is None:
        allowed = ", ".join(str(each) for each in DTYPES.values())
        raise CheckpointError(f"checkpoint: tensor {name!r} has dtype {dtype}; allowed: {allowed}")
    return tag


def tensor_specs(tensors: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, TensorSpec]:
    """Describes arrays that are to be saved. Raises CheckpointError as `dtype_tag` does."""
    return {name: TensorSpec(dtype=dtype_tag(name, array.dtype), shape=array.shape) for name, array in tensors.items()}


def cut_whole(name: str, spec: TensorSpec, max_piece_bytes: int) -> dict[str, Box]:
    """The pieces of a tensor that one writer holds all of, in row-major order, by their names in files."""
    max_elements = max(1, max_piece_bytes // DTYPES[spec.dtype].itemsize)
    pieces = boxes.cut(boxes.whole(spec.shape), max_elements)
    return {piece_key(name, spec.shape, box): box for box in pieces}


def file_stem(writer: int, num_writers: int) -> str:
    """What the names of a writer's files begin with."""
    return FILE_STEM if num_writers == 1 else f"{FILE_STEM}-r{writer:05d}"


def plan_files(specs: Mapping[str, Spec], max_file_bytes: int, stem: str = FILE_STEM) -> dict[str, list[str]]:
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
    return {f"{stem}-{index:05d}.safetensors": names for index, names in enumerate(groups)}


def file_layout(specs: Mapping[str, Spec]) -> FileLayout:
    """The layout of the file that holds exactly these tensors or pieces."""
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
        CheckpointError: `meta` holds something that JSON does not (the message gives its key); or it is too long.
    """
    check_json(manifest.meta, "meta")
    text = dump_sealed(manifest.model_dump(), FORMAT, VERSION)
    if len(text) > MAX_MANIFEST_BYTES:
        pieces = sum(len(entry.pieces) for entry in manifest.tensors.values())
        raise CheckpointError(
            f"checkpoint: the manifest of {pieces} pieces has {len(text)} bytes; allowed: {MAX_MANIFEST_BYTES}"
        )
    return text


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Reads the content of manifest.json, which may have been written by anybody.

    Raises:
        CheckpointError: one line that starts with `where` and names the tensor where there is one.
    """
    content = parse_sealed(text, "manifest", FORMAT, VERSION, where)
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{where}: {first_problem(error)}") from error
    check_tensors(manifest.tensors, where)
    if any(name.endswith("]") for name in manifest.tensors):  # a tensor may be named like a piece of another
        try:
            manifest.by_file()
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error
    return manifest


def check_tensors(tensors: Mapping[str, TensorEntry], where: str) -> None:
    """Raises CheckpointError for a name that cannot be used, or pieces that do not make up their tensor just once."""
    for name, entry in tensors.items():
        _check_tensor_name(name, where)
        problem = boxes.cover_problem(entry.shape, [piece.box for piece in entry.pieces])
        if problem is not None:
            raise CheckpointError(f"{where}: tensor {name!r}: {problem}")
        largest = max((boxes.volume(piece.box) for piece in entry.pieces), default=0)
        size_bytes = largest * DTYPES[entry.dtype].itemsize
        if size_bytes > MAX_PIECE_BYTES:
            raise CheckpointError(
                f"{where}: tensor {name!r}: a piece of {size_bytes} bytes; allowed: at most {MAX_PIECE_BYTES}"
            )


def first_problem(error: ValidationError) -> str:
    """What was wrong with a manifest, in one line: the tensor, the key, the value."""
    problem = error.errors(include_url=False)[0]
    place = [str(part) for part in problem["loc"]]
    tensor = f"tensor {one_line(place[1])}: " if place[0] == "tensors" and len(place) > 1 else ""
    key = ".".join(place[2:] if tensor else place)
    if problem["type"] == "missing":
        return f"{tensor}{key} is missing"
    return f"{tensor}{key} = {one_line(problem['input'])}: {problem['msg']}"


def _storage_order(specs: Mapping[str, Spec]) -> list[str]:
    """Wide items first, so that every tensor is aligned to its item size, as safetensors' own writer does."""
    return sorted(specs, key=lambda name: (-DTYPES[specs[name].dtype].itemsize, name))


def _check_tensor_name(name: str, where: str) -> None:
    if not _TENSOR_NAME.fullmatch(name) or name in _RESERVED_NAMES:
        raise CheckpointError(
            f"{where}: tensor name {one_line(name)} cannot be used; allowed: 1 to 512 printable ASCII characters, "
            f"no space, not {', '.join(sorted(_RESERVED_NAMES))}"
        )
