"""What a capture was collected with: level, counters, versions, from profiler_info_<rank>.json. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_CHARS = 60
# how names of groups of counters begin, in lower case without _
_METRICS = {
    "pipe": "PipeUtilization",
    "arithmetic": "ArithmeticUtilization",
    "memoryl0": "MemoryL0",
    "l0b": "MemoryL0",
    "memoryub": "MemoryUB",
    "memoryaccess": "MemoryAccess",
    "memory": "Memory",
    "resource": "ResourceConflictRatio",
    "l2": "L2Cache",
}
_VERSIONS = ("torch_npu_version", "cann_version", "ms_version")


def level_of(info: Mapping[str, Any]) -> str | None:
    """`Level1`, whichever way it is written; None where it is not."""
    found = next(_values(info, ("_profiler_level", "profiler_level")), None)
    match = re.search(r"Level_?(\w+)", str(found), re.IGNORECASE) if found is not None else None
    return f"Level{match[1].capitalize()}"[:MAX_CHARS] if match else None


def metrics_of(info: Mapping[str, Any]) -> str | None:
    """The group of counters, such as `PipeUtilization`; None where none was collected."""
    found = next(_values(info, ("_aic_metrics", "aic_metrics")), None)
    if found is None:
        return None
    plain = re.sub(r"[^a-z0-9]", "", str(found).rpartition(".")[2].removeprefix("ACL_AICORE_").lower())
    return next((name for start, name in _METRICS.items() if plain.startswith(start)), None)


def versions_of(info: Mapping[str, Any]) -> dict[str, str]:
    """Of torch_npu, MindSpore and CANN."""
    return {key.removesuffix("_version"): str(info[key])[:MAX_CHARS] for key in _VERSIONS if info.get(key)}


def _values(info: Any, keys: tuple[str, ...], depth: int = 0) -> Iterator[Any]:
    """Of the keys, wherever they are nested."""
    if not isinstance(info, dict) or depth > 4:
        return
    for key, value in info.items():
        if key in keys and not isinstance(value, dict):
            yield value
        yield from _values(value, keys, depth + 1)
