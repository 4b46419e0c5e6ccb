"""Rows to the ranks of their experts and back: who moves what, and rows into another order.

Shape letters: see model/kernels/protocol.py; and A ranks that rows are exchanged among (ep), S segments of rows, Q
blocks of segments. `size_AA` says how many rows each rank (first) has for each rank (second); all ranks know all of it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import ops

from ascend_moe_train.model.kernels.constants import numbers
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.parallel.autodiff import exchange_rows
from ascend_moe_train.parallel.comm import Collectives, Group, Tensor
from ascend_moe_train.parallel.rows_wire import RowsWire


def added_up(x: Tensor, dim: int) -> Tensor:
    """The sum along a dim as int32, which MindSpore makes an int64."""
    return ops.cast(ops.sum(x, dim), ms.int32)


class Regrouping:
    """Segments of rows in another order, by `order`: the number of the segment that becomes the first, the second ...

    Segments lie one after the other in `num_blocks` blocks of equally many rows. What is left of a block after its
    segments is empty; after regrouping, empty rows are the last.
    """

    def __init__(self, order: Sequence[int], num_blocks: int = 1) -> None:
        per_block = len(order) // num_blocks
        # the rest of each block is a segment too, so that the order is one of all rows
        full = [each // per_block * (per_block + 1) + each % per_block for each in order]
        full += [block * (per_block + 1) + per_block for block in range(num_blocks)]
        self.order_S = ms.Tensor(np.array(full, np.int32))
        self.place_S = ms.Tensor(np.argsort(full).astype(np.int32))

    def places(self, size_QS: Tensor, block_rows: int, rows: int) -> tuple[Tensor, Tensor]:
        """-> row (Q * block_rows, 1): where each row goes, and source (rows,): where each comes from; -1 if empty.

        These are the tables of `Kernels.permute`. `rows` must hold all segments, and be no more than there were.
        """
        rest_Q1 = block_rows - ops.expand_dims(added_up(size_QS, 1), 1)
        size_S = ops.reshape(ops.concat((size_QS, rest_Q1), 1), (-1,))
        size_after_S = ops.gather(size_S, self.order_S, 0)
        shift_S = ops.gather(_starts(size_after_S), self.place_S, 0) - _starts(size_S)
        used = ops.cast(ops.sum(size_QS), ms.int32)
        row_R = _shifted(size_S, shift_S, size_QS.shape[0] * block_rows)
        row_R = ops.select(row_R < used, row_R, ops.full_like(row_R, -1))
        source_R = _shifted(size_after_S, -ops.gather(shift_S, self.order_S, 0), rows)
        source_R = ops.select(numbers(rows) < used, source_R, ops.full_like(source_R, -1))
        return ops.expand_dims(row_R, 1), source_R


def _starts(size_S: Tensor) -> Tensor:
    return ops.cumsum(size_S, 0) - size_S


def _shifted(size_S: Tensor, shift_S: Tensor, rows: int) -> Tensor:
    """Each row's number after its segment's shift: (rows,), at most as many as the segments hold."""
    segment_R = ops.searchsorted(ops.cumsum(size_S, 0), numbers(rows), right=True)
    return numbers(rows) + ops.gather(shift_S, ops.cast(segment_R, ms.int32), 0)


class ChunkedRows:
    """Rows in the order of experts -> rows in the order of chunks, ep ranks, and experts, each chunk with empty rows
    behind it.

    C chunks of n rows each, M = C n rows of all, J experts of a chunk over all ranks.
    """

    def __init__(self, num_experts: int, ep: int, chunks: int, chunk_rows: int) -> None:
        self.chunks, self.chunk_rows = chunks, chunk_rows
        order_E = np.arange(num_experts, dtype=np.int32).reshape(ep, chunks, -1).transpose(1, 0, 2).reshape(-1)
        self.order_E, self.place_E = ms.Tensor(order_E), ms.Tensor(np.argsort(order_E).astype(np.int32))
        # what is behind a chunk comes from before the first row: from nowhere
        self.rest_C1 = ms.Tensor(np.full((chunks, 1), chunks * chunk_rows, np.int32))

    def places(self, expert_TK: Tensor, row_TK: Tensor, source_N: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of `Kernels.permute`, row (T, K) and source (N,), and rows of each expert -> the same with chunks,
        (T, K) and (M,)."""
        C = self.chunks
        size_CJ = ops.reshape(ops.gather(counts_E, self.order_E, 0), (C, -1))
        rest_C1 = self.chunk_rows - ops.expand_dims(added_up(size_CJ, 1), 1)
        size_S = ops.reshape(ops.concat((size_CJ, rest_C1), 1), (-1,))
        start_CJ = ops.reshape(_starts(size_S), (C, -1))[:, :-1]
        shift_E = ops.gather(ops.reshape(start_CJ, (-1,)), self.place_E, 0) - _starts(counts_E)
        shift_CJ = ops.reshape(ops.gather(shift_E, self.order_E, 0), (C, -1))
        shift_S = ops.reshape(ops.concat((shift_CJ, self.rest_C1), 1), (-1,))
        before_M = _shifted(size_S, -shift_S, C * self.chunk_rows)
        source_M = ops.gather(source_N, ops.maximum(before_M, ops.zeros_like(before_M)), 0)
        source_M = ops.select(before_M >= 0, source_M, ops.full_like(source_M, -1))
        return ops.select(row_TK >= 0, row_TK + ops.gather(shift_E, expert_TK, 0), row_TK), source_M


def moved_back(kernels: Kernels, x_RD: Tensor, row_R1: Tensor, source_R: Tensor) -> Tensor:
    """What `permute` with these tables of `Regrouping` moved, where it was."""
    return kernels.permute(x_RD, ops.expand_dims(source_R, 1), ops.squeeze(row_R1, 1))


class Exchange(Protocol):
    """Between the ranks of an ep group. N rows to send and R to receive are fixed, `size_AA` tells those used."""

    def there(self, x_ND: Tensor, size_AA: Tensor) -> Tensor:
        """Rows in the order of their destinations -> rows in the order of their sources (R, D), then zeros."""

    def back(self, y_RD: Tensor, size_AA: Tensor) -> Tensor:
        """Rows in the order of their sources -> each where it was (N, D), then zeros."""


class NoExchange:
    """Among one rank."""

    def there(self, x_ND: Tensor, size_AA: Tensor) -> Tensor:
        """As they are."""
        return x_ND

    def back(self, y_RD: Tensor, size_AA: Tensor) -> Tensor:
        """As they are."""
        return y_RD


class FlatExchange:
    """One all_to_all_v each way. Payload of a rank: the rows it has for others and itself, the same of their gradient
    on the way back; and the rows that others have for it, on the way there and back."""

    def __init__(
        self, collectives: Collectives, group: Group, send_rows: int, receive_rows: int, wire: RowsWire
    ) -> None:
        self.index = group.index
        self._there = exchange_rows(collectives, group, receive_rows, send_rows, wire)
        self._back = exchange_rows(collectives, group, send_rows, receive_rows, wire)

    def there(self, x_ND: Tensor, size_AA: Tensor) -> Tensor:
        """See Exchange."""
        return self._there(x_ND, size_AA[self.index], size_AA[:, self.index])

    def back(self, y_RD: Tensor, size_AA: Tensor) -> Tensor:
        """See Exchange."""
        return self._back(y_RD, size_AA[:, self.index], size_AA[self.index])


class TwoStepExchange:
    """First inside the node, to the rank with the destination's place there, then across nodes: fewer and larger
    messages leave a node (HetuMoE: Nie et al., 2022, arXiv 2203.14685). Row for row the same as `FlatExchange`; a wire
    of fewer bits rounds in each step what the one before has rounded, which changes next to nothing.

    Shape letters: I ranks inside a node, O nodes; A = O * I, and `inside` and `across` are groups of I and O ranks.
    """

    def __init__(
        self,
        collectives: Collectives,
        kernels: Kernels,
        inside: Group,
        across: Group,
        send_rows: int,
        middle_rows: int,
        receive_rows: int,
        wire: RowsWire,
    ) -> None:
        self.kernels = kernels
        self.I, self.O, self.i, self.o = inside.size, across.size, inside.index, across.index
        self.send_rows, self.middle_rows = send_rows, middle_rows
        self.by_place = Regrouping([o * self.I + i for i in range(self.I) for o in range(self.O)])
        self.by_node = Regrouping([i * self.O + o for o in range(self.O) for i in range(self.I)])
        self._inside_there = exchange_rows(collectives, inside, middle_rows, send_rows, wire)
        self._inside_back = exchange_rows(collectives, inside, send_rows, middle_rows, wire)
        self._across_there = exchange_rows(collectives, across, receive_rows, middle_rows, wire)
        self._across_back = exchange_rows(collectives, across, middle_rows, receive_rows, wire)

    def there(self, x_ND: Tensor, size_AA: Tensor) -> Tensor:
        """See Exchange."""
        own_1A, middle_IO, inside, across = self.sizes(size_AA)
        row_N1, source_N = self.by_place.places(own_1A, self.send_rows, self.send_rows)
        x_ND = self._inside_there(self.kernels.permute(x_ND, row_N1, source_N), *inside)
        row_N1, source_N = self.by_node.places(middle_IO, self.middle_rows, self.middle_rows)
        return self._across_there(self.kernels.permute(x_ND, row_N1, source_N), *across)

    def back(self, y_RD: Tensor, size_AA: Tensor) -> Tensor:
        """See Exchange."""
        own_1A, middle_IO, inside, across = self.sizes(size_AA)
        y_ND = self._across_back(y_RD, across[1], across[0])
        row_N1, source_N = self.by_node.places(middle_IO, self.middle_rows, self.middle_rows)
        y_ND = self._inside_back(moved_back(self.kernels, y_ND, row_N1, source_N), inside[1], inside[0])
        row_N1, source_N = self.by_place.places(own_1A, self.send_rows, self.send_rows)
        return moved_back(self.kernels, y_ND, row_N1, source_N)

    def sizes(self, size_AA: Tensor) -> Any:
        """-> rows by destination (1, A), rows in the middle by source and node of destination (1, I * O), and rows
        sent and received, inside the node (I,) each and across nodes (O,) each."""
        size_OIOI = ops.reshape(size_AA, (self.O, self.I, self.O, self.I))
        own_OI, node_IOI = size_OIOI[self.o, self.i], size_OIOI[self.o]
        middle_IO = node_IOI[:, :, self.i]
        inside = added_up(own_OI, 0), added_up(middle_IO, 1)
        across = added_up(middle_IO, 0), added_up(size_OIOI[:, :, self.o, self.i], 1)
        return ops.reshape(own_OI, (1, -1)), ops.reshape(middle_IO, (1, -1)), inside, across
