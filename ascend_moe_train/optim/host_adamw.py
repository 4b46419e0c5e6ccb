"""AdamW whose weights and moments are in host memory: the device keeps what the model reads and nothing else."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from numpy.typing import NDArray

from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.optim.adamw import decays, verdict
from ascend_moe_train.optim.config import OptimConfig

Tensor = Any
Array = NDArray[np.float32]

CHUNK = 2**16  # elements that pass through all operations while they are in the cache


class HostTensor:
    """A NumPy array, zero at first, that is filled and read as a parameter is."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.array = np.zeros(shape, np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.array.shape

    @property
    def size(self) -> int:
        """Elements."""
        return self.array.size

    def asnumpy(self) -> Array:
        """The array itself."""
        return self.array

    def set_data(self, value: Tensor) -> None:
        """Copies a tensor of the same shape."""
        self.array[...] = value.asnumpy()


class HostAdamW(nn.Cell):
    """The update of `adamw.AdamW` in two steps: inside the graph what it says of a step, on the host what it does.

    construct(grads, square (1,), loss (1,), control (5,)) -> (grad_norm (1,), applied (1,)), as there; `update` follows
    once gradients are on the host.
    """

    def __init__(
        self,
        weights: Sequence[tuple[str, HostTensor]],
        config: OptimConfig,
        kernels: Kernels,
        num_dims: Mapping[str, int],
    ) -> None:
        """`num_dims`: those of the tensors that the weights are parts of."""
        super().__init__()
        self.kernels, self.config = kernels, config
        self.names = tuple(name for name, _ in weights)
        self.weights = [tensor for _, tensor in weights]
        self.first = [HostTensor(tensor.shape) for tensor in self.weights]
        self.second = [HostTensor(tensor.shape) for tensor in self.weights]
        self.decays = tuple(decays(name, num_dims[name]) for name in self.names)

    def construct(
        self, grads: tuple[Tensor, ...], square: Tensor, loss: Tensor, control: Tensor
    ) -> tuple[Tensor, Tensor]:
        norm, applied = verdict(square, loss, control)
        return norm, ops.cast(applied, ms.float32)

    def update(self, grads: Sequence[Array], norm: float, control: NDArray[np.floating[Any]]) -> None:
        """Updates weights and moments in place from gradients that carry the loss scale. For steps that are applied."""
        lr, eps, decay, loss_scale = (np.float32(x) for x in control[:4])
        limit = math.inf if self.config.clip_norm is None else self.config.clip_norm
        clip = min(np.float32(limit) / (np.float32(norm) + np.float32(1e-6)), np.float32(1))
        for i, grad in enumerate(grads):
            state = [tensor.array.reshape(-1) for tensor in (self.weights[i], self.first[i], self.second[i])]
            flat, weight_decay = grad.reshape(-1), decay if self.decays[i] else np.float32(0)
            for start in range(0, flat.size, CHUNK):
                part = slice(start, start + CHUNK)
                parts = [each[part] for each in state]
                self._update_part(parts, flat[part] * (clip / loss_scale), lr, eps, weight_decay)

    def _update_part(self, state: list[Array], grad: Array, lr: np.float32, eps: np.float32, decay: np.float32) -> None:
        weight, first, second = state
        beta1, beta2 = self.config.beta1, self.config.beta2
        first *= np.float32(beta1)
        first += np.float32(1 - beta1) * grad
        second *= np.float32(beta2)
        second += np.float32(1 - beta2) * grad * grad
        step = lr * first
        step /= np.sqrt(second) + eps
        step += decay * weight
        weight -= step
