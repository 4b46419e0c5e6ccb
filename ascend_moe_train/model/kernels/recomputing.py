"""Kernels whose activations are computed again in the backward pass. Shape letters: see protocol.py."""

from typing import Any

from mindspore import nn, ops

from ascend_moe_train.model.kernels.protocol import Kernels

Tensor = Any

# the primitive: ops.zeros_like is a graph of its own, which MindSpore loses when a gradient is taken inside another
zeros_like = ops.ZerosLike()


class _MatMul(nn.Cell):
    """Its inputs are all that is kept: by itself the product would keep the activation, which it needs for its weight's
    gradient."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def product(self, h_TF: Tensor, w_DF: Tensor) -> Tensor:
        return self.kernels.swiglu_matmul(h_TF, w_DF)

    def construct(self, h_TF: Tensor, w_DF: Tensor) -> Tensor:
        return self.product(h_TF, w_DF)

    def bprop(self, h_TF: Tensor, w_DF: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        # what does not wait for the backward pass would be computed early and kept
        return self.gradient(self.product)(ops.depend(h_TF, dout), w_DF, dout)


class _GroupedMatMul(nn.Cell):
    """The same for experts."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def product(self, h_RF: Tensor, w_EFD: Tensor, counts_E: Tensor, clamp: Any) -> Tensor:
        return self.kernels.swiglu_grouped_matmul(h_RF, w_EFD, counts_E, clamp)

    def construct(self, h_RF: Tensor, w_EFD: Tensor, counts_E: Tensor, clamp: Any) -> Tensor:
        return self.product(h_RF, w_EFD, counts_E, clamp)

    def bprop(
        self, h_RF: Tensor, w_EFD: Tensor, counts_E: Tensor, clamp: Any, out: Tensor, dout: Tensor
    ) -> tuple[Any, ...]:
        found = self.gradient(self.product)(ops.depend(h_RF, dout), w_EFD, counts_E, clamp, dout)
        return found[0], found[1], zeros_like(counts_E), clamp


class RecomputingKernels:
    """Those of `base`, but for the activation in front of a product, of which the input alone is kept (selective
    recomputation: Korthikanti et al., 2022, section 5)."""

    def __init__(self, base: Kernels) -> None:
        self.base = base
        self.of_matmul, self.of_grouped_matmul = _MatMul(base), _GroupedMatMul(base)

    def __getattr__(self, name: str) -> Any:
        if name == "base":  # not set yet, while a copy is being made
            raise AttributeError(name)
        return getattr(self.base, name)

    def swiglu_matmul(self, h_TF: Tensor, w_DF: Tensor) -> Tensor:
        """See Kernels."""
        return self.of_matmul(h_TF, w_DF)

    def swiglu_grouped_matmul(
        self, h_RF: Tensor, w_EFD: Tensor, counts_E: Tensor, clamp: tuple[float, float] | None
    ) -> Tensor:
        """See Kernels."""
        return self.of_grouped_matmul(h_RF, w_EFD, counts_E, clamp)
