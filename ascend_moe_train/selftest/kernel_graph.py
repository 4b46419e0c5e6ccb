"""One kernel, called with the inputs of kernel_cases.py: in a compiled graph, or one operator after the other."""

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ascend_moe_train.selftest.kernel_cases import Array, Inputs

Tensor = Any


class OneKernel(nn.Cell):
    """One kernel with its constant arguments."""

    def __init__(self, kernels: Any, name: str, constants: tuple[Any, ...]) -> None:
        super().__init__()
        self.kernel, self.constants = getattr(kernels, name), constants

    def construct(self, inputs: Any) -> Any:
        return self.kernel(*inputs, *self.constants)


class WindowedAttention(OneKernel):
    """With sinks."""

    def construct(self, inputs: Any) -> Any:
        q, k, v, sink, segment = inputs
        return self.kernel(q, k, v, segment, *self.constants, sink)


class Split(OneKernel):
    """The parts joined again in the opposite order."""

    def construct(self, inputs: Any) -> Any:
        return ops.concat(self.kernel(*inputs, *self.constants)[::-1], -1)


class Update(nn.Cell):
    """An AdamW update of one parameter."""

    def __init__(self, kernels: Any, state: Sequence[Tensor]) -> None:
        super().__init__()
        self.kernels = kernels
        names = ("weight", "first", "second")
        self.weight, self.first, self.second = [
            ms.Parameter(x, name=name) for name, x in zip(names, state, strict=True)
        ]

    def construct(self, grad: Any, scalars: Any) -> Any:
        return self.kernels.adamw((self.weight, self.first, self.second), grad, scalars, True)

    def state(self) -> list[Array]:
        """Weight and moments as they are now."""
        return [x.asnumpy().copy() for x in (self.weight, self.first, self.second)]


def one_kernel(kernels: Any, name: str, constants: tuple[Any, ...]) -> OneKernel:
    """The kernel of that name in kernel_cases, but for the update."""
    name = name.removeprefix("clamped_") if name.endswith("grouped_matmul") else name
    if name == "attention_to_a_window":
        return WindowedAttention(kernels, "attention", constants)
    return (Split if name == "split" else OneKernel)(kernels, name, constants)


class _ResultAndGradients(nn.Cell):
    """A kernel's result, and the gradients of sum(result * weight) of all inputs."""

    def __init__(self, kernel: OneKernel) -> None:
        super().__init__()
        self.kernel = kernel
        self.gradient = ops.GradOperation(sens_param=True)

    def construct(self, inputs: Any, weight: Any) -> Any:
        result = self.kernel(inputs)
        return result, self.gradient(self.kernel)(inputs, ops.cast(weight, result.dtype))


def outputs(kernels: Any, name: str, given: Inputs, dtype: Any, *, in_graph: bool) -> list[Array]:
    """The result of a kernel (or its results), then its gradients, as fp64; integers as they are.

    `dtype` is that of activations; weights are fp32 unless it is fp64. `in_graph` compiles, else each operator runs by
    itself.
    """
    ms.set_context(mode=ms.GRAPH_MODE if in_graph else ms.PYNATIVE_MODE)
    wide = ms.float64 if dtype == ms.float64 else ms.float32
    tensors = [_tensor(x, dtype if i in given.activations else wide) for i, x in enumerate(given.arrays)]
    if name == "adamw":
        update = Update(kernels, tensors[:3])
        update(tensors[3], tensors[4]).asnumpy()
        return [x.astype(np.float64) for x in update.state()]
    kernel, weight = one_kernel(kernels, name, given.constants), _tensor(given.weight, wide)
    if not given.wrt:
        found = kernel(tuple(tensors))
        return [_array(x) for x in (found if isinstance(found, tuple) else (found,))]
    if in_graph:
        result, gradients = _ResultAndGradients(kernel)(ms.mutable(tuple(tensors)), weight)
        return [_array(x) for x in (result, *(gradients[i] for i in given.wrt))]

    def total(*inputs: Tensor) -> Tensor:
        return ops.sum(ops.cast(kernel(inputs), wide) * weight)

    gradients = ms.grad(total, grad_position=given.wrt)(*tensors)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    return [_array(x) for x in (kernel(tuple(tensors)), *gradients)]


def _tensor(x: Array, dtype: Any) -> Tensor:
    return ms.Tensor(x) if x.dtype == np.int32 else ms.Tensor(x).astype(dtype)


def _array(x: Tensor) -> Array:
    if x.dtype in (ms.float64, ms.int32):
        return x.asnumpy().copy()
    return ops.cast(x, ms.float32).asnumpy().astype(np.float64)
