"""Devices, links and clusters, each figure with its source. Pure.

A device is what software sees as one: on a card of two dies, a die. Rates are of one direction.
"""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from ascend_moe_train import strict_yaml
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.planner.efficiency import Efficiency

CATALOGUE = Path(__file__).parent / "data" / "hardware.json"
MAX_DEVICES = 1_000_000
PRECISIONS = ("fp32", "fp16", "bf16", "fp8")
_CLUSTER = re.compile(r"\s*([0-9]{1,12})\s*(?:x|×|\*)\s*(\S.*?)\s*", re.IGNORECASE)
_COUNTS = ("num_cores", "devices_per_node")
_NUMBERS = ("memory_bytes", "memory_bytes_per_s", "host_memory_bytes", "host_bytes_per_s")
EFFICIENCIES = tuple(each.name for each in fields(Efficiency))
_SHARES = ("product", "core", "vector", "inside", "across", "hidden")
_LINK_NUMBERS = ("bytes_per_s", "latency_s", "knee_bytes")

Topology = Literal["mesh", "switched", "network"]
Kind = Literal["npu", "gpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class LinkClass:
    """How devices reach each other. In a `mesh` every pair has a link of `bytes_per_s` of its own, so a device of a
    group of n has n - 1 of them; `switched`, it has `bytes_per_s` to whomever; a `network` is between nodes, with
    `bytes_per_s` of each device. A message takes `latency_s`, and half the rate at `knee_bytes`."""

    name: str
    topology: Topology
    bytes_per_s: float
    latency_s: float
    knee_bytes: float

    def rate(self, num_devices: int) -> float:
        """Bytes a second of each device of a group, all at once."""
        return self.bytes_per_s * (max(1, num_devices - 1) if self.topology == "mesh" else 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Device:
    """One accelerator and the node that it stands in. `efficiency` names the class of fitted efficiencies, of which
    `own_efficiency` has those that were measured on the device itself (`efficiency.Efficiency`);
    `num_cores` make tiles of a matrix product at once; `sources` says where each figure is from; `host_memory_bytes` is
    its share of the node's memory."""

    name: str
    kind: Kind
    efficiency: str
    peak_flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    num_cores: int
    devices_per_node: int
    inside: LinkClass
    across: LinkClass
    host_memory_bytes: float = 128 * 2.0**30
    host_bytes_per_s: float = 20e9
    own_efficiency: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products. Raises ConfigError for a precision that the device does not have."""
        if precision not in self.peak_flops_per_s:
            have = ", ".join(sorted(self.peak_flops_per_s))
            raise ConfigError(f"{self.name} has no {precision} matrix products: use {have}")
        return self.peak_flops_per_s[precision]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """So many equal devices, in whole nodes but for a single node that is not full, or processes in the last."""

    device: Device
    num_devices: int

    @property
    def devices_per_node(self) -> int:
        """Devices of each node."""
        return min(self.num_devices, self.device.devices_per_node)

    @property
    def num_nodes(self) -> int:
        """Nodes, the last of which may not be full."""
        return -(-self.num_devices // self.device.devices_per_node)

    @property
    def name(self) -> str:
        """As `parse_cluster` reads it."""
        return f"{self.num_devices}x{self.device.name}"

    def of(self, num_devices: int) -> Self:
        """The same of another size."""
        return replace(self, num_devices=num_devices)


def catalogue(own: Path | None = None) -> Mapping[str, Device]:
    """Name -> device, with what a user's file adds or overrides: YAML, name -> figures, where a new device is `like`
    one that exists.

        my-910B:
          like: 910B2
          memory_bytes: 60000000000
          peak_flops_per_s: {bf16: 340e12}
          inside: {bytes_per_s: 25e9}
          efficiency: {product: 0.8}

    `efficiency` is of `efficiency.Efficiency`, in place of what was fitted for the class. Raises ConfigError for a file
    that cannot be read, an unknown key, or a figure that is not a positive number.
    """
    return _built_in() if own is None else MappingProxyType({**_built_in(), **_own_devices(own)})


def find_device(name: str, devices: Mapping[str, Device] | None = None) -> Device:
    """The device of that name or alias. Raises ConfigError with the nearest name."""
    devices = catalogue() if devices is None else devices
    names = {
        **{_plain(alias): target for alias, target in _aliases().items()},
        **{_plain(each): each for each in devices},
    }
    if (found := names.get(_plain(name))) is not None:
        return devices[found]
    near = difflib.get_close_matches(_plain(name), names, 1, 0.4)
    hint = f"did you mean {names[near[0]]}? " if near else ""
    raise ConfigError(f"device {name[:60]!r} is not known: {hint}there are {', '.join(devices)}")


def parse_cluster(text: str, devices: Mapping[str, Device] | None = None) -> Cluster:
    """`64x910B` -> 64 of 910B2, which is what 910B alone means. Raises ConfigError with an example."""
    match = _CLUSTER.fullmatch(text)
    if match is None:
        raise ConfigError(f"cluster {text[:60]!r} is not of the form NUMBERxDEVICE, such as 64x910B or 16xA100")
    count = int(match[1])
    if not 0 < count <= MAX_DEVICES:
        raise ConfigError(f"cluster {text[:60]!r}: {count:,} devices: must be from 1 to {MAX_DEVICES:,}")
    device = find_device(match[2], devices)
    size = device.devices_per_node
    # processes fill the last machine as far as they go, accelerators are had by the machine
    if device.kind != "cpu" and count > size and count % size:
        below = count // size * size
        raise ConfigError(
            f"cluster {text[:60]!r}: nodes of {device.name} have {size} devices, and {count} are not whole nodes: use "
            f"{below} or {below + size}"
        )
    return Cluster(device=device, num_devices=count)


def _plain(name: str) -> str:
    return re.sub(r"[\s_\-]+", "", name).lower()


@lru_cache(maxsize=1)
def _listed() -> tuple[Mapping[str, Any], ...]:
    listed: list[dict[str, Any]] = json.loads(CATALOGUE.read_text(encoding="utf-8"))["devices"]
    return tuple(listed)


@lru_cache(maxsize=1)
def _aliases() -> Mapping[str, str]:
    return MappingProxyType({alias: each["name"] for each in _listed() for alias in each["aliases"]})


@lru_cache(maxsize=1)
def _built_in() -> Mapping[str, Device]:
    return MappingProxyType({each["name"]: _device(each) for each in _listed()})


def _device(entry: Mapping[str, Any]) -> Device:
    sources: dict[str, str] = {}

    def value(key: str, figure: Mapping[str, Any]) -> Any:
        sources[key] = figure["source"]
        return figure["value"]

    def link(key: str) -> LinkClass:
        numbers = {name: float(value(f"{key}.{name}", entry[key][name])) for name in _LINK_NUMBERS}
        return LinkClass(name=entry[key]["name"], topology=entry[key]["topology"], **numbers)

    peaks = {name: float(value(f"peak {name}", figure)) for name, figure in entry["peak_flops_per_s"].items()}
    return Device(
        name=entry["name"],
        kind=entry["kind"],
        efficiency=entry["efficiency"],
        peak_flops_per_s=MappingProxyType(peaks),
        memory_bytes=float(value("memory", entry["memory_bytes"])),
        memory_bytes_per_s=float(value("memory rate", entry["memory_bytes_per_s"])),
        num_cores=value("cores", entry["num_cores"]),
        devices_per_node=entry["devices_per_node"],
        inside=link("inside"),
        across=link("across"),
        note=entry["note"],
        sources=MappingProxyType(sources),
    )


def _own_devices(path: Path) -> dict[str, Device]:
    document = strict_yaml.read_file(path)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{path}: a hardware file is a mapping of device names to their figures")
    known = dict(_built_in())
    own: dict[str, Device] = {}
    for name, figures in document.value.items():
        where = f"{path}:{document.lines.get(name, 1)}: {name}"
        if not isinstance(figures, dict):
            raise ConfigError(f"{where}: must be a mapping of figures, such as memory_bytes")
        like = figures.get("like", name)
        if not isinstance(like, str):
            raise ConfigError(f"{where}: like {like!r} must be the name of a device")
        base = find_device(like, {**known, **own})
        own[name] = _overridden(base, name, {k: v for k, v in figures.items() if k != "like"}, where)
    return own


def _overridden(base: Device, name: str, figures: Mapping[str, Any], where: str) -> Device:
    changes: dict[str, Any] = {"name": name, "sources": {**base.sources, **dict.fromkeys(figures, where)}}
    allowed = (*_NUMBERS, *_COUNTS, "peak_flops_per_s", "inside", "across", "efficiency")
    for key, value in figures.items():
        if key not in allowed:
            raise ConfigError(f"{where}: {_unknown(key, allowed)}")
        if key in _NUMBERS:
            changes[key] = _positive(value, key, where)
        elif key in _COUNTS:
            changes[key] = _count(value, key, where)
        elif not isinstance(value, dict):
            raise ConfigError(f"{where}: {key} must be a mapping")
        elif key == "peak_flops_per_s":
            for precision in value:
                if precision not in PRECISIONS:
                    raise ConfigError(f"{where}: {_unknown(precision, PRECISIONS)}")
            peaks = {precision: _positive(peak, f"{key}.{precision}", where) for precision, peak in value.items()}
            changes[key] = MappingProxyType({**base.peak_flops_per_s, **peaks})
        elif key == "efficiency":
            shares = {part: _share(number, part, where) for part, number in value.items()}
            changes["own_efficiency"] = MappingProxyType({**base.own_efficiency, **shares})
        else:
            for part in value:
                if part not in _LINK_NUMBERS:
                    raise ConfigError(f"{where}: {key}: {_unknown(part, _LINK_NUMBERS)}")
            link = {part: _positive(number, f"{key}.{part}", where) for part, number in value.items()}
            changes[key] = replace(getattr(base, key), **link)
    return replace(base, **changes)


def _positive(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ConfigError(f"{where}: {key} {value!r} must be a positive number")
    return float(value)


def _share(value: Any, part: Any, where: str) -> float:
    if part not in EFFICIENCIES:
        raise ConfigError(f"{where}: efficiency: {_unknown(str(part), EFFICIENCIES)}")
    number = 0.0 if value == 0 and not isinstance(value, bool) else _positive(value, f"efficiency.{part}", where)
    if part in _SHARES and not (0 if part == "hidden" else 1e-9) <= number <= 1:
        raise ConfigError(f"{where}: efficiency.{part} {value!r} must be a share, more than 0 and at most 1")
    return number


def _count(value: Any, key: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_DEVICES:
        raise ConfigError(f"{where}: {key} {value!r} must be a whole number from 1 to {MAX_DEVICES:,}")
    return value


def _unknown(key: str, allowed: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key, allowed, 1)
    return f"unknown key {key!r}: " + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(allowed)}")
