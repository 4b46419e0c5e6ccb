"""Which assignments of tokens to experts find a place, decided alike on every rank.

Shape letters: see model/kernels/protocol.py; and P ranks whose tokens meet at the same experts (ep x etp), W all ranks
of a stage. Ranks are in the order of their tokens. `place_TK` is an assignment's place among this rank's of its expert.
"""

from typing import Any, Protocol

import mindspore as ms
from mindspore import ops

from ascend_moe_train.model.kernels.portable import numbers
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.parallel.comm import Collectives, Group, Tensor


class Admission(Protocol):
    """A rule. `admits_all`: nothing is ever turned away."""

    admits_all: bool

    def admit(self, expert_TK: Tensor, gate_TK: Tensor, place_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """From the assignments and how many go to each expert -> accepted_PE of each rank, and which are among them."""


class Everything:
    """Payload: one all_gather of 4 * E bytes over the P ranks."""

    admits_all = True

    def __init__(self, collectives: Collectives, group: Group, num_experts: int) -> None:
        self.num_experts = num_experts
        self.gather = collectives.all_gather(group)

    def admit(self, expert_TK: Tensor, gate_TK: Tensor, place_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """See Admission."""
        return ops.reshape(self.gather(counts_E), (-1, self.num_experts)), place_TK >= 0


class WithinBound:
    """No rank receives more than `receive_rows` from its ep group: what would be behind them in its buffer, which is
    in the order of ranks and then of experts, is turned away.

    Payload: one all_gather of 4 * E bytes over the P ranks.
    """

    admits_all = False

    def __init__(
        self, collectives: Collectives, group: Group, num_experts: int, *, ep: int, etp: int, receive_rows: int
    ) -> None:
        self.num_experts, self.index, self.ep, self.etp = num_experts, group.index, ep, etp
        self.receive_rows = receive_rows
        self.gather = collectives.all_gather(group)

    def admit(self, expert_TK: Tensor, gate_TK: Tensor, place_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """See Admission."""
        local = self.num_experts // self.ep
        by_rank = ops.reshape(self.gather(counts_E), (self.ep, self.etp, self.ep, local))
        # a receiving rank is (etp, second ep), and its buffer is in the order of (first ep, local expert)
        buffer = ops.reshape(ops.transpose(by_rank, (1, 2, 0, 3)), (self.etp, self.ep, self.ep * local))
        accepted = ops.reshape(_first(buffer, self.receive_rows, 2), (self.etp, self.ep, self.ep, local))
        accepted_PE = ops.reshape(ops.transpose(accepted, (2, 0, 1, 3)), (self.ep * self.etp, self.num_experts))
        return accepted_PE, place_TK < ops.gather(accepted_PE[self.index], expert_TK, 0)


class ByPosition:
    """Each expert takes the first `capacity` assignments of all W ranks, whichever ranks its copies serve.

    Payload: one all_gather of 4 * E bytes over the W ranks.
    """

    admits_all = False

    def __init__(
        self, collectives: Collectives, stage: Group, num_experts: int, *, first: int, num_ranks: int, capacity: int
    ) -> None:
        self.num_experts, self.index, self.first, self.num_ranks = num_experts, stage.index, first, num_ranks
        self.capacity = capacity
        self.gather = collectives.all_gather(stage)

    def admit(self, expert_TK: Tensor, gate_TK: Tensor, place_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """See Admission."""
        counts_WE = ops.reshape(self.gather(counts_E), (-1, self.num_experts))
        accepted_WE = _first(counts_WE, self.capacity, 0)
        is_kept_TK = place_TK < ops.gather(accepted_WE[self.index], expert_TK, 0)
        return accepted_WE[self.first : self.first + self.num_ranks], is_kept_TK


class ByProbability:
    """Each expert takes the `capacity` assignments of all W ranks that have the largest gates, chosen on every rank by
    the kernel that does so in one process, and so with its rule for equal gates.

    Payload: one all_gather of 4 * 2 * T * K bytes over the W ranks.
    """

    admits_all = False

    def __init__(
        self,
        collectives: Collectives,
        stage: Group,
        num_experts: int,
        *,
        first: int,
        num_ranks: int,
        capacity: int,
        kernels: Kernels,
    ) -> None:
        self.kernels = kernels
        self.num_experts, self.index, self.first, self.num_ranks = num_experts, stage.index, first, num_ranks
        self.stage_size, self.capacity = stage.size, capacity
        self.gather = collectives.all_gather(stage)

    def admit(self, expert_TK: Tensor, gate_TK: Tensor, place_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """See Admission."""
        T, K = expert_TK.shape
        W, E = self.stage_size, self.num_experts
        both = self.gather(ops.concat((ops.cast(expert_TK, ms.float32), gate_TK), 1))
        expert, gate = ops.cast(both[:, :K], ms.int32), both[:, K:]
        row, _, _ = self.kernels.sort_by_expert(expert, gate, E, self.capacity, True)
        counter = numbers(W * T * K) // (T * K) * E + ops.reshape(expert, (W * T * K,))
        is_kept = ops.reshape(ops.cast(row >= 0, ms.int32), (W * T * K,))
        accepted_WE = ops.reshape(ops.unsorted_segment_sum(is_kept, counter, W * E), (W, E))
        own_TK = row[self.index * T : (self.index + 1) * T]
        return accepted_WE[self.first : self.first + self.num_ranks], own_TK >= 0


def _first(counts: Tensor, limit: int, dim: int) -> Tensor:
    """How many of each count are within the first `limit` along a dim."""
    room = limit - (ops.cumsum(counts, dim) - counts)
    return ops.minimum(counts, ops.maximum(room, ops.zeros_like(room)))


def placed(kernels: Kernels, expert_TK: Tensor, gate_TK: Tensor, is_kept_TK: Tensor, num_experts: int) -> Any:
    """-> (row_TK, source_N) in expert order of those kept; -1 for the others and in rows that stay empty."""
    T, K = expert_TK.shape
    # those turned away are a group of their own, the last
    group_TK = ops.select(is_kept_TK, expert_TK, ops.full_like(expert_TK, num_experts))
    row_TK, source_N, counts = kernels.sort_by_expert(group_TK, gate_TK, num_experts + 1, None, False)
    is_used_N = numbers(T * K) < T * K - counts[num_experts]
    return (
        ops.select(is_kept_TK, row_TK, ops.full_like(row_TK, -1)),
        ops.select(is_used_N, source_N, ops.full_like(source_N, -1)),
    )
