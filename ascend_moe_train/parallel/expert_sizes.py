"""Fixed sizes of what travels to experts and back. Pure. Shape letters: see model/kernels/protocol.py."""

import math
from dataclasses import dataclass
from typing import Self

from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.model.counts import expert_capacity
from ascend_moe_train.parallel.config import ExpertWire
from ascend_moe_train.parallel.mesh import STAGE_AXES, Mesh

SCALE_BYTES = 4


def row_bytes(hidden: int, activation_bytes: int, wire: ExpertWire | None) -> int:
    """Of a token row on its way, with its scale."""
    match wire:
        case "bf16":
            return 2 * hidden
        case "fp16":
            return 2 * hidden + SCALE_BYTES
        case "int8":
            return hidden + SCALE_BYTES
    return activation_bytes * hidden


def expected_nodes(num_experts: int, top_k: int, nodes: float) -> float:
    """Distinct nodes of a token's experts, of nodes that have equally many, where all sets of `top_k` experts are
    equally likely: nodes * (1 - C(E - E / nodes, K) / C(E, K)), the expectation of a sum of indicators."""
    others = num_experts - num_experts / nodes
    missed = math.prod(max(0.0, others - k) / (num_experts - k) for k in range(top_k))
    return nodes * (1 - missed)


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Fixed sizes of the experts' region on a rank. `num_tokens` are those of one rank. With several chunks, of what
    travels and is computed at once, for some experts of every rank."""

    num_tokens: int
    top_k: int
    num_experts: int
    ep: int
    etp: int
    capacity: int | None
    """Assignments that an expert takes of the global micro-batch: that of one process that has it whole."""
    receive_factor: float | None
    chunks: int = 1

    @classmethod
    def of(cls, config: MoEConfig, mesh: Mesh, num_tokens: int, receive_factor: float | None) -> Self:
        """Those of a layer on a mesh."""
        capacity = None
        if config.capacity_factor is not None:
            total = num_tokens * mesh.size(STAGE_AXES)
            capacity = expert_capacity(config.capacity_factor, total, config.top_k, config.num_experts)
        return cls(
            num_tokens=num_tokens,
            top_k=config.top_k,
            num_experts=config.num_experts,
            ep=mesh.ep,
            etp=mesh.etp,
            capacity=capacity,
            receive_factor=receive_factor,
        )

    @property
    def local(self) -> int:
        """Experts of a rank, or of a chunk of them."""
        return self.num_experts // self.ep // self.chunks

    @property
    def send_rows(self) -> int:
        """Rows that a rank may send: one for each assignment."""
        return self.rows_from(1, self.ep * self.local)

    def rows_from(self, senders: int, num_experts: int) -> int:
        """At most so many rows come from so many ranks for so many experts: a token chooses an expert once."""
        return senders * self.num_tokens * min(self.top_k, num_experts)

    @property
    def most_rows(self) -> int:
        """Rows that may come to a rank from its ep group if none is turned away."""
        worst = self.rows_from(self.ep, self.local)
        return worst if self.capacity is None else min(worst, self.local * self.capacity)

    @property
    def receive_rows(self) -> int:
        """Rows that a rank has room for from its ep group. In dropless mode rows beyond are turned away."""
        if self.receive_factor is None or self.capacity is not None:
            return self.most_rows
        return min(self.most_rows, math.ceil(self.receive_factor * self.num_tokens * self.top_k))

    @property
    def expert_rows(self) -> int:
        """Rows that a rank's experts see: of its etp group, which sees the same."""
        rows = self.etp * self.receive_rows
        return rows if self.capacity is None else min(rows, self.local * self.capacity)

    def once_rows(self, inside: int) -> tuple[int, int, int]:
        """With nodes of `inside` ranks, each of which gets a token once: rows that a rank sends, rows that may come to
        it for the experts of its node, and their copies, one for each expert."""
        nodes = self.ep // inside
        copies = min(self.rows_from(nodes, inside * self.local), inside * self.receive_rows)
        return self.num_tokens * min(self.top_k, nodes), min(nodes * self.num_tokens, copies), copies

    def middle_rows(self, inside: int) -> int:
        """Rows that may come to a rank on the way through nodes of `inside` ranks of the ep group each."""
        nodes = self.ep // inside
        return min(self.rows_from(inside, nodes * self.local), nodes * self.receive_rows)
