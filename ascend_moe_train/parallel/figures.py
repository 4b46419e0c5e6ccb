"""What routers report, of the micro-batches of all ranks together. Shape letters: see model/kernels/protocol.py."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops
from numpy.typing import NDArray

from ascend_moe_train.model.kernels.constants import numbers
from ascend_moe_train.model.router import count_assignments
from ascend_moe_train.parallel.autodiff import reduce
from ascend_moe_train.parallel.comm import Collectives, Group, Tensor


class GlobalFigures:
    """`router.RouterFigures` of the tokens of all ranks that share a stage, the same on each of them.

    The balancing and z losses made of them are those of one process with the whole micro-batch, on every rank. The
    gradient of their sum over the ranks is the identity: each rank's tokens get theirs once, with no communication.
    They are one all_reduce of 4 * (2 * B * E + 1) bytes. Counts travel as fp32, exact up to 2^24 each.

    B is 1, or all sequences of the micro-batch, those of all `shares` data parallel parts: then `sequence_T` is the
    number of each token's.
    """

    def __init__(
        self,
        collectives: Collectives,
        group: Group,
        num_experts: int,
        *,
        shares: int,
        sequence_T: NDArray[np.int32] | None,
    ) -> None:
        self.num_experts, self.num_ranks, self.shares = num_experts, group.size, shares
        self.per_sequence = sequence_T is not None
        if sequence_T is not None:
            self.sequence_T = ms.Tensor(sequence_T)
        self.sum = reduce(collectives, group)

    def collect(self, expert_TK: Tensor, probability_TE: Tensor, log_sum_T: Tensor, num_sequences: int) -> Any:
        """-> (expert_TK, probability_BE, z_loss (1,), counts_BE): see RouterFigures. The experts come after the sum,
        and so does what sends tokens to them."""
        T, E = expert_TK.shape[0], self.num_experts
        B = self.shares * num_sequences if self.per_sequence else 1
        sequence_T = self.sequence_T if self.per_sequence else numbers(T) // T
        counts_BE = ops.cast(count_assignments(expert_TK, sequence_T, B, E), ms.float32)
        probability_BE = self.by_sequence(probability_TE, B)
        z = ops.reshape(ops.sum(log_sum_T * log_sum_T), (1,))
        mine = (ops.reshape(probability_BE, (B * E,)), ops.reshape(ops.stop_gradient(counts_BE), (B * E,)), z)
        sums = self.sum(ops.concat(mine, 0))
        probability_BE = ops.reshape(sums[: B * E], (B, E))
        counts_BE = ops.cast(ops.stop_gradient(ops.reshape(sums[B * E : 2 * B * E], (B, E))), ms.int32)
        tokens = T * self.num_ranks
        return ops.depend(expert_TK, sums), probability_BE / (tokens // B), sums[2 * B * E :] / tokens, counts_BE

    def by_sequence(self, x_TE: Tensor, num_sequences: int) -> Tensor:
        """Sums over the tokens of each sequence of the micro-batch, as far as they are here: (B, E)."""
        if not self.per_sequence:
            return ops.sum(x_TE, 0, True)
        return ops.unsorted_segment_sum(x_TE, self.sequence_T, num_sequences)
