"""What share of its data sheet a class of devices reaches in training. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

FITTED = Path(__file__).parent / "data" / "efficiency.json"


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The few parameters of a device class that are fitted on published runs (`accuracy`).

    Shares of the peak: `product` of large matrix products, which reach half of it where a dimension is
    `product_knee`; `core` of attention products over long sequences, half of it over `core_knee` keys. `vector` of the
    memory's rate in other operators; `inside` and `across` of the links' rates. `operator_s` is the least that an
    operator takes; `hidden` the share of communication beside computation that costs nothing; `slow` what the slowest
    of many devices adds to a step, times sqrt(2 ln n) / 3 for n devices (the expected largest of n normal deviations).
    `grouped` is what products of experts reach of others of that size; not fitted, but measured of a device itself.
    """

    product: float
    product_knee: float
    core: float
    core_knee: float
    vector: float
    inside: float
    across: float
    operator_s: float
    hidden: float
    slow: float
    grouped: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Paces:
    """How much longer the passes, and attention products, of one software take on a class of devices than those of the
    others on it; fitted likewise."""

    pace: float = 1.0
    core_pace: float = 1.0


@lru_cache(maxsize=1)
def efficiencies() -> Mapping[str, Efficiency]:
    """Class of devices -> its parameters."""
    return {name: Efficiency(**values) for name, values in _fitted()["devices"].items()}


def efficiency_of(name: str, measured: Mapping[str, float]) -> Efficiency:
    """That of a class, with what was measured on a device itself in its place."""
    return replace(efficiencies()[name], **measured)


@lru_cache(maxsize=1)
def software_paces() -> Mapping[str, Paces]:
    """`software on class of devices` -> its paces; those that are not there have 1."""
    return {name: Paces(**values) for name, values in _fitted()["software"].items()}


def _fitted() -> dict[str, dict[str, dict[str, float]]]:
    tree: dict[str, dict[str, dict[str, float]]] = json.loads(FITTED.read_text(encoding="utf-8"))
    return tree
