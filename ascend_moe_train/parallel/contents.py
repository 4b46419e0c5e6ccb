"""What payloads are, so that bytes can be told apart by what sends them and how it packs them. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

# `figures` are losses, norms, statistics of routers, counts of rows, tokens; `other` is what nobody named.
Content = Literal[
    "gradients",
    "gradients bf16",
    "gradients fp16",
    "gradients int8",
    "gradients powersgd",
    "momenta 1-bit",
    "weights",
    "activations",
    "keys and values",
    "expert rows",
    "expert rows bf16",
    "expert rows fp16",
    "expert rows int8",
    "figures",
    "other",
]

_GRADIENTS: Mapping[str | None, Content] = MappingProxyType(
    {None: "gradients", "bf16": "gradients bf16", "fp16": "gradients fp16"}
)
_ROWS: Mapping[str | None, Content] = MappingProxyType(
    {None: "expert rows", "bf16": "expert rows bf16", "fp16": "expert rows fp16", "int8": "expert rows int8"}
)
# By the method of `parallel.compress`; of 1-bit Adam once its second moments are fixed.
COMPRESSED: Mapping[str, Content] = MappingProxyType(
    {"int8": "gradients int8", "powersgd": "gradients powersgd", "onebit_adam": "momenta 1-bit"}
)


def gradients_in(wire: Literal["fp16", "bf16"] | None) -> Content:
    """Sums of gradients that travel in that dtype, with the scales of fp16."""
    return _GRADIENTS[wire]


def rows_in(wire: Literal["fp16", "bf16", "int8"] | None) -> Content:
    """Token rows that travel to experts and back in that form, with their scales."""
    return _ROWS[wire]
