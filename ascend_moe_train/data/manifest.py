"""`manifest.json` of a prepared corpus: what it was made from and what is in it. Pure.

The manifest is read back as hostile input: strict types, nothing executed, file names are fixed.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from ascend_moe_train.errors import DataError
from ascend_moe_train.part import Part

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SPLITS = ("train", "valid")
# What follows a split's name in the name of the shard that has a 1 for each of its tokens that counts in the loss.
COUNTED_SUFFIX = "-counted"
CORPUS_FILES = frozenset(
    {
        MANIFEST_NAME,
        TOKENIZER_NAME,
        TEMPLATE_NAME,
        TOKENIZER_CONFIG_NAME,
        *(f"{split}{shard}.{kind}" for split in SPLITS for shard in ("", COUNTED_SUFFIX) for kind in ("bin", "idx")),
    }
)
MAX_MANIFEST_BYTES = 1 << 28

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class Arguments(Part):
    """What the user asked for. `tokenizer_sha256` is None when the tokenizer was trained here.

    The last four are of conversations; `template_sha256` covers the special tokens that the template is given.
    """

    sources: list[str]
    corpus: str | None
    format: Literal["text", "chat"] = "text"
    field: str
    vocab_size: int | None
    tokenizer_sha256: str | None
    valid_fraction: float
    template_sha256: str | None = None
    max_tokens: Positive | None = None
    too_long: Literal["drop", "truncate"] | None = None
    answers: Literal["all", "last"] | None = None


class SourceRecord(Part):
    """One file that was read: its name inside its source, size and SHA-256."""

    name: str
    bytes: Count
    sha256: str


class SplitRecord(Part):
    """One split. `tokens` includes one end-of-document token per document of text.

    `bytes` counts the UTF-8 text of the tokens that are targets: all, or `counted_tokens` of them. `dropped` and
    `truncated` conversations were longer than asked for.
    """

    documents: Positive
    tokens: Positive
    bytes: Positive
    max_token_id: Count
    counted_tokens: Positive | None = None
    dropped: Count = 0
    truncated: Count = 0

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text for each token that is a target."""
        return self.bytes / (self.counted_tokens or self.tokens)


class FileRecord(Part):
    """One file that was written."""

    bytes: Count
    sha256: str


class Manifest(Part):
    """The whole file. `vocab_size` and `eod_id` are the tokenizer's."""

    format: Literal["amt-corpus"] = "amt-corpus"
    version: Literal[1] = 1
    arguments: Arguments
    vocab_size: Count
    eod_id: Count
    splits: dict[str, SplitRecord]
    empty_documents: Count
    sources: list[SourceRecord]
    files: dict[str, FileRecord]
    tokenizers_version: str


def counted_prefix(prefix: Path) -> Path:
    """The shard that says which tokens of a shard count in the loss."""
    return prefix.with_name(prefix.name + COUNTED_SUFFIX)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a prepared corpus, or None when the folder has none. Raises DataError when it cannot be used."""
    path = folder / MANIFEST_NAME
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DataError(f"{path}: {path.stat().st_size} bytes, a manifest has at most {MAX_MANIFEST_BYTES}")
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise DataError(f"{path}: not a corpus manifest: {where}: {first['msg']}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
