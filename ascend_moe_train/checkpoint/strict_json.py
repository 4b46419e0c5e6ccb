"""JSON from outside: every key once, no invented numbers, one line when it is wrong. Pure."""

import json
from collections.abc import Iterable
from typing import NoReturn

from ascend_moe_train.errors import CheckpointError

_MAX_SHOWN = 120


def parse_json(text: bytes, what: str) -> object:
    """Returns the parsed text. Raises CheckpointError that starts with `what`, such as "model.json: not valid JSON"."""
    try:
        content: object = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: {one_line(error)}") from error
    return content


def one_line(value: object) -> str:
    """A value or an exception as a short text without line breaks."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _unique_keys(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    content: dict[str, object] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"key {one_line(key)} occurs twice")
        content[key] = value
    return content


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
