"""Low-rank adapters by name and shape, and what they add to the weights they adapt. Pure.

Shape letters: D inner, F outer size of a weight, E experts, W width of an adapter (r of LoRA).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.model.config import LoraConfig, ModelConfig
from ascend_moe_train.model.counts import forward_flops_per_token, parameter_shapes, training_flops_per_token

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The pair that adapts one weight: a (W, D) and b (F, W) to (F, D), and to the (E, D, F) of experts a (E, D, W) and
    b (E, W, F).

    `place` is where the weight is, without its layer: what `lora.targets` name.
    """

    weight: str
    place: str
    a: str
    a_shape: tuple[int, ...]
    b: str
    b_shape: tuple[int, ...]


def adapters(model: ModelConfig, lora: LoraConfig) -> list[Adapter]:
    """The adapters of all weights that `lora.targets` name by the end of their place, in the order of the weights.

    `experts.w13` names `moe.experts.w13`, `w13` those of dense layers and shared experts too. Raises ValueError for a
    target that names nothing.
    """
    possible = list(_possible(model, lora.r))
    for target in lora.targets:
        if not any(_names(target, adapter.place) for adapter in possible):
            allowed = dict.fromkeys(adapter.place for adapter in possible)
            raise ValueError(f"lora.targets: {target!r} names no weight of this model: there are {', '.join(allowed)}")
    return [adapter for adapter in possible if any(_names(target, adapter.place) for target in lora.targets)]


def adapter_shapes(model: ModelConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the adapters. Raises ValueError as `adapters` does."""
    shapes: dict[str, tuple[int, ...]] = {}
    for adapter in adapters(model, lora):
        shapes |= {adapter.a: adapter.a_shape, adapter.b: adapter.b_shape}
    return shapes


def num_adapter_parameters(model: ModelConfig, lora: LoraConfig) -> int:
    """All trained numbers. Raises ValueError as `adapters` does."""
    return sum(prod(shape) for shape in adapter_shapes(model, lora).values())


def run_flops_per_token(model: ModelConfig, lora: LoraConfig | None, seq_len: int) -> int:
    """Model FLOPs of forward and backward over one token: see `counts.training_flops_per_token`.

    With adapters, the weights that they adapt have no gradient: their products are computed twice, not three times.
    """
    if lora is None:
        return training_flops_per_token(model, seq_len)
    # what is left at length 0, where nothing is attended to
    with_weights = 2 * forward_flops_per_token(model, 1) - forward_flops_per_token(model, 2)
    between_activations = forward_flops_per_token(model, seq_len) - with_weights
    return 2 * with_weights + 3 * (between_activations + _adapter_flops_per_token(model, lora))


def _adapter_flops_per_token(model: ModelConfig, lora: LoraConfig) -> int:
    """Of the forward pass: 2 W (D + F) for each, K times for those of experts."""
    top_k = model.moe.top_k if model.moe is not None else 1
    flops = 0
    for adapter in adapters(model, lora):
        inner, outer = (-1, 0) if len(adapter.a_shape) == 2 else (-2, -1)
        times = 1 if len(adapter.a_shape) == 2 else top_k
        flops += times * 2 * lora.r * (adapter.a_shape[inner] + adapter.b_shape[outer])
    return flops


def delta(adapter: Adapter, tensors: Mapping[str, Array], lora: LoraConfig) -> Array:
    """What an adapter adds to its weight, alpha / r * B A, in fp32."""
    a, b = tensors[adapter.a].astype(np.float32), tensors[adapter.b].astype(np.float32)
    product = b @ a if a.ndim == 2 else a @ b
    return product * np.float32(lora.alpha / lora.r)


def _possible(model: ModelConfig, width: int) -> list[Adapter]:
    """An adapter for each matrix of a layer but the router's, which decides and is no part of what is computed."""
    found = []
    for name, shape in parameter_shapes(model).items():
        words = name.split(".")
        if words[0] != "layers" or len(shape) < 2 or "router" in words or name.endswith("bias"):
            continue
        place = ".".join(words[2:]).removesuffix(".weight")
        stem = f"{name.removesuffix('weight')}lora" if name.endswith(".weight") else f"{name}_lora"
        a_shape: tuple[int, ...] = (width, shape[1])
        b_shape: tuple[int, ...] = (shape[0], width)
        if len(shape) == 3:
            a_shape, b_shape = (*shape[:2], width), (shape[0], width, shape[2])
        found.append(Adapter(weight=name, place=place, a=f"{stem}_a", a_shape=a_shape, b=f"{stem}_b", b_shape=b_shape))
    return found


def _names(target: str, place: str) -> bool:
    return place == target or place.endswith(f".{target}")
