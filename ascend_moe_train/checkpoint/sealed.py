"""JSON objects that say which format they are and carry a checksum of themselves. Pure: reads and writes nothing."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from ascend_moe_train.checkpoint.strict_json import one_line, parse_json
from ascend_moe_train.errors import CheckpointError


def dump_sealed(content: Mapping[str, Any], format_name: str, version: int) -> bytes:
    """The text of a sealed object: a key a line, and a line for each item of a mapping."""
    sealed = {"format": format_name, "version": version, **content}
    sealed["sha256"] = _sha256(sealed, format_name)
    lines = [f"{json.dumps(key)}: {_value(value)}" for key, value in sealed.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def parse_sealed(text: bytes, what: str, format_name: str, version: int, where: str) -> dict[str, Any]:
    """The content of a sealed object that may have been written by anybody. `what` is what it should be.

    Raises:
        CheckpointError: one line that starts with `where`.
    """
    content = parse_json(text, f"{where}: not a valid JSON {what}")
    if not isinstance(content, dict) or content.pop("format", None) != format_name:
        raise CheckpointError(f"{where}: not a checkpoint {what}: format is not {format_name!r}")
    found = content.pop("version", None)
    if type(found) is not int or found != version:
        raise CheckpointError(f"{where}: version {one_line(found)} cannot be read; allowed: {version}")
    seal = content.pop("sha256", None)
    if seal != _sha256({"format": format_name, "version": version, **content}, where):
        raise CheckpointError(f"{where}: sha256 does not match the content: damaged or edited")
    return content


def check_json(value: object, key: str) -> None:
    """Raises CheckpointError for what `json` would turn into something else (keys that are no strings), or that is no
    JSON (NaN); the message names its key."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise CheckpointError(f"checkpoint: {key} has the key {name!r}; allowed: strings")
            check_json(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{key}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"checkpoint: {key} is {value}; allowed: finite numbers")
    elif not isinstance(value, None | bool | int | float | str):
        raise CheckpointError(f"checkpoint: {key} is a {type(value).__name__}; allowed: JSON values")


def _value(value: object) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in value.items()) + "\n}"


def _sha256(content: Mapping[str, object], where: str) -> str:
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {one_line(error)}") from error
    return hashlib.sha256(text.encode("ascii")).hexdigest()
