"""What share of its data sheet a class of devices reaches in training. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FITTED = Path(__file__).parent / "data" / "efficiency.json"


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The few parameters of a device class that are fitted on published runs (`accuracy`).

    Shares of the peak: `product` of large matrix products, which reach half of it where a dimension is
    `product_knee`; `core` of attention products; `vector` of the memory's rate in other operators; `inside` and
    `across` of the links' rates. `operator_s` is the least that an operator takes; `hidden` the share of communication
    beside computation that costs nothing; `slow` what the slowest of many devices adds to a step.
    """

    product: float
    product_knee: float
    core: float
    vector: float
    inside: float
    across: float
    operator_s: float
    hidden: float
    slow: float


@lru_cache(maxsize=1)
def efficiencies() -> Mapping[str, Efficiency]:
    """Class -> its parameters."""
    return {name: Efficiency(**values) for name, values in json.loads(FITTED.read_text(encoding="utf-8")).items()}
