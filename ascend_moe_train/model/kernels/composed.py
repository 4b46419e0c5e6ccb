"""Kernels that are two others, one after the other. Shape letters: see protocol.py."""

from typing import Any

Tensor = Any


class ComposedKernels:
    """Those of `protocol.Kernels` that follow from the rest."""

    def swiglu_matmul(self: Any, h_TF: Tensor, w_DF: Tensor) -> Tensor:
        """See Kernels."""
        return self.matmul(self.swiglu(h_TF), w_DF)

    def swiglu_grouped_matmul(
        self: Any, h_RF: Tensor, w_EFD: Tensor, counts_E: Tensor, clamp: tuple[float, float] | None
    ) -> Tensor:
        """See Kernels."""
        y_RF = self.swiglu(h_RF) if clamp is None else self.clamped_swiglu(h_RF, clamp[0], clamp[1])
        return self.grouped_matmul(y_RF, w_EFD, counts_E)
