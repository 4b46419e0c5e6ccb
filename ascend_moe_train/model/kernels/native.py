"""Kernels compiled from the C sources in `csrc/` for this machine's processor. Shape letters: see protocol.py.

Each is one ahead-of-time operator of MindSpore with a hand-given gradient. Numbers that never change travel as small
constant tensors, since a C function gets nothing but tensors.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops
from mindspore.ops import constexpr, signature

from ascend_moe_train.model.kernels.constants import numbers
from ascend_moe_train.model.kernels.portable import PortableKernels

Tensor = Any
Shape = list[int]

# the primitive: ops.zeros_like is a graph of its own, which MindSpore loses when a gradient is taken inside another
zeros_like = ops.ZerosLike()


@constexpr
def _floats(*values: float) -> Tensor:
    return ms.Tensor(np.array(values, np.float32))


@constexpr
def _integers(*values: int) -> Tensor:
    return ms.Tensor(np.array(values, np.int32))


class NativeKernels(PortableKernels):
    """`protocol.Kernels` for CPUs, in fp32."""

    name = "native"

    def __init__(self, library: Path) -> None:
        self.library = library
        self._matmul = self._make_matmul()
        self._embed = self._make_embed()
        self._rms_norm = self._make_rms_norm()
        self._split_2, self._split_3 = self._make_split(2), self._make_split(3)
        self._rope = self._make_rope()
        self._attention = self._make_attention()
        self._attention_part = self._operator("attention_part", self._attention_shapes, outputs=2)
        self._attention_part_gradient = self._operator(
            "attention_part_grad", lambda dout, dot, log_sum, q, k, v, *others: (q, k, v), outputs=3
        )
        self._swiglu = self._make_swiglu()
        self._sort = self._operator(
            "sort_by_expert", lambda expert, gate, options, r, e: (expert, r, e), outputs=3, dtype=ms.int32
        )
        self._permute = self._make_permute()
        self._combine = self._make_combine()
        self._grouped_matmul = self._make_grouped_matmul()
        self._cross_entropy = self._make_cross_entropy()
        self._square_sum = self._operator("square_sum", lambda x: [1])
        self._adamw = self._make_adamw()

    def _operator(
        self,
        function: str,
        shape: Any,
        gradient: Callable[..., Any] | None = None,
        outputs: int = 1,
        dtype: Any = ms.float32,
    ) -> Any:
        """The C function as an operator. `shape` maps the shapes of the inputs to that of each result."""

        def dtypes(*inputs: Any) -> Any:
            return dtype if outputs == 1 else (dtype,) * outputs

        return ops.Custom(f"{self.library}:{function}", shape, dtypes, "aot", gradient)

    def _make_matmul(self) -> Any:
        backward_x = self._operator("matmul_dx", lambda dy, w: [dy[0], w[1]])
        backward_w = self._operator("matmul_dw", lambda dy, x: [dy[1], x[1]])

        def gradient(x_TD: Tensor, w_FD: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
            return backward_x(dout, w_FD), backward_w(dout, x_TD)

        return self._operator("matmul", lambda x, w: [x[0], w[0]], gradient)

    def matmul(self, x_TD: Tensor, w_FD: Tensor) -> Tensor:
        """Tiles of the result."""
        return self._matmul(x_TD, w_FD)

    def _make_embed(self) -> Any:
        backward = self._operator("embed_dw", lambda dy, token, w: w)

        def gradient(token_T: Tensor, w_VD: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
            return zeros_like(token_T), backward(dout, token_T, w_VD)

        return self._operator("embed", lambda token, w: [token[0], w[1]], gradient)

    def embed(self, token_T: Tensor, w_VD: Tensor) -> Tensor:
        """Copies rows; the gradient is added up by ranges of the vocabulary."""
        return self._embed(token_T, w_VD)

    def _make_rms_norm(self) -> Any:
        backward = self._operator("rms_norm_grad", lambda dy, x, w, inverse: (x, w), outputs=2)

        def gradient(x: Tensor, w_D: Tensor, eps: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            dx, dw_D = backward(dout[0], x, w_D, out[1])
            return dx, dw_D, zeros_like(eps)

        return self._operator("rms_norm", lambda x, w, eps: (x, x[:-1]), gradient, outputs=2)

    def rms_norm(self, x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
        """One pass each way; 1/rms is kept for the way back."""
        return self._rms_norm(x_TD, w_D, _floats(eps))[0]

    def _make_split(self, num_parts: int) -> Any:
        backward = self._operator("join", lambda *parts: [*parts[0][:-1], sum(part[-1] for part in parts)])

        def two(x: Tensor, first: Tensor, second: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
            return backward(dout[0], dout[1]), zeros_like(first), zeros_like(second)

        def three(
            x: Tensor, first: Tensor, second: Tensor, third: Tensor, out: Tensor, dout: Tensor
        ) -> tuple[Tensor, ...]:
            zeros = zeros_like(first), zeros_like(second), zeros_like(third)
            return backward(dout[0], dout[1], dout[2]), *zeros

        def shapes(x: Shape, *parts: Shape) -> tuple[Shape, ...]:
            return tuple([*x[:-1], part[0]] for part in parts)

        return self._operator("split", shapes, two if num_parts == 2 else three, outputs=num_parts)

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """One pass each way, for two or three parts."""
        if len(sizes) == 2:
            return self._split_2(x, numbers(sizes[0]), numbers(sizes[1]))
        return self._split_3(x, numbers(sizes[0]), numbers(sizes[1]), numbers(sizes[2]))

    def _make_rope(self) -> Any:
        backward = self._operator("rope_grad", lambda dy, cos, sin: dy)

        def gradient(
            x_BSHZ: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor, out: Tensor, dout: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            return backward(dout, cos_BSZ, sin_BSZ), zeros_like(cos_BSZ), zeros_like(sin_BSZ)

        return self._operator("rope", lambda x, cos, sin: x, gradient)

    def rope(self, x_BSHZ: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        """The gradient is the rotation by the opposite angle."""
        return self._rope(x_BSHZ, cos_BSZ, sin_BSZ)

    def _make_attention(self) -> Any:
        def gradient_shapes(dy: Shape, q: Shape, k: Shape, v: Shape, *others: Shape) -> tuple[Shape, ...]:
            return q, k, v, [q[2]], [q[0], q[2]]

        backward = self._operator("attention_grad", gradient_shapes, outputs=5)

        def gradient(
            q: Tensor, k: Tensor, v: Tensor, segment: Tensor, sink: Tensor, window: Tensor, out: Tensor, dout: Tensor
        ) -> tuple[Tensor, ...]:
            dq, dk, dv, dsink, _ = backward(dout[0], q, k, v, segment, sink, window, out[0], out[1])
            return dq, dk, dv, zeros_like(segment), dsink, zeros_like(window)

        return self._operator("attention", self._attention_shapes, gradient, outputs=2)

    @staticmethod
    def _attention_shapes(q: Shape, k: Shape, v: Shape, *others: Shape) -> tuple[Shape, ...]:
        return [*q[:3], v[3]], [q[0], q[2], q[1]]

    def attention(
        self,
        q_BSHZ: Tensor,
        k_BSGZ: Tensor,
        v_BSGY: Tensor,
        segment_BS: Tensor,
        window: int | None = None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Blocks of queries, without the keys that a block cannot see; the way back computes probabilities again."""
        sink = _floats(*(-math.inf,) * q_BSHZ.shape[2]) if sink_H is None else sink_H
        limit = _integers(q_BSHZ.shape[1] if window is None else window)
        return self._attention(q_BSHZ, k_BSGZ, v_BSGY, segment_BS, sink, limit)[0]

    def attention_part(
        self, q_BSHZ: Tensor, k_BJGZ: Tensor, v_BJGY: Tensor, first_BS: Tensor, past_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `attention`. It has no gradient of its own: see `attention_part_gradient`."""
        return self._attention_part(q_BSHZ, k_BJGZ, v_BJGY, first_BS, past_BS)

    def attention_part_gradient(
        self,
        dout_BSHY: Tensor,
        dot_BHS: Tensor,
        log_sum_BHS: Tensor,
        q_BSHZ: Tensor,
        k_BJGZ: Tensor,
        v_BJGY: Tensor,
        first_BS: Tensor,
        past_BS: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As that of `attention`."""
        return self._attention_part_gradient(dout_BSHY, dot_BHS, log_sum_BHS, q_BSHZ, k_BJGZ, v_BJGY, first_BS, past_BS)

    def _make_swiglu(self) -> Any:
        backward = self._operator("swiglu_grad", lambda dy, h: h)

        def gradient(h_RF: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
            return (backward(dout, h_RF),)

        return self._operator("swiglu", lambda h: [*h[:-1], h[-1] // 2], gradient)

    def swiglu(self, h_RF: Tensor) -> Tensor:
        """One pass each way."""
        return self._swiglu(h_RF)

    def sort_by_expert(
        self, expert_TK: Tensor, gate_TK: Tensor, num_experts: int, capacity: int | None, by_probability: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A counting sort: O(N + E), and with `by_probability` a sort of each overfull expert."""
        T, K = expert_TK.shape
        rows, limit = T * K, T * K
        if capacity is not None:
            rows, limit = min(T * K, num_experts * capacity), capacity
        options = _integers(limit, int(by_probability and capacity is not None))
        # results get their shapes from those of inputs, so two inputs are there for their shape
        return self._sort(
            ops.stop_gradient(expert_TK), ops.stop_gradient(gate_TK), options, numbers(rows), numbers(num_experts)
        )

    def _make_permute(self) -> Any:
        backward = self._operator("permute_dx", lambda dy, row: [row[0], dy[1]])

        def gradient(
            x_TD: Tensor, row_TK: Tensor, source_R: Tensor, out: Tensor, dout: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            return backward(dout, row_TK), zeros_like(row_TK), zeros_like(source_R)

        return self._operator("permute", lambda x, row, source: [source[0], x[1]], gradient)

    def permute(self, x_TD: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        """Copies rows; the gradient of a token is the sum over its rows."""
        return self._permute(x_TD, row_TK, source_R)

    def _make_combine(self) -> Any:
        backward = self._operator("combine_grad", lambda dout, y, gate, row, source: (y, gate), outputs=2)

        def gradient(
            y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, source_R: Tensor, out: Tensor, dout: Tensor
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            dy_RD, dgate_TK = backward(dout, y_RD, gate_TK, row_TK, source_R)
            return dy_RD, dgate_TK, zeros_like(row_TK), zeros_like(source_R)

        return self._operator("combine", lambda y, gate, row, source: [row[0], y[1]], gradient)

    def combine(self, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        """One pass each way."""
        return self._combine(y_RD, gate_TK, row_TK, source_R)

    def _make_grouped_matmul(self) -> Any:
        backward_x = self._operator("grouped_matmul_dx", lambda dy, w, counts: [dy[0], w[1]])
        backward_w = self._operator("grouped_matmul_dw", lambda x, dy, counts: [counts[0], x[1], dy[1]])

        def gradient(
            x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor, out: Tensor, dout: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            return (
                backward_x(dout, w_EDF, counts_E),
                backward_w(x_RD, dout, counts_E),
                zeros_like(counts_E),
            )

        return self._operator("grouped_matmul", lambda x, w, counts: [x[0], w[2]], gradient)

    def grouped_matmul(self, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
        """Blocks of rows of one expert; a weight gradient is computed by blocks of its rows."""
        return self._grouped_matmul(x_RD, w_EDF, counts_E)

    def _make_cross_entropy(self) -> Any:
        backward = self._operator("cross_entropy_grad", lambda dloss, logits, target, log_sum: logits)

        def gradient(logits_TV: Tensor, target_T: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
            return backward(dout[0], logits_TV, target_T, out[1]), zeros_like(target_T)

        return self._operator("cross_entropy", lambda logits, target: (target, target), gradient, outputs=2)

    def cross_entropy(self, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        """Keeps logsumexp; the gradient is one pass over the logits."""
        return self._cross_entropy(logits_TV, target_T)[0]

    def square_sum(self, x: Tensor) -> Tensor:
        """Summed in fp64."""
        return self._square_sum(x)

    def _make_adamw(self) -> Any:
        """MindSpore has to know what is written: else it may hand out copies, and the update would be lost."""
        operator = self._operator("adamw", lambda *_: [1])
        written = ("parameter", "first", "second")
        operator.set_signatures(
            tuple(signature.make_sig(name, signature.sig_rw.RW_WRITE) for name in written)
            + tuple(signature.make_sig(name) for name in ("grad", "scalars", "decays"))
        )
        operator.add_prim_attr("side_effect_mem", True)
        return operator

    def adamw(self, state: tuple[Tensor, Tensor, Tensor], grad: Tensor, scalars: Tensor, decays: bool) -> Tensor:
        """One pass. A scale of 0 touches nothing."""
        parameter, first, second = state
        return self._adamw(parameter, first, second, grad, scalars, _integers(int(decays)))
