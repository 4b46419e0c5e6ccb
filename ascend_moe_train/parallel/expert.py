"""Expert parallelism: tokens travel to the ranks that hold their experts, and come back.

Every rank of a stage has tokens of its own, equally many: together those of the global micro-batch, in the order of
the ranks unless context parallelism cuts sequences (places.py). A rank holds 1 / ep of the experts, each cut to 1 / etp
of its width; further copies (edp) serve other tokens. P = ep * etp ranks in a row share one copy of all experts: see
mesh.py.

Shape letters: see model/kernels/protocol.py; and P as above, L experts of a rank (E / ep), A ranks of an ep group,
R rows that a rank has room for; C chunks of a rank's experts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops
from numpy.typing import NDArray

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.config import MoEConfig
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.parallel.admission import Admission, admission_of, placed
from ascend_moe_train.parallel.autodiff import InOrder, gather_sum, scatter_sum
from ascend_moe_train.parallel.beside import Beside
from ascend_moe_train.parallel.comm import Collectives, Group, Tensor
from ascend_moe_train.parallel.config import DedupTokens
from ascend_moe_train.parallel.contents import Content
from ascend_moe_train.parallel.exchange import (
    ChunkedRows,
    Exchange,
    FlatExchange,
    NoExchange,
    Regrouping,
    TwoStepExchange,
    added_up,
    moved_back,
)
from ascend_moe_train.parallel.expert_sizes import ExpertSizes
from ascend_moe_train.parallel.figures import GlobalFigures
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.mesh import STAGE_AXES, Mesh
from ascend_moe_train.parallel.once_per_node import OncePerNode, once_per_node
from ascend_moe_train.parallel.places import TokenOrder, token_order
from ascend_moe_train.parallel.queued import QueuedComm
from ascend_moe_train.parallel.rows_wire import AsTheyAre, RowsWire, rows_wire
from ascend_moe_train.parallel.tensor import blocks

# rows exchanged (A, A); and row_R1 and source_R, from the order of ranks to that of experts
Way = tuple[Tensor, Tensor, Tensor]
# row_TK and source_N of the rows to send, -1 if turned away and if empty; dropped (1,): assignments of this rank that
# were turned away; and the way of the rows, or of each chunk's
ExpertMeta = tuple[Tensor, Tensor, Tensor, Any]


class ExpertDispatcher:
    """`dispatch.LocalDispatcher` over ranks: the experts of this rank see what all tokens of P ranks have for them, in
    the order of the ranks and of their tokens.

    Payload in bytes of one layer, forward and backward, of which a rank sends n rows and receives m: that of its
    admission; all_to_all_v over ep of 2 * (n + m) rows (`TwoStepExchange`: 2 * (n + q) rows inside the node and
    2 * (q + m) across nodes, with q rows in the middle), of `expert_sizes.row_bytes` each; over etp all_gather of 2 * R
    rows and reduce_scatter of 2 * etp * R rows, of D * itemsize bytes each. Groups of one rank move nothing.

    `sizes` and `exchange` are those of a chunk.
    """

    def __init__(
        self,
        sizes: ExpertSizes,
        ep: Group,
        etp: Group,
        collectives: Collectives,
        *,
        exchange: Exchange,
        admission: Admission,
        kernels: Kernels,
    ) -> None:
        self.kernels, self.exchange, self.admission = kernels, exchange, admission
        self.num_tokens, self.num_experts = sizes.num_tokens, sizes.num_experts
        self.ep, self.etp, self.etp_index = sizes.ep, sizes.etp, etp.index
        self.local, self.of_rank = sizes.local, sizes.num_experts // sizes.ep
        self.first = ep.index * self.of_rank
        self.receive_rows, self.expert_rows = sizes.receive_rows, sizes.expert_rows
        self.spread, self.unite = gather_sum(collectives, etp), scatter_sum(collectives, etp)
        # from (etp, ep, expert) to expert, and (ep, etp) within it, which is the order of the ranks
        order = [
            (b * self.ep + a) * self.local + e
            for e in range(self.local)
            for a in range(self.ep)
            for b in range(self.etp)
        ]
        self.by_expert = Regrouping(order, num_blocks=self.etp)

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor) -> tuple[Any, Any, ExpertMeta]:
        """-> tokens in the order of this rank's experts (R, D), rows per expert (L,), and what `combine` needs."""
        row_TK, source_N, dropped, accepted_PE = self.admitted(expert_TK, gate_TK)
        x_RD, way = self.there(0, self.kernels.permute(x_TD, row_TK, source_N), accepted_PE)
        return x_RD, self.counts(accepted_PE), (row_TK, source_N, dropped, way)

    def combine(self, y_RD: Any, gate_TK: Tensor, meta: ExpertMeta) -> Tensor:
        """Weighted sum of a token's expert outputs: (R, D) -> (T, D)."""
        row_TK, source_N, _, way = meta
        return self.kernels.combine(self.back(y_RD, way), gate_TK, row_TK, source_N)

    def admitted(self, expert_TK: Tensor, gate_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """-> row_TK and source_N in the order of experts, dropped (1,), and accepted_PE of each rank."""
        T, K = expert_TK.shape
        if self.num_tokens != T:
            raise ValueError(f"{T} tokens for a dispatcher that was made for {self.num_tokens}")
        gate_TK = ops.stop_gradient(gate_TK)
        row_TK, source_N, counts_E = self.kernels.sort_by_expert(expert_TK, gate_TK, self.num_experts, None, False)
        start_E = ops.cumsum(counts_E, 0) - counts_E
        place_TK = row_TK - ops.gather(start_E, expert_TK, 0)
        accepted_PE, is_kept_TK = self.admission.admit(expert_TK, gate_TK, place_TK, counts_E)
        if not self.admission.admits_all:
            row_TK, source_N = placed(self.kernels, expert_TK, gate_TK, is_kept_TK, self.num_experts)
        dropped = ops.reshape(T * K - ops.cast(ops.sum(ops.cast(is_kept_TK, ms.int32)), ms.int32), (1,))
        return row_TK, source_N, dropped, accepted_PE

    def counts(self, accepted_PE: Tensor) -> Tensor:
        """Rows of each of this rank's experts (L,)."""
        return added_up(accepted_PE[:, self.first : self.first + self.of_rank], 0)

    def there(self, chunk: int, x_ND: Tensor, accepted_PE: Tensor) -> tuple[Tensor, Way]:
        """Rows in the order of their ranks -> rows of a chunk's experts, in their order."""
        size_AA = self.exchanged(chunk, accepted_PE)
        return self.to_experts(chunk, self.exchange.there(x_ND, size_AA), accepted_PE, size_AA)

    def exchanged(self, chunk: int, accepted_PE: Tensor) -> Tensor:
        """Rows of a chunk that ranks of the ep group exchange: (A, A)."""
        first = chunk * self.local
        accepted = ops.reshape(accepted_PE, (self.ep, self.etp, self.ep, self.of_rank))
        return added_up(accepted[:, self.etp_index, :, first : first + self.local], 2)

    def to_experts(self, chunk: int, x_RD: Tensor, accepted_PE: Tensor, size_AA: Tensor) -> tuple[Tensor, Way]:
        """Rows in the order of their sources -> those of a chunk's experts, in their order."""
        first = self.first + chunk * self.local
        counts_PL = accepted_PE[:, first : first + self.local]
        by_block = ops.transpose(ops.reshape(counts_PL, (self.ep, self.etp, self.local)), (1, 0, 2))
        size_QS = ops.reshape(by_block, (self.etp, self.ep * self.local))
        row_R1, source_R = self.by_expert.places(size_QS, self.receive_rows, self.expert_rows)
        return self.kernels.permute(self.spread(x_RD), row_R1, source_R), (size_AA, row_R1, source_R)

    def from_experts(self, y_RD: Tensor, way: Way) -> Tensor:
        """Rows in the order of experts -> in the order of their sources."""
        _, row_R1, source_R = way
        return self.unite(moved_back(self.kernels, y_RD, row_R1, source_R))

    def back(self, y_RD: Tensor, way: Way) -> Tensor:
        """Rows in the order of experts -> where they were before `there`."""
        return self.exchange.back(self.from_experts(y_RD, way), way[0])


class BesideDispatcher(ExpertDispatcher):
    """One that has something else computed while rows are on their way."""

    def __init__(self, *arguments: Any, beside: Beside, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.beside = beside

    def dispatch_beside(
        self, x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor, other: Any
    ) -> tuple[Tensor, Tensor, ExpertMeta, Tensor]:
        """The same, and other(x_TD), computed while rows are on their way."""
        row_TK, source_N, dropped, accepted_PE = self.admitted(expert_TK, gate_TK)
        size_AA = self.exchanged(0, accepted_PE)
        x_RD, found = self.beside.there(self.kernels.permute(x_TD, row_TK, source_N), size_AA, x_TD, other)
        x_RD, way = self.to_experts(0, x_RD, accepted_PE, size_AA)
        return x_RD, self.counts(accepted_PE), (row_TK, source_N, dropped, way), found

    def combine_beside(
        self, y_RD: Tensor, gate_TK: Tensor, meta: ExpertMeta, u: Tensor, other: Any
    ) -> tuple[Tensor, Tensor]:
        """The same, and other(u), computed while rows are on their way."""
        row_TK, source_N, _, way = meta
        y_ND, found = self.beside.back(self.from_experts(y_RD, way), way[0], u, other)
        return self.kernels.combine(y_ND, gate_TK, row_TK, source_N), found


class OnceDispatcher(ExpertDispatcher):
    """One whose tokens cross to each node once. Payload among ep ranks: inside nodes that of `TwoStepExchange`, across
    nodes see once_per_node.py."""

    def __init__(self, *arguments: Any, nodes: OncePerNode, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.nodes = nodes

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor) -> tuple[Any, Any, ExpertMeta]:
        """See ExpertDispatcher."""
        row_TK, source_N, dropped, accepted_PE = self.admitted(expert_TK, gate_TK)
        accepted_AE = ops.reshape(accepted_PE, (self.ep, self.etp, self.num_experts))[:, self.etp_index]
        x_RD, carried = self.nodes.there(x_TD, expert_TK, gate_TK, row_TK, source_N, accepted_AE)
        x_RD, way = self.to_experts(0, x_RD, accepted_PE, accepted_AE)
        return x_RD, self.counts(accepted_PE), (row_TK, source_N, dropped, (way, carried))

    def combine(self, y_RD: Any, gate_TK: Tensor, meta: ExpertMeta) -> Tensor:
        """See ExpertDispatcher."""
        row_TK, source_N, _, (way, carried) = meta
        return self.nodes.back(self.from_experts(y_RD, way), gate_TK, row_TK, source_N, carried)


class ChunkedDispatcher(ExpertDispatcher):
    """The same with rows in C chunks, each of as many experts of every rank, so that one can travel while another is
    computed. An expert sees the same rows in the same order, so that all sums are made in the same order.

    All chunks travel to their experts, one after the other, then all back; in the backward pass in reverse. Payload:
    the same, with R rows for each chunk.
    """

    def __init__(self, sizes: ExpertSizes, ep: Group, etp: Group, collectives: Collectives, **parts: Any) -> None:
        super().__init__(sizes, ep, etp, collectives, **parts)
        self.chunks, self.in_order = sizes.chunks, InOrder()
        self.own = ep.index * self.etp + etp.index
        self.rows = ChunkedRows(self.num_experts, self.ep, sizes.chunks, sizes.send_rows)
        self.apart, self.joined = ops.Split(0, sizes.chunks), ops.Concat(0)
        chunk_L = np.arange(self.of_rank) // self.local
        self.is_of_chunk = tuple(ms.Tensor((chunk_L == chunk).astype(np.int32)) for chunk in range(sizes.chunks))

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, gate_TK: Tensor) -> tuple[Any, Any, ExpertMeta]:
        """-> for each chunk tokens in the order of experts (R, D), and rows per expert (L,), none of other chunks'
        experts; and what `combine` needs."""
        row_TK, source_N, dropped, accepted_PE = self.admitted(expert_TK, gate_TK)
        row_TK, source_M = self.rows.places(expert_TK, row_TK, source_N, accepted_PE[self.own])
        rows = self.apart(self.kernels.permute(x_TD, row_TK, source_M))
        last, way = self.there(0, rows[0], accepted_PE)
        x_RD: tuple[Tensor, ...] = ()
        ways: tuple[Way, ...] = (way,)
        for chunk in range(1, self.chunks):
            last, x_ND = self.in_order(last, rows[chunk])
            x_RD = (*x_RD, last)
            last, way = self.there(chunk, x_ND, accepted_PE)
            ways = (*ways, way)
        counts_L = self.counts(accepted_PE)
        counts = tuple([counts_L * is_of_chunk_L for is_of_chunk_L in self.is_of_chunk])
        return (*x_RD, last), counts, (row_TK, source_M, dropped, ways)

    def combine(self, y_RD: Any, gate_TK: Tensor, meta: ExpertMeta) -> Tensor:
        """Weighted sum of a token's expert outputs, (R, D) for each chunk: -> (T, D)."""
        row_TK, source_M, _, ways = meta
        last = self.back(y_RD[0], ways[0])
        rows: tuple[Tensor, ...] = ()
        for chunk in range(1, self.chunks):
            last, y_ND = self.in_order(last, y_RD[chunk])
            rows = (*rows, last)
            last = self.back(y_ND, ways[chunk])
        return self.kernels.combine(self.joined((*rows, last)), gate_TK, row_TK, source_M)


def in_chunks(chunks: int) -> Callable[..., Any]:
    """The port `MoE.compute` of a `ChunkedDispatcher`: nothing travels back before all rows have come."""
    in_order = InOrder()

    def compute(experts: Any, x_RD: Any, counts_L: Any) -> Any:
        last, y_RD = in_order(x_RD[chunks - 1], experts(x_RD[0], counts_L[0]))
        found: tuple[Any, ...] = (y_RD,)
        for chunk in range(1, chunks - 1):
            found = (*found, experts(x_RD[chunk], counts_L[chunk]))
        return (*found, experts(last, counts_L[chunks - 1]))

    return compute


def make_dispatcher(
    config: MoEConfig,
    sizes: ExpertSizes,
    mesh: Mesh,
    stage: Group,
    order: TokenOrder,
    collectives: Collectives,
    kernels: Kernels,
    hierarchical_ranks: int | None = None,
    wire: RowsWire | None = None,
    chunks: int = 1,
    dedup: DedupTokens | None = None,
) -> ExpertDispatcher:
    """That of this rank, of the ranks of its stage. Every rank makes it, with the same arguments; `chunks` tells in how
    many rows travel, for which `MoE.compute` must be `in_chunks`.

    `hierarchical_ranks` of P in a row are a node, which several ep ranks share: rows then travel in two steps, with
    `dedup` (`parallel.dedup_tokens`) once to each node. `wire` is how rows move; without one, as they are.
    """
    wire = wire or AsTheyAre()
    ep = collectives.split("ep", mesh.groups(("ep",))).carrying(wire.content)
    etp = collectives.split("etp", mesh.groups(("etp",))).carrying("expert rows")
    exchange: Exchange = NoExchange()
    whole, sizes = sizes, replace(sizes, chunks=chunks)
    admission = admission_of(config, whole, mesh, stage, order, collectives, kernels)
    parts: dict[str, Any] = {"exchange": exchange, "admission": admission, "kernels": kernels}
    if hierarchical_ranks is not None:
        inside = hierarchical_ranks // mesh.etp
        groups = _node_groups(mesh, collectives, inside, wire.content)
        if dedup is not None:
            nodes = once_per_node(dedup, sizes, *groups, collectives, kernels, wire)
            return OnceDispatcher(sizes, ep, etp, collectives, nodes=nodes, **parts)
        exchange = TwoStepExchange(
            collectives,
            kernels,
            *groups,
            send_rows=sizes.send_rows,
            middle_rows=sizes.middle_rows(inside),
            receive_rows=sizes.receive_rows,
            wire=wire,
        )
    elif ep.size > 1:
        exchange = FlatExchange(collectives, ep, sizes.send_rows, sizes.receive_rows, wire)
    parts["exchange"] = exchange
    if chunks > 1:
        return ChunkedDispatcher(sizes, ep, etp, collectives, **parts)
    is_plain = isinstance(exchange, FlatExchange) and isinstance(wire, AsTheyAre)
    if is_plain and isinstance(collectives.comm, QueuedComm):
        beside = Beside(collectives.comm, ep, sizes.send_rows, sizes.receive_rows)
        return BesideDispatcher(sizes, ep, etp, collectives, beside=beside, **parts)
    return ExpertDispatcher(sizes, ep, etp, collectives, **parts)


def _node_groups(mesh: Mesh, collectives: Collectives, inside: int, content: Content) -> tuple[Group, Group]:
    """Of each ep group, the ranks of a node and those with the same place in each node."""
    nodes = [each[i : i + inside] for each in mesh.groups(("ep",)) for i in range(0, mesh.ep, inside)]
    places = [each[i::inside] for each in mesh.groups(("ep",)) for i in range(inside)]
    groups = collectives.split("ep inside nodes", nodes), collectives.split("ep across nodes", places)
    return groups[0].carrying(content), groups[1].carrying(content)


def apply_expert(model: Transformer, mesh: Mesh, config: RunConfig, collectives: Collectives) -> None:
    """Makes every layer of experts one of this rank. Its weights are cut elsewhere; nothing to do for a dense model."""
    moe, parallel, batch = config.model.moe, config.parallel, config.batch
    if moe is None:
        return
    num_tokens = batch.micro_sequences * config.data.seq_len // (mesh.cp * mesh.tp)
    stage = collectives.split("stage", mesh.groups(STAGE_AXES)).carrying("figures")
    order = token_order(mesh, stage.ranks, batch.micro_sequences, config.data.seq_len)
    place_T = order.place_WT[stage.index]
    figures = GlobalFigures(
        collectives,
        stage,
        moe.num_experts,
        shares=mesh.dp,
        sequence_T=place_T // config.data.seq_len if moe.aux_loss_scope == "sequence" else None,
    )
    layers: list[Any] = [block.moe for block in blocks(model) if block.is_moe]
    places = _at(place_T)
    for layer in layers:
        layer.router.places, layer.router.figures = places, figures
    # all experts are here and none is full before it would be in one process: each rank serves its own tokens
    if moe.capacity_factor is None and mesh.ep * mesh.etp == 1:
        return
    sizes = ExpertSizes.of(moe, mesh, num_tokens, parallel.receive_factor)
    dispatcher = make_dispatcher(
        moe,
        sizes,
        mesh,
        stage,
        order,
        collectives,
        layers[0].dispatcher.kernels,
        parallel.hierarchical_ranks,
        rows_wire(parallel.expert_wire, on_host=isinstance(collectives, HostOps)),
        parallel.expert_chunks,
        parallel.dedup_tokens,
    )
    for layer in layers:
        layer.dispatcher, layer.is_beside = dispatcher, isinstance(dispatcher, BesideDispatcher)
        if parallel.expert_chunks > 1:
            layer.compute = in_chunks(parallel.expert_chunks)


def _at(place_T: NDArray[np.int32]) -> Callable[[int], Tensor]:
    """`router.places` of this rank's tokens."""
    given_T = ms.Tensor(place_T)

    def places(num_tokens: int) -> Tensor:
        if num_tokens != given_T.shape[0]:
            raise ValueError(f"{num_tokens} tokens for a router that was made for {given_T.shape[0]}")
        return given_T

    return places
