"""Which assignments of tokens to experts find a place, decided alike on every rank.

Shape letters: see model/kernels/protocol.py; and P ranks whose tokens meet at the same experts (ep x etp), W all ranks
of a stage; R runs of consecutive tokens of a rank, M those of all (see `places.TokenOrder`). `place_TK` is an
assignment's place among this rank's of its expert.
"""

from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import ops
from numpy.typing import NDArray

from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.model.kernels.constants import numbers
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.parallel.comm import Collectives, Group, Tensor
from ascend_moe_train.parallel.expert_sizes import ExpertSizes
from ascend_moe_train.parallel.mesh import Mesh
from ascend_moe_train.parallel.places import TokenOrder


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
    """Each expert takes the first `capacity` assignments of the tokens of all W ranks in order, whichever ranks its
    copies serve.

    Payload: one all_gather of 4 * R * E bytes over the W ranks.
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
        order: TokenOrder,
    ) -> None:
        self.num_experts, self.index, self.first, self.num_ranks = num_experts, stage.index, first, num_ranks
        self.capacity, self.num_runs = capacity, order.num_runs
        self.run_T1 = ms.Tensor(order.run_WT[stage.index][:, None])
        self.runs = _Order(order.order_M)
        self.gather = collectives.all_gather(stage)

    def admit(self, expert_TK: Tensor, gate_TK: Tensor, place_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """See Admission."""
        R, E = self.num_runs, self.num_experts
        if R == 1:
            counts_RE, counter_TK = ops.reshape(counts_E, (1, E)), expert_TK
        else:
            counter_TK = self.run_T1 * E + expert_TK
            one_N = ops.ones_like(ops.reshape(expert_TK, (-1,)))
            counts_RE = ops.reshape(ops.unsorted_segment_sum(one_N, ops.reshape(counter_TK, (-1,)), R * E), (R, E))
            before_RE = ops.cumsum(counts_RE, 0) - counts_RE
            place_TK = place_TK - ops.gather(ops.reshape(before_RE, (R * E,)), counter_TK, 0)
        counts_ME = self.runs.sorted(ops.reshape(self.gather(counts_RE), (-1, E)))
        accepted = ops.reshape(self.runs.back(_first(counts_ME, self.capacity, 0)), (-1, R, E))
        own = ops.reshape(accepted[self.index], (R * E,))
        is_kept_TK = place_TK < ops.gather(own, counter_TK, 0)
        accepted_PE = ops.cast(ops.sum(accepted[self.first : self.first + self.num_ranks], 1), ms.int32)
        return accepted_PE, is_kept_TK


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
        order: TokenOrder,
        kernels: Kernels,
    ) -> None:
        self.kernels = kernels
        self.num_experts, self.index, self.first, self.num_ranks = num_experts, stage.index, first, num_ranks
        self.stage_size, self.capacity = stage.size, capacity
        self.tokens = _Order(order.token_order_U)
        self.gather = collectives.all_gather(stage)

    def admit(self, expert_TK: Tensor, gate_TK: Tensor, place_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """See Admission."""
        T, K = expert_TK.shape
        W, E = self.stage_size, self.num_experts
        both = self.gather(ops.concat((ops.cast(expert_TK, ms.float32), gate_TK), 1))
        in_order = self.tokens.sorted(both)
        row, _, _ = self.kernels.sort_by_expert(
            ops.cast(in_order[:, :K], ms.int32), in_order[:, K:], E, self.capacity, True
        )
        row = self.tokens.back(row)
        expert_N = ops.reshape(ops.cast(both[:, :K], ms.int32), (W * T * K,))
        is_kept_N = ops.reshape(ops.cast(row >= 0, ms.int32), (W * T * K,))
        counter_N = numbers(W * T * K) // (T * K) * E + expert_N
        accepted_WE = ops.reshape(ops.unsorted_segment_sum(is_kept_N, counter_N, W * E), (W, E))
        own_TK = row[self.index * T : (self.index + 1) * T]
        return accepted_WE[self.first : self.first + self.num_ranks], own_TK >= 0


class _Order:
    """An order of rows and back: nothing to do if it is the one that they have."""

    def __init__(self, order_N: NDArray[np.int32]) -> None:
        self.is_given = bool((order_N == np.arange(len(order_N))).all())
        self.order_N, self.place_N = ms.Tensor(order_N), ms.Tensor(np.argsort(order_N).astype(np.int32))

    def sorted(self, x: Tensor) -> Tensor:
        """Rows in order."""
        return x if self.is_given else ops.gather(x, self.order_N, 0)

    def back(self, x: Tensor) -> Tensor:
        """Rows where they were."""
        return x if self.is_given else ops.gather(x, self.place_N, 0)


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


def admission_of(
    config: MoEConfig,
    sizes: ExpertSizes,
    mesh: Mesh,
    stage: Group,
    order: TokenOrder,
    collectives: Collectives,
    kernels: Kernels,
) -> Admission:
    """That of a layer on a mesh. Every rank makes it, with the same arguments."""
    P, E = mesh.ep * mesh.etp, sizes.num_experts
    if sizes.capacity is not None:
        first, capacity = stage.index // P * P, sizes.capacity
        if config.drop_policy == "position":
            return ByPosition(collectives, stage, E, first=first, num_ranks=P, capacity=capacity, order=order)
        return ByProbability(
            collectives, stage, E, first=first, num_ranks=P, capacity=capacity, order=order, kernels=kernels
        )
    group = collectives.split("ep x etp", mesh.groups(("ep", "etp"))).carrying("figures")
    if sizes.receive_rows == sizes.most_rows:
        return Everything(collectives, group, E)
    return WithinBound(collectives, group, E, ep=mesh.ep, etp=mesh.etp, receive_rows=sizes.receive_rows)
