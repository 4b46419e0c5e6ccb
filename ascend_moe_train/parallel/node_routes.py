"""Which token rows cross to which nodes, and where they go inside these. Shape letters: see once_per_node.py."""

from typing import Any

import mindspore as ms
from mindspore import ops

from ascend_moe_train.model.kernels.constants import numbers
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.parallel.admission import placed
from ascend_moe_train.parallel.autodiff import exchange_rows
from ascend_moe_train.parallel.comm import Collectives, Group, Tensor
from ascend_moe_train.parallel.exchange import Regrouping, added_up, moved_back
from ascend_moe_train.parallel.expert_sizes import ExpertSizes
from ascend_moe_train.parallel.rows_wire import RowsWire


class NodeRoutes:
    """Which rows cross, and what becomes of them in their node.

    Payload of a rank across nodes: all_gather of 4 * O bytes; all_to_all_v of 4 * K bytes for each row that it sends.
    """

    def __init__(
        self, sizes: ExpertSizes, inside: Group, across: Group, collectives: Collectives, kernels: Kernels
    ) -> None:
        self.kernels = kernels
        self.I, self.O, self.L = inside.size, across.size, sizes.local
        self.i, self.o = inside.index, across.index
        self.send_rows, self.node_rows, self.copies = sizes.once_rows(inside.size)
        across = across.carrying("figures")
        self.gather, self.tell = collectives.all_gather(across), collectives.all_to_all_v(across, self.node_rows)
        # from (rank inside, expert, node) to (node, rank inside, expert)
        order = [(i * self.L + e) * self.O + o for o in range(self.O) for i in range(self.I) for e in range(self.L)]
        self.by_node = Regrouping(order)

    def crossing(self, expert_TK: Tensor, row_TK: Tensor, accepted_AE: Tensor) -> Any:
        """-> row_TO and source_M of the rows that cross, by node and token; the token of each (M,); how many rows go to
        and come from each node, (O,) each; and the experts of those that come (C, K), counted from 1, 0 if none."""
        is_sent_TK = row_TK >= 0
        row_TO, source_M, counts_O = self.chosen(expert_TK, is_sent_TK)
        # after what other ranks tell of their rows: there is no order otherwise
        counts_OO = ops.reshape(self.gather(ops.depend(counts_O, accepted_AE)), (self.O, self.O))
        counts_OO = ops.stop_gradient(counts_OO)
        send_O, recv_O = counts_OO[self.o], counts_OO[:, self.o]
        token_M = at_least_0(source_M) // self.O
        named_TK = ops.select(is_sent_TK, expert_TK + 1, ops.zeros_like(expert_TK))
        named_CK = ops.stop_gradient(self.tell(ops.gather(named_TK, token_M, 0), send_O, recv_O))
        return row_TO, source_M, token_M, ops.depend(send_O, named_CK), recv_O, named_CK

    def chosen(self, expert_TK: Tensor, is_sent_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> row_TO of each token and node, -1 if nothing of it goes there; source_M, t * O + o of each row, -1 if it
        is empty; rows for each node (O,)."""
        node_TK1 = ops.expand_dims(expert_TK // (self.I * self.L), 2)
        goes_TKO = ops.logical_and(node_TK1 == numbers(self.O), ops.expand_dims(is_sent_TK, 2))
        goes_TO = ops.cast(added_up(ops.cast(goes_TKO, ms.int32), 1) > 0, ms.int32)
        node_TO = ops.zeros_like(goes_TO) + numbers(self.O)
        row_TO, source = placed(self.kernels, node_TO, ops.cast(goes_TO, ms.float32), goes_TO > 0, self.O)
        return row_TO, _first(source, self.send_rows), added_up(goes_TO, 0)

    def copied(self, named_CK: Tensor) -> tuple[Tensor, Tensor]:
        """-> tables of `Kernels.permute` from the rows that come to their copies, row_CK and source_Q: by rank inside,
        expert, node that they are from, and token."""
        of_node = self.I * self.L
        expert_CK = named_CK - (1 + self.o * of_node)
        is_here_CK = ops.logical_and(expert_CK >= 0, expert_CK < of_node)
        row_CK, source = placed(self.kernels, expert_CK, ops.cast(is_here_CK, ms.float32), is_here_CK, of_node)
        return row_CK, _first(source, self.copies)

    def sizes(self, accepted_AE: Tensor) -> Any:
        """-> copies by rank inside, expert and node that they are from, (1, S); rows for this rank's experts, by rank
        inside that has them, expert and node that they are from, (1, S); and copies that go to and come from each rank
        inside, (I,) each."""
        size_OIOIL = ops.reshape(accepted_AE, (self.O, self.I, self.O, self.I, self.L))
        copies_ILO = ops.transpose(size_OIOIL[:, self.i, self.o], (1, 2, 0))
        own_ILO = ops.transpose(size_OIOIL[:, :, self.o, self.i], (1, 2, 0))
        send_I = added_up(ops.reshape(copies_ILO, (self.I, -1)), 1)
        recv_I = added_up(ops.reshape(own_ILO, (self.I, -1)), 1)
        return ops.reshape(copies_ILO, (1, -1)), ops.reshape(own_ILO, (1, -1)), send_I, recv_I

    def each_way(self, accepted_AE: Tensor) -> tuple[Tensor, Tensor]:
        """-> assignments of each node's tokens that this rank has copies for, and those of its own tokens to each node,
        (O,) each."""
        size_OIOIL = ops.reshape(accepted_AE, (self.O, self.I, self.O, self.I, self.L))
        copies, own = size_OIOIL[:, self.i, self.o], size_OIOIL[self.o, self.i]
        return added_up(ops.reshape(copies, (self.O, -1)), 1), added_up(ops.reshape(own, (self.O, -1)), 1)


class InsideNode:
    """Copies to the ranks of their experts inside the node, and back."""

    def __init__(
        self,
        routes: NodeRoutes,
        inside: Group,
        collectives: Collectives,
        receive_rows: int,
        wire: RowsWire,
    ) -> None:
        self.routes, self.receive_rows = routes, receive_rows
        self._there = exchange_rows(collectives, inside, receive_rows, routes.copies, wire)
        self._back = exchange_rows(collectives, inside, routes.copies, receive_rows, wire)

    def there(self, x_QD: Tensor, accepted_AE: Tensor) -> Tensor:
        """(Q, D) -> (R, D), by source and expert."""
        _, own_1S, send_I, recv_I = self.routes.sizes(accepted_AE)
        row_R1, source_R = self.routes.by_node.places(own_1S, self.receive_rows, self.receive_rows)
        return self.routes.kernels.permute(self._there(x_QD, send_I, recv_I), row_R1, source_R)

    def back(self, y_RD: Tensor, accepted_AE: Tensor) -> Tensor:
        """(R, D) -> (Q, D)."""
        _, own_1S, send_I, recv_I = self.routes.sizes(accepted_AE)
        row_R1, source_R = self.routes.by_node.places(own_1S, self.receive_rows, self.receive_rows)
        return self._back(moved_back(self.routes.kernels, y_RD, row_R1, source_R), recv_I, send_I)


def _first(source: Tensor, rows: int) -> Tensor:
    """A slice of all is slow."""
    return source if rows == source.shape[0] else source[:rows]


def at_least_0(x: Tensor) -> Tensor:
    """-1 for nothing as a row that is there, for what is not sent on."""
    return ops.maximum(x, ops.zeros_like(x))
