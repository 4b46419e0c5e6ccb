"""AdamW with fp32 weights and moments, global-norm clipping and the skipping of bad steps, inside the graph."""

import math
from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.model.each import for_each
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.layers import empty
from ascend_moe_train.optim.config import OptimConfig

Tensor = Any


def step_factors(
    config: OptimConfig, lr: float, updates: int, fixed_after: int | None = None
) -> tuple[float, float, float]:
    """(learning rate, eps, decay) of update number `updates` (from 1), with the bias corrections folded in; after
    `fixed_after` second moments are no longer updated.

    m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) equals c * m / (sqrt(v) + eps * sqrt(1 - b2^t)) with
    c = sqrt(1 - b2^t) / (1 - b1^t) (Kingma & Ba, 2015, end of section 2), so moments are read once. Weight decay is
    decoupled: p -= lr * weight_decay * p (Loshchilov & Hutter, 2019).
    """
    root = math.sqrt(1.0 - config.beta2 ** min(updates, fixed_after or updates))
    return lr * root / (1.0 - config.beta1**updates), config.eps * root, lr * config.weight_decay


def decays(name: str, num_dims: int) -> bool:
    """Whether weight decay is for this tensor: for matrices, not for norms, biases and sinks."""
    return num_dims > 1 and not name.endswith("bias")


def verdict(square: Tensor, loss: Tensor, control: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient norm (1,) without the loss scale, whether the step is applied (1,) bool); see `AdamW`."""
    norm = ops.sqrt(square) * (1.0 / control[3])
    return norm, ops.logical_and(ops.logical_and(ops.isfinite(norm), ops.isfinite(loss)), loss <= control[4])


class AdamW(nn.Cell):
    """Updates `weights` in place from gradients.

    construct(grads, square (1,), loss (1,), control (5,)) -> (grad_norm (1,), applied (1,)). square is the squared norm
    of all gradients, which may be more than are here; both carry the loss scale. control is (lr, eps, decay) of
    `step_factors`, the loss scale, and the highest loss that is no spike. A step whose loss or norm is not finite, or
    whose loss is above that limit, leaves weights and moments bit for bit as they were.
    """

    def __init__(
        self,
        weights: list[tuple[str, Any]],
        config: OptimConfig,
        kernels: Kernels,
        num_dims: Mapping[str, int] | None = None,
    ) -> None:
        """`num_dims`: those of the tensors that the weights are parts of, where they are parts."""
        super().__init__()
        self.kernels = kernels
        self.names = tuple(name for name, _ in weights)
        self.weights = ms.ParameterTuple([parameter for _, parameter in weights])
        self.first = self._moments(weights, "first")
        self.second = self._moments(weights, "second")
        dims = {name: len(parameter.shape) for name, parameter in weights} if num_dims is None else num_dims
        self.decays = tuple(decays(name, dims[name]) for name in self.names)
        self.betas = ms.Tensor(np.array([config.beta1, config.beta2, 1 - config.beta1, 1 - config.beta2], np.float32))
        self.keep = ms.Tensor(np.array([0, 1, 1, 0, 0, 1, 0, 0], np.float32))
        self.clip_norm = config.clip_norm if config.clip_norm is not None else math.inf

    @staticmethod
    def _moments(weights: list[tuple[str, Any]], kind: str) -> Any:
        return ms.ParameterTuple([empty(*p.shape, is_trained=False, name=f"{kind}.{name}") for name, p in weights])

    def construct(
        self, grads: tuple[Tensor, ...], square: Tensor, loss: Tensor, control: Tensor
    ) -> tuple[Tensor, Tensor]:
        norm, applied = verdict(square, loss, control)
        update = ops.partial(self.update, self.scalars(norm, applied, control))
        tokens = for_each(update, self.decays, self.weights, self.first, self.second, grads)
        return ops.depend(norm, tokens), ops.cast(applied, ms.float32)

    def scalars(self, norm: Tensor, applied: Tensor, control: Tensor) -> Tensor:
        """The eight of `update`: (learning rate, beta1, beta2, 1 - beta1, 1 - beta2, eps, decay, factor of gradients),
        with which a step that is not applied changes nothing."""
        clip = ops.minimum(self.clip_norm / (norm + 1e-6), ops.ones_like(norm))
        live = ops.concat((control[0:1], self.betas, control[1:3], clip * (1.0 / control[3])))
        return ops.select(ops.broadcast_to(applied, live.shape), live, self.keep)

    def update(
        self, scalars: Tensor, decays: bool, parameter: Tensor, first: Tensor, second: Tensor, grad: Tensor
    ) -> Tensor:
        """Of one weight: see `Kernels.adamw`."""
        return self.kernels.adamw((parameter, first, second), grad, scalars, decays)
