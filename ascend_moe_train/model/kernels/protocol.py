"""The seam between the model and a device's kernels. The legend below holds for every file of `model/`.

T tokens (B * S), B batch, S sequence, J sequence of keys, D hidden, F feed-forward width, V vocabulary, H query heads,
G key/value heads, Z head size, Y head size of values, E experts, K experts per token (top-k), N = T * K assignments, R
rows of the expert buffer, L layers.
"""

from typing import Any, Protocol

Tensor = Any


class Kernels(Protocol):
    """What a device must compute. All tensors are fp32 unless said otherwise; integers are int32.

    `portable.PortableKernels` is the reference; every other implementation is tested against it.
    """

    name: str

    def matmul(self, x_TD: Tensor, w_FD: Tensor) -> Tensor:
        """x w^T: (T, D), (F, D) -> (T, F)."""

    def embed(self, token_T: Tensor, w_VD: Tensor) -> Tensor:
        """Rows of the embedding: (T,), (V, D) -> (T, D)."""

    def rms_norm(self, x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * w over the last dim (Zhang & Sennrich, 2019)."""

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Two or three consecutive parts of the last dim: (..., sum of sizes) -> (..., size) each."""

    def rope(self, x_BSHZ: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        """Rotate pairs (i, i + Z/2) of each head; cos and sin have Z/2 columns."""

    def attention(
        self,
        q_BSHZ: Tensor,
        k_BSGZ: Tensor,
        v_BSGY: Tensor,
        segment_BS: Tensor,
        window: int | None = None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Causal softmax attention within equal segments, scaled by 1/sqrt(Z): -> (B, S, H, Y).

        Head h reads key/value head h // (H / G). Segment numbers never fall along a sequence. With `window`, a query
        sees that many keys at most, itself included. A head's sink is one more score, of a key without a value.
        """

    def attention_part(
        self, q_BSHZ: Tensor, k_BJGZ: Tensor, v_BJGY: Tensor, first_BS: Tensor, past_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Softmax attention to some of the keys: -> (B, S, H, Y), and logsumexp of the scores (B, H, S).

        A query sees the keys from `first` to before `past`, of J; neither falls along the queries. Parts are put
        together by the logarithms, which are -1e30 or less where a query sees nothing; its output is then any number.
        Both results are fp32 whatever the inputs are, and have no gradient of their own.
        """

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
        """What these keys contribute to dq, and their dk and dv, from the gradient of the output of all parts together:
        `log_sum` is that of all scores, `dot` the product of output and gradient, of each query. Results are fp32."""

    def swiglu(self, h_RF: Tensor) -> Tensor:
        """silu(first half) * second half of the columns: (R, 2F) -> (R, F)."""

    def clamped_swiglu(self, h_RF: Tensor, alpha: float, limit: float) -> Tensor:
        """(u + 1) * g * sigmoid(alpha * g): (R, 2F) -> (R, F), where g is the first half of the columns, at most
        `limit`, and u the second, within [-limit, limit]."""

    def swiglu_matmul(self, h_TF: Tensor, w_DF: Tensor) -> Tensor:
        """`matmul` of what `swiglu` gives: (T, 2F), (D, F) -> (T, D)."""

    def swiglu_grouped_matmul(
        self, h_RF: Tensor, w_EFD: Tensor, counts_E: Tensor, clamp: tuple[float, float] | None
    ) -> Tensor:
        """`grouped_matmul` of what `swiglu` gives, or `clamped_swiglu` with alpha and limit: (R, 2F) -> (R, D)."""

    def sort_by_expert(
        self, expert_TK: Tensor, gate_TK: Tensor, num_experts: int, capacity: int | None, by_probability: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Place assignments in expert order.

        Returns row_TK (row of the buffer of each assignment, -1 if dropped), source_R (assignment t * K + k of each
        row, -1 for rows that stay empty) and counts_E (rows kept by each expert). R is N, or min(N, E * capacity).
        Within an expert, rows follow the order of assignments. Over capacity, the last assignments are dropped, or
        with `by_probability` those of the smallest gate.
        """

    def permute(self, x_TD: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        """Copy each token to its rows: -> (R, D), empty rows are zero."""

    def combine(self, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        """sum_k gate * y[row] per token; dropped assignments add nothing: -> (T, D)."""

    def grouped_matmul(self, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
        """Multiply consecutive blocks of counts_E rows by their expert's weight: -> (R, F), empty rows are zero."""

    def add_by_expert(self, x_RF: Tensor, b_EF: Tensor, counts_E: Tensor) -> Tensor:
        """Add to consecutive blocks of counts_E rows the bias of their expert: -> (R, F), empty rows stay."""

    def cross_entropy(self, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        """-log softmax(logits)[target] per token, 0 where the target is -1: -> (T,)."""

    def square_sum(self, x: Tensor) -> Tensor:
        """Sum of squares of all elements: -> (1,)."""

    def adamw(self, state: tuple[Tensor, Tensor, Tensor], grad: Tensor, scalars: Tensor, decays: bool) -> Tensor:
        """Update (parameter, first, second moment) in place; see `optim.adamw` for the eight scalars. -> a token."""
