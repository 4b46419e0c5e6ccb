"""Token rows that cross to each node of their experts once (as in DeepSeek-AI, 2024, arXiv 2412.19437, section 3.2.2).

Rows go across nodes first, to the rank with the sender's place in the node that has their experts, with the list of
these and of the gates. There they are copied, once for each of the token's experts in the node, and copies go on inside
it. What experts see is what they see without it, row for row.

Shape letters: see model/kernels/protocol.py; and I ranks of an ep group inside a node, O nodes, A = O * I, L experts of
a rank; N rows of all assignments, M that a rank sends to nodes, C that come to it from nodes, Q copies of these, R rows
for its own experts. `accepted_AE` says how many rows each rank has for each expert.
"""

from typing import Any, Protocol

import mindspore as ms
from mindspore import nn, ops

from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.parallel.autodiff import InOrder, exchange_rows, zeros_like
from ascend_moe_train.parallel.comm import Collectives, Group, Operator, Tensor
from ascend_moe_train.parallel.config import DedupTokens
from ascend_moe_train.parallel.expert_sizes import ExpertSizes
from ascend_moe_train.parallel.node_routes import InsideNode, NodeRoutes, at_least_0
from ascend_moe_train.parallel.rows_wire import RowsWire

# the primitive: ops.gather is a graph of its own, which MindSpore loses in a bprop
_rows = ops.Gather()


class OncePerNode(Protocol):
    """From tokens to rows in the order of their sources, and back."""

    def there(
        self,
        x_TD: Tensor,
        expert_TK: Tensor,
        gate_TK: Tensor,
        row_TK: Tensor,
        source_N: Tensor,
        accepted_AE: Tensor,
    ) -> tuple[Tensor, Any]:
        """-> rows of this rank's experts (R, D), and what `back` needs. `row_TK` and `source_N` are the order of
        experts, -1 where there is nothing."""

    def back(self, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, source_N: Tensor, carried: Any) -> Tensor:
        """Weighted sum of a token's expert outputs: (R, D) -> (T, D)."""


class NodeSums:
    """Both ways once: what experts make of a token is added up in their node before it goes back, and so are gradients
    of its copies. Sums are in the order of nodes first, which differs from that without it by rounding.

    Payload of a rank across nodes, beside that of `NodeRoutes`, with m rows that it sends and c that come: all_to_all_v
    of 2 * (m + c) rows forward and backward together, and of 4 * K * (m + c) bytes of gates and their gradients.
    """

    def __init__(
        self, routes: NodeRoutes, inside: InsideNode, across: Group, collectives: Collectives, wire: RowsWire
    ) -> None:
        self.routes, self.inside, self.kernels, self.in_order = routes, inside, routes.kernels, InOrder()
        sent, come = routes.send_rows, routes.node_rows
        self._gates = exchange_rows(collectives, across.carrying("figures"), come, sent)
        self._there = exchange_rows(collectives, across, come, sent, wire)
        self._back = exchange_rows(collectives, across, sent, come, wire)

    def there(
        self,
        x_TD: Tensor,
        expert_TK: Tensor,
        gate_TK: Tensor,
        row_TK: Tensor,
        source_N: Tensor,
        accepted_AE: Tensor,
    ) -> tuple[Tensor, Any]:
        """See OncePerNode."""
        row_TO, source_M, token_M, send_O, recv_O, named_CK = self.routes.crossing(expert_TK, row_TK, accepted_AE)
        row_CK, source_Q = self.routes.copied(named_CK)
        gate_CK = self._gates(ops.gather(gate_TK, token_M, 0), send_O, recv_O)
        # the gradient of gates goes back after that of rows
        gate_CK, x_MD = self.in_order(gate_CK, self.kernels.permute(x_TD, row_TO, source_M))
        x_CD = self._there(x_MD, send_O, recv_O)
        x_RD = self.inside.there(self.kernels.permute(x_CD, row_CK, source_Q), accepted_AE)
        return x_RD, (accepted_AE, row_TO, source_M, send_O, recv_O, gate_CK, row_CK, source_Q)

    def back(self, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, source_N: Tensor, carried: Any) -> Tensor:
        """See OncePerNode."""
        accepted_AE, row_TO, source_M, send_O, recv_O, gate_CK, row_CK, source_Q = carried
        y_CD = self.kernels.combine(self.inside.back(y_RD, accepted_AE), gate_CK, row_CK, source_Q)
        y_MD = self._back(y_CD, recv_O, send_O)
        return self.kernels.combine(y_MD, ops.ones_like(ops.cast(row_TO, ms.float32)), row_TO, source_M)


class NodeCopies:
    """Copies once: tokens on their way there, and the gradient of a token's output. What experts make of it, and
    gradients of its copies, go back one by one and are added up where the token is, in the order that they always have:
    bit for bit what it is without.

    Payload of a rank across nodes, beside that of `NodeRoutes`, with m rows that it sends once, n assignments of its
    tokens, and q of those that come to it: all_to_all_v of 2 * (m + q) rows forward and backward together, and of
    4 * K * m bytes of gates.
    """

    def __init__(
        self,
        routes: NodeRoutes,
        inside: InsideNode,
        across: Group,
        collectives: Collectives,
        num_assignments: int,
        wire: RowsWire,
    ) -> None:
        self.routes, self.inside, self.kernels, self.wire = routes, inside, routes.kernels, wire
        once = collectives.all_to_all_v(across, routes.node_rows)
        self._each = collectives.all_to_all_v(across, num_assignments)
        self._there = _CopiesThere(once, self._each, wire)
        self._combined = _CombinedFromCopies(once, routes.kernels, wire)

    def there(
        self,
        x_TD: Tensor,
        expert_TK: Tensor,
        gate_TK: Tensor,
        row_TK: Tensor,
        source_N: Tensor,
        accepted_AE: Tensor,
    ) -> tuple[Tensor, Any]:
        """See OncePerNode."""
        _, _, token_M, send_O, recv_O, named_CK = self.routes.crossing(expert_TK, row_TK, accepted_AE)
        gate_MK = ops.gather(ops.stop_gradient(gate_TK), token_M, 0)
        gate_CK = ops.stop_gradient(self.routes.tell(gate_MK, send_O, recv_O))
        send_O = ops.depend(send_O, gate_CK)
        row_CK, source_Q = self.routes.copied(named_CK)
        from_Q = at_least_0(source_Q) // row_CK.shape[1]
        copies_1S, _, _, _ = self.routes.sizes(accepted_AE)
        _, by_node_Q = self.routes.by_node.places(copies_1S, self.routes.copies, self.routes.copies)
        by_node_Q = at_least_0(by_node_Q)
        back_O, own_O = self.routes.each_way(accepted_AE)
        # for its gradient alone
        x_ND = self.kernels.permute(x_TD, row_TK, source_N)
        x_QD = self._there(ops.stop_gradient(x_TD), x_ND, token_M, from_Q, by_node_Q, send_O, recv_O, back_O, own_O)
        x_RD = self.inside.there(x_QD, accepted_AE)
        carried = (accepted_AE, token_M, from_Q, by_node_Q, send_O, recv_O, back_O, own_O, gate_CK, row_CK, source_Q)
        return x_RD, carried

    def back(self, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, source_N: Tensor, carried: Any) -> Tensor:
        """See OncePerNode."""
        accepted_AE, token_M, from_Q, by_node_Q, send_O, recv_O, back_O, own_O, gate_CK, row_CK, source_Q = carried
        y_QD = self.inside.back(y_RD, accepted_AE)
        y_ND = self.wire.moved(self._each, ops.gather(y_QD, by_node_Q, 0), back_O, own_O)
        return self._combined(
            ops.stop_gradient(y_ND),
            y_QD,
            gate_TK,
            gate_CK,
            row_TK,
            source_N,
            row_CK,
            source_Q,
            token_M,
            from_Q,
            send_O,
            recv_O,
        )


class _CopiesThere(nn.Cell):
    """Tokens to copies, each token once to a node; the gradients of copies go back one by one, to `x_ND`."""

    def __init__(self, once: Operator, each: Operator, wire: RowsWire) -> None:
        super().__init__()
        self.once, self.each, self.wire = once, each, wire

    def construct(
        self,
        x_TD: Tensor,
        x_ND: Tensor,
        token_M: Tensor,
        from_Q: Tensor,
        by_node_Q: Tensor,
        send_O: Tensor,
        recv_O: Tensor,
        back_O: Tensor,
        own_O: Tensor,
    ) -> Tensor:
        return _rows(self.wire.moved(self.once, _rows(x_TD, token_M, 0), send_O, recv_O), from_Q, 0)

    def bprop(
        self,
        x_TD: Tensor,
        x_ND: Tensor,
        token_M: Tensor,
        from_Q: Tensor,
        by_node_Q: Tensor,
        send_O: Tensor,
        recv_O: Tensor,
        back_O: Tensor,
        own_O: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> tuple[Tensor, ...]:
        dx_ND = self.wire.moved(self.each, _rows(ops.depend(dout, out), by_node_Q, 0), back_O, own_O)
        return (
            zeros_like(x_TD),
            dx_ND,
            zeros_like(token_M),
            zeros_like(from_Q),
            zeros_like(by_node_Q),
            zeros_like(send_O),
            zeros_like(recv_O),
            zeros_like(back_O),
            zeros_like(own_O),
        )


class _CombinedFromCopies(nn.Cell):
    """`Kernels.combine` of `y_ND`, which are rows `y_QD` as they came back; the gradient of the output goes to these by
    way of copies, each once to a node, and is weighted there."""

    def __init__(self, once: Operator, kernels: Kernels, wire: RowsWire) -> None:
        super().__init__()
        self.once, self.kernels, self.wire = once, kernels, wire
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def combined(self, y_RD: Tensor, gate_TK: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        return self.kernels.combine(y_RD, gate_TK, row_TK, source_R)

    def construct(
        self,
        y_ND: Tensor,
        y_QD: Tensor,
        gate_TK: Tensor,
        gate_CK: Tensor,
        row_TK: Tensor,
        source_N: Tensor,
        row_CK: Tensor,
        source_Q: Tensor,
        token_M: Tensor,
        from_Q: Tensor,
        send_O: Tensor,
        recv_O: Tensor,
    ) -> Tensor:
        return self.combined(y_ND, gate_TK, row_TK, source_N)

    def bprop(
        self,
        y_ND: Tensor,
        y_QD: Tensor,
        gate_TK: Tensor,
        gate_CK: Tensor,
        row_TK: Tensor,
        source_N: Tensor,
        row_CK: Tensor,
        source_Q: Tensor,
        token_M: Tensor,
        from_Q: Tensor,
        send_O: Tensor,
        recv_O: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> tuple[Tensor, ...]:
        dout = ops.depend(dout, out)
        dgate_TK = self.gradient(self.combined)(y_ND, gate_TK, row_TK, source_N, dout)[1]
        dout_CD = self.wire.moved(self.once, _rows(dout, token_M, 0), send_O, recv_O)
        # the gradient of rows does not depend on what they were: anything of their shape
        copy_QD = _rows(dout_CD, from_Q, 0)
        dy_QD = self.gradient(self.combined)(copy_QD, gate_CK, row_CK, source_Q, dout_CD)[0]
        return (
            zeros_like(y_ND),
            dy_QD,
            dgate_TK,
            zeros_like(gate_CK),
            zeros_like(row_TK),
            zeros_like(source_N),
            zeros_like(row_CK),
            zeros_like(source_Q),
            zeros_like(token_M),
            zeros_like(from_Q),
            zeros_like(send_O),
            zeros_like(recv_O),
        )


def once_per_node(
    how: DedupTokens,
    sizes: ExpertSizes,
    inside: Group,
    across: Group,
    collectives: Collectives,
    kernels: Kernels,
    wire: RowsWire,
) -> OncePerNode:
    """That of `parallel.dedup_tokens`."""
    routes = NodeRoutes(sizes, inside, across, collectives, kernels)
    within = InsideNode(routes, inside, collectives, sizes.receive_rows, wire)
    if how == "copies":
        return NodeCopies(routes, within, across, collectives, sizes.send_rows, wire)
    return NodeSums(routes, within, across, collectives, wire)
