"""Checks of the values of a Hugging Face config.json, whose content may be anything. Pure."""

import json

from ascend_moe_train.errors import ConfigError

SOURCE = "config.json"
# Far above any model; keeps a hostile file from asking for endless tables of names.
MAX_LAYERS, MAX_EXPERTS, MAX_WIDTH = 1024, 4096, 2**24
_MAX_COEFFICIENT = 1000
_MAX_SHOWN = 60  # characters of an offending value


def whole(name: str, value: object, most: int, least: int = 1) -> int:
    """Return `value`, a whole number from `least` to `most`, or raise ConfigError naming the key."""
    if type(value) is not int or not least <= value <= most:
        raise refused(name, value, f"a whole number from {least} to {most}")
    return value


def coefficient(name: str, value: object) -> float:
    """Return `value`, a number that can weigh a loss, or raise ConfigError naming the key."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_COEFFICIENT:
        raise refused(name, value, f"a number from 0 to {_MAX_COEFFICIENT}")
    return float(value)


def refused(name: str, value: object, allowed: str) -> ConfigError:
    """The error for a value that is not supported."""
    return ConfigError(f"{SOURCE}: {name}: {shown(value)} is not supported: must be {allowed}")


def shown(value: object) -> str:
    """A value as JSON, cut to a readable length."""
    return json.dumps(value, default=str)[:_MAX_SHOWN]
