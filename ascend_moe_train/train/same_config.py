"""Whether all ranks have read the same configuration: one with another would train another model, or wait in another
collective, and nobody could see why. Pure."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.parallel.agree import exchange_json
from ascend_moe_train.parallel.comm import Comm

_MOST_NAMED = 3


def check_same_config(config: RunConfig, comm: Comm) -> None:
    """To be called on every rank. Raises ConfigError on the ranks whose configuration is not that of most, or, where as
    many have one as the other, not that of the lowest rank."""
    values = dict(_flat(config.model_dump(mode="json")))
    digests = exchange_json(comm, hashlib.sha256(json.dumps(values).encode()).hexdigest())
    usual = Counter(digests).most_common(1)[0][0]
    if digests.count(usual) == len(digests):
        return
    first = digests.index(usual)
    theirs: dict[str, Any] = exchange_json(comm, values)[first]
    if digests[comm.rank] != usual:
        raise ConfigError(f"the configuration is not that of rank {first}: {differences(values, theirs)}")


def differences(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first keys that differ, with both values."""
    keys = [key for key in {**theirs, **own} if own.get(key) != theirs.get(key)]
    named = [f"{key} is {own.get(key)} here and {theirs.get(key)} there" for key in keys[:_MOST_NAMED]]
    more = f", and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return ", ".join(named) + more


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
