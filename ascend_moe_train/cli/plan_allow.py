"""What `amt plan --allow` lets a search try beside what a run has."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ascend_moe_train.errors import ConfigError

if TYPE_CHECKING:
    from ascend_moe_train.planner.hardware import Cluster
    from ascend_moe_train.planner.techniques import Techniques

ALWAYS = ("reduce_dtype", "overlap", "bucket_bytes")  # of a run file: they go with every layout
MAX_ALLOWED = 4  # each doubles the work


def alternatives(
    parallel: Mapping[str, Any], allow: tuple[str, ...], cluster: "Cluster", engine: str
) -> "tuple[Techniques, ...]":
    """The techniques of a run file's section, and those with each set of what `allow` names, or the section has and not
    every layout goes with. Raises ConfigError for what is unknown, or not ours."""
    from ascend_moe_train.planner.brings import check_links
    from ascend_moe_train.planner.techniques import NAMES, PLAIN

    if engine != "ours":
        if allow:
            raise ConfigError(f"--allow {allow[0][:80]} is of our own training, not of {engine}: leave it out")
        return (PLAIN,)
    if len(allow) > MAX_ALLOWED:
        raise ConfigError(f"--allow is given {len(allow)} times: {MAX_ALLOWED} at the most")
    given = {name: _checked(f"parallel.{name}", name, parallel[name]) for name in NAMES if name in parallel}
    base = replace(PLAIN, **{name: value for name, value in given.items() if name in ALWAYS})
    changes = [_read(text) for text in allow]
    changes += [{name: value} for name, value in given.items() if name not in ALWAYS]
    found = tuple(dict.fromkeys(_sets(base, changes)))
    wanted = {change["dedup_tokens"] for change in changes if change.get("dedup_tokens") is not None}
    for how in wanted - {each.dedup_tokens for each in found}:
        raise ConfigError(
            f"dedup_tokens '{how}' needs nodes and whole rows: allow it with them, as in "
            f"hierarchical_ranks=8,dedup_tokens={how}"
        )
    for techniques in found:
        check_links(techniques, cluster)
    return found


def _sets(base: "Techniques", changes: list[dict[str, Any]]) -> "Iterator[Techniques]":
    """With none of the changes, with each, with each two that go together, and so on."""
    for count in range(len(changes) + 1):
        for chosen in combinations(changes, count):
            merged = {name: value for each in chosen for name, value in each.items()}
            found = replace(base, **merged)
            # the same token to a node once: only where there are nodes, and no chunks
            is_once = found.hierarchical_ranks is not None and found.expert_chunks == 1
            is_possible = (found.dedup_tokens is None or is_once) and not (
                found.is_compressed and found.reduce_dtype != "fp32"
            )
            if is_possible and len(merged) == sum(map(len, chosen)):
                yield found


def _read(text: str) -> dict[str, Any]:
    """Of `KEY=VALUE`, or several with commas, that go together."""
    from ascend_moe_train.config import apply_override
    from ascend_moe_train.planner.techniques import NAMES

    known = [name for name in NAMES if name != "bucket_bytes"]
    tree: dict[str, Any] = {}
    for part in text.split(","):
        name = part.split("=")[0].split(".")[0].strip()
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"--allow {text[:80]!r}: no key {name[:40]!r}: {hint}there are {', '.join(known)}")
        if "=" not in part:
            raise ConfigError(f"--allow {text[:80]!r}: {name} has no value: KEY=VALUE, such as compress.method=int8")
        apply_override(tree, f"parallel.{part.strip()}")
    return {name: _checked(f"--allow {text[:80]}", name, value) for name, value in tree["parallel"].items()}


def _checked(where: str, name: str, value: Any) -> Any:
    from pydantic import TypeAdapter, ValidationError

    from ascend_moe_train.parallel.config import ParallelConfig

    field = ParallelConfig.model_fields[name]
    try:
        return TypeAdapter(field.rebuild_annotation()).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f".{part}" for part in first["loc"] if part not in ("int", "none"))
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {name}{place}: {message}, got {first['input']!s:.60}") from None
