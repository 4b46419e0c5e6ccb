"""A tokenizer as the files that a Hugging Face folder has of it. Pure."""

import json
from pathlib import Path

from ascend_moe_train.data.tokenizer import MAX_FILE_BYTES, parse_tokenizer, read_tokenizer_text
from ascend_moe_train.errors import DataError

# What may lie beside a tokenizer.json and belongs to it.
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """Name and content of each file: those that are there, else the least that transformers needs.

    Raises:
        DataError: no tokenizer.json, or a file beside it that cannot be read.
    """
    text = read_tokenizer_text(path)
    tokenizer = parse_tokenizer(text, str(path))
    files = {
        "tokenizer_config.json": _json(
            {
                "clean_up_tokenization_spaces": False,
                "eos_token": tokenizer.eod_token,
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        ),
        "generation_config.json": _json({"eos_token_id": tokenizer.eod_id}),
    }
    for name in _BESIDE:
        beside = path.parent / name
        if beside.is_file():
            files[name] = _bytes(beside)
    return files | {"tokenizer.json": text.encode()}


def _json(content: dict[str, object]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{path}: {path.stat().st_size} bytes, allowed are {MAX_FILE_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
