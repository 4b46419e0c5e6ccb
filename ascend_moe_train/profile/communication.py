"""Collectives and links from communication.json, communication_matrix.json and their merged forms. Pure."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ascend_moe_train.errors import ProfileError
from ascend_moe_train.profile.kernels import plain_kind
from ascend_moe_train.profile.tables import Collective, Link
from ascend_moe_train.profile.text import read_json

TOTAL = "Total Op Info"
PAYLOAD = "Payload"  # of our own runs: what a rank put in, whatever way it went
LARGEST_MS = 1e10
_TIMES = {
    "transit_ms": "Transit Time(ms)",
    "wait_ms": "Wait Time(ms)",
    "sync_ms": "Synchronization Time(ms)",
    "idle_ms": "Idle Time(ms)",
}
_BUCKETS = ("p2p", "collective")


def read_communication(path: Path) -> list[Collective]:
    """communication.json of torch_npu or MindSpore (steps, then buckets), or msprof's flat one. The buckets are not
    believed: MindSpore 2.10 puts messages into `collective`. Raises ProfileError."""
    return [
        _collective(path, step, name, info) for step, name, info in _ops(path, _mapping(path, read_json(path), "top"))
    ]


def read_cluster_communication(path: Path) -> dict[int, list[Collective]]:
    """cluster_communication.json: buckets, then steps, operators and ranks. Raises ProfileError."""
    found: dict[int, list[Collective]] = {}
    for bucket in _mapping(path, read_json(path), "top").values():
        for step, ops in _mapping(path, bucket, "a bucket").items():
            for name, by_rank in _mapping(path, ops, step).items():
                if name == TOTAL:
                    continue
                for rank, info in _mapping(path, by_rank, name).items():
                    if rank.isdecimal() and len(rank) < 8:
                        each = _collective(path, step.removeprefix("step"), name, _mapping(path, info, name))
                        found.setdefault(int(rank), []).append(each)
    return found


def read_matrix(path: Path) -> list[Link]:
    """communication_matrix.json: of each type the `total` entries, or all where there are none. Raises ProfileError."""
    sums: dict[tuple[str, str], list[Any]] = {}
    top = read_json(path)
    for _, name, links in _ops(path, _listed(path, top) if isinstance(top, list) else _mapping(path, top, "top")):
        kind, _, group = name.partition("@")
        if (
            "-" in kind
            and not kind.endswith("-total")
            and kind.rpartition("-")[2].rstrip("123") in ("top", "middle", "bottom")
        ):
            continue
        for pair, info in links.items():
            values = _mapping(path, info, name)
            each = sums.setdefault((group, pair), [str(values.get("Transport Type", "")), 0.0, 0.0])
            each[1] += _value(path, values, "Transit Size(MB)", name) or 0.0
            each[2] += _value(path, values, "Transit Time(ms)", name) or 0.0
    links_found = []
    for (group, pair), (transport, size_mb, time_ms) in sums.items():
        source, _, target = pair.partition("-")
        if source.isdecimal() and target.isdecimal() and len(pair) < 16:
            links_found.append(
                Link(
                    group=group,
                    source=int(source),
                    target=int(target),
                    transport=transport,
                    size_mb=size_mb,
                    time_ms=time_ms,
                )
            )
    return links_found


def _ops(path: Path, top: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Step, name and content of every operator, whichever way it is nested."""
    for key, inner in top.items():
        if key == TOTAL:
            continue
        content = _mapping(path, inner, key)
        if not key.startswith("step"):
            yield "", key, content
            continue
        step = key.removeprefix("step")
        for bucket, ops in content.items():
            if bucket not in _BUCKETS:
                raise ProfileError(f"{path}: {key}: has {bucket[:60]!r} where 'p2p' or 'collective' is expected")
            for name, info in _mapping(path, ops, bucket).items():
                if name != TOTAL:
                    yield step, name, _mapping(path, info, name)


def _listed(path: Path, ops: list[Any]) -> dict[str, Any]:
    """msprof's own file, a list of operators with their links, as the mapping that others write."""
    found: dict[str, Any] = {}
    for place, op in enumerate(ops):
        values = {_plain(key): value for key, value in _mapping(path, op, f"entry {place}").items()}
        links = values.get("linkinfo", [])
        pairs: dict[str, Any] = {}
        for link in links if isinstance(links, list) else []:
            each = {_plain(key): value for key, value in _mapping(path, link, "link info").items()}
            pairs[f"{each.get('srcrank')}-{each.get('dstrank')}"] = {
                "Transport Type": each.get("transporttype", ""),
                "Transit Size(MB)": each.get("transitsizemb", each.get("sizemb")),
                "Transit Time(ms)": each.get("transittimems", each.get("timems")),
            }
        found[str(values.get("opname", f"entry {place}"))] = pairs
    return found


def _plain(key: str) -> str:
    return re.sub(r"[^a-z]", "", key.lower())


def _collective(path: Path, step: str, name: str, info: Mapping[str, Any]) -> Collective:
    times = _mapping(path, info.get("Communication Time Info", {}), name)
    links = {}
    for transport, values in _mapping(path, info.get("Communication Bandwidth Info", {}), name).items():
        each = _mapping(path, values, transport)
        size_mb = _value(path, each, "Transit Size(MB)", name) or 0.0
        time_ms = _value(path, each, "Transit Time(ms)", name) or 0.0
        if size_mb or time_ms:
            links[transport] = (size_mb, time_ms)
    start_us = _value(path, times, "Start Timestamp(us)", name, 1e16)
    return Collective(
        step=step,
        name=name,
        kind=plain_kind(name),
        group=name.partition("@")[2],
        start_ns=round((start_us or 0.0) * 1000),
        elapse_ms=_value(path, times, "Elapse Time(ms)", name) or 0.0,
        **{key: _value(path, times, title, name) for key, title in _TIMES.items()},
        links=links,
    )


def _mapping(path: Path, value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"{path}: {where[:60]!r}: is no mapping of names to values")
    return value


def _value(path: Path, values: Mapping[str, Any], key: str, where: str, most: float = LARGEST_MS) -> float | None:
    """A figure; a tiny negative one, left over from subtraction, is zero."""
    value = values.get(key)
    if value is None or value == "N/A":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e-3 <= value <= most:
        raise ProfileError(f"{path}: {where[:60]!r}: {key}: {str(value)[:60]!r} is no possible number")
    return max(0.0, float(value))
