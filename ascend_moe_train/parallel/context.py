"""Context parallelism: the model's own cells on pieces of each sequence.

Attention alone needs the whole sequence. Its cells get kernels that see it, by one of two ways (`parallel.context`);
everything else works on the tokens that are there. What depends on a token's place in the micro-batch is told it (see
`places`). Multi-token prediction reads tokens ahead, which may be another rank's: they are put together for it.

Shape letters: see model/kernels/protocol.py; S places of one rank, A all places of a sequence, N ranks of a cp group.
"""

from collections.abc import Callable
from math import prod
from typing import Any, Literal

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops import constexpr
from numpy.typing import NDArray

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.transformer import Transformer, ahead
from ascend_moe_train.parallel import autodiff
from ascend_moe_train.parallel.comm import Collectives, Group, Tensor
from ascend_moe_train.parallel.mesh import Mesh
from ascend_moe_train.parallel.places import own_places
from ascend_moe_train.parallel.ring import Ring
from ascend_moe_train.parallel.tensor import blocks

# the primitive: ops.gather is a graph of its own, which MindSpore may lose in a bprop
_rows_of = ops.Gather()


def apply_context(model: Transformer, mesh: Mesh, config: RunConfig, collectives: Collectives) -> None:
    """Makes a model that of one rank of a cp group, which is given what `places.own_part` leaves of each batch.

    Nothing to do with cp 1. After `apply_tensor`: heads that are shared out are those of one tp rank.
    """
    if mesh.cp == 1:
        return
    group = collectives.split("cp", mesh.groups(("cp",))).carrying("keys and values")
    seq_len, made = config.data.seq_len, {}
    for block in blocks(model):
        attn: Any = block.attn
        options = getattr(attn, "window", None), getattr(attn, "has_sinks", False)
        if options not in made:
            made[options] = context_kernels(
                config.parallel.context,
                attn.kernels,
                collectives,
                group,
                seq_len=seq_len,
                window=options[0],
                has_sinks=options[1],
            )
        attn.kernels = made[options]
    whole: Any = model
    whole.ahead = _ahead_in_whole_sequences(SequenceOrder(collectives, group, seq_len))


def context_kernels(
    form: Literal["ring", "ulysses"],
    base: Kernels,
    collectives: Collectives,
    group: Group,
    *,
    seq_len: int,
    window: int | None,
    has_sinks: bool,
) -> "RingKernels | UlyssesKernels":
    """Those of an attention cell, on the places of a sequence that one rank of the group has.

    Their segments are the places where documents start.
    """
    if form == "ulysses":
        return UlyssesKernels(base, collectives, group, seq_len)
    return RingKernels(base, Ring(base, collectives, group, seq_len=seq_len, window=window, has_sinks=has_sinks))


class _Taken(nn.Cell):
    """Some order of the rows of dim 1, each of them once."""

    def __init__(self, order: Any) -> None:
        super().__init__()
        self.order, self.inverse = ms.Tensor(order), ms.Tensor(np.argsort(order).astype(np.int32))

    def construct(self, x: Tensor) -> Tensor:
        return _rows_of(x, self.order, 1)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (_rows_of(dout, self.inverse, 1),)


@constexpr
def _order(sizes: tuple[int, ...], dims: tuple[int, ...]) -> Tensor:
    """Of a table of rows, whose dims come in another order: which row comes first, second ..."""
    return ms.Tensor(_numbered(sizes, dims))


@constexpr
def _order_back(sizes: tuple[int, ...], dims: tuple[int, ...]) -> Tensor:
    """The same of the way back."""
    return ms.Tensor(np.argsort(_numbered(sizes, dims)).astype(np.int32))


def _numbered(sizes: tuple[int, ...], dims: tuple[int, ...]) -> NDArray[np.int32]:
    return np.arange(prod(sizes), dtype=np.int32).reshape(sizes).transpose(dims).reshape(-1)


class _Reordered(nn.Cell):
    """Rows in some order, each of them once, with the order of the way back."""

    def construct(self, x_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
        return _rows_of(x_RD, order_R, 0)

    def bprop(self, x_RD: Tensor, order_R: Tensor, back_R: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        return _rows_of(dout, back_R, 0), autodiff.zeros_like(order_R), autodiff.zeros_like(back_R)


class Swapped:
    """`ops.transpose` of dims of which the last does not move. On CPUs MindSpore 2.10 keeps 8 bytes for each element of
    every operator that transposes, for as long as its graph lives, and nothing where rows are gathered."""

    def __init__(self, *dims: int) -> None:
        self.dims = dims
        self.reordered = _Reordered()

    def __call__(self, x: Tensor) -> Tensor:
        sizes = x.shape[:-1]
        order_R, back_R = _order(sizes, self.dims), _order_back(sizes, self.dims)
        y_RD = self.reordered(ops.reshape(x, (-1, x.shape[-1])), order_R, back_R)
        return ops.reshape(y_RD, (*[sizes[dim] for dim in self.dims], x.shape[-1]))


class SequenceOrder:
    """Between pieces by rank, (N, B, S, ...), and sequences, (B, A, ...)."""

    def __init__(self, collectives: Collectives, group: Group, seq_len: int) -> None:
        self.size = group.size
        places = [own_places(seq_len, group.size, index) for index in range(group.size)]
        by_rank_A = np.concatenate(places)
        self.into_order = _Taken(np.argsort(by_rank_A).astype(np.int32))
        self.by_rank = _Taken(by_rank_A)
        self.own_S = ms.Tensor(places[group.index])
        self.swapped = Swapped(1, 0)
        self.gather = collectives.all_gather(group.carrying("figures"))

    def joined(self, x_NBS: Tensor) -> Tensor:
        """(N, B, S, D) -> (B, A, D)."""
        N, B, S, D = x_NBS.shape
        x_BNZ = self.swapped(ops.reshape(x_NBS, (N, B, S * D)))
        return self.into_order(ops.reshape(x_BNZ, (B, N * S, D)))

    def parted(self, x_BA: Tensor) -> Tensor:
        """(B, A, D) -> (N, B, S, D)."""
        B, A, D = x_BA.shape
        x_NBZ = self.swapped(ops.reshape(self.by_rank(x_BA), (B, self.size, A // self.size * D)))
        return ops.reshape(x_NBZ, (self.size, B, A // self.size, D))

    def whole(self, x_BS: Tensor) -> Tensor:
        """What all ranks have: (B, S) -> (B, A). No gradient. Payload: one all_gather of x over the N ranks."""
        B, S = x_BS.shape
        x_NBS1 = ops.reshape(ops.stop_gradient(self.gather(x_BS)), (self.size, B, S, 1))
        return ops.squeeze(self.joined(x_NBS1), 2)

    def own(self, x_BA: Tensor) -> Tensor:
        """This rank's places: (B, A) -> (B, S)."""
        return _rows_of(x_BA, self.own_S, 1)


class _Wrapped:
    """Kernels of an attention cell; what is not replaced is left to `base`."""

    def __init__(self, base: Kernels) -> None:
        self.base = base

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """See Kernels."""
        return self.base.split(x, sizes)

    def rope(self, x_BSHZ: Tensor, cos_BSZ: Tensor, sin_BSZ: Tensor) -> Tensor:
        """See Kernels."""
        return self.base.rope(x_BSHZ, cos_BSZ, sin_BSZ)


class RingKernels(_Wrapped):
    """Keys and values go around a ring of ranks."""

    def __init__(self, base: Kernels, ring: Ring) -> None:
        super().__init__(base)
        self.ring, self.no_sink = ring, ms.Tensor(np.zeros(1, np.float32))

    def attention(
        self,
        q_BSHZ: Tensor,
        k_BSGZ: Tensor,
        v_BSGY: Tensor,
        segment_BS: Tensor,
        window: int | None = None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """See Kernels; segments are the places where documents start. Window and sinks are those the ring is made
        for."""
        return self.ring(q_BSHZ, k_BSGZ, v_BSGY, segment_BS, self.no_sink if sink_H is None else sink_H)[0]


class UlyssesKernels(_Wrapped):
    """Ranks exchange their places of all heads for all places of some heads (Jacobs et al., 2023, arXiv 2309.14509).

    Payload of a rank in bytes, forward and backward: all_to_all of twice q, k, v and output of its places, where keys
    and values of fewer heads than ranks count once for each rank, and one all_gather of 4 * B * S.
    """

    def __init__(self, base: Kernels, collectives: Collectives, group: Group, seq_len: int) -> None:
        super().__init__(base)
        self.size, self.index, self.order = group.size, group.index, SequenceOrder(collectives, group, seq_len)
        self.exchange = autodiff.exchange(collectives, group)
        self.rank_first, self.rank_last = Swapped(2, 0, 1), Swapped(1, 2, 0)

    def attention(
        self,
        q_BSHZ: Tensor,
        k_BSGZ: Tensor,
        v_BSGY: Tensor,
        segment_BS: Tensor,
        window: int | None = None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """See Kernels."""
        N = self.size
        B, S, H, Z = q_BSHZ.shape
        h, Y = H // N, v_BSGY.shape[3]
        k, v = self.repeated(k_BSGZ), self.repeated(v_BSGY)
        g = k.shape[2] // N
        sizes = (h * Z, g * Z, g * Y)
        x_NBS = ops.concat((self.by_heads(q_BSHZ), self.by_heads(k), self.by_heads(v)), 3)
        segment_BA = self.order.whole(ops.depend(segment_BS, x_NBS))
        x_BA = self.order.joined(self.exchange(ops.depend(x_NBS, segment_BA)))
        q, k, v = self.base.split(x_BA, sizes)
        q, k, v = (
            ops.reshape(q, (B, N * S, h, Z)),
            ops.reshape(k, (B, N * S, g, Z)),
            ops.reshape(v, (B, N * S, g, Y)),
        )
        if sink_H is not None:
            sink_H = sink_H[self.index * h : (self.index + 1) * h]
        o = self.base.attention(q, k, v, segment_BA, window, sink_H)
        o_NBS = self.exchange(self.order.parted(ops.reshape(o, (B, N * S, h * Y))))
        return ops.reshape(self.rank_last(o_NBS), (B, S, H, Y))

    def repeated(self, x_BSGZ: Tensor) -> Tensor:
        """Heads that are fewer than ranks, so that each rank gets one: those that its queries read."""
        B, S, G, Z = x_BSGZ.shape
        if self.size <= G:
            return x_BSGZ
        times = self.size // G
        return ops.reshape(ops.broadcast_to(ops.expand_dims(x_BSGZ, 3), (B, S, G, times, Z)), (B, S, G * times, Z))

    def by_heads(self, x_BSHZ: Tensor) -> Tensor:
        """Each rank's heads: (B, S, H, Z) -> (N, B, S, H / N * Z)."""
        B, S, H, Z = x_BSHZ.shape
        h = H // self.size
        return self.rank_first(ops.reshape(x_BSHZ, (B, S, self.size, h * Z)))


def _ahead_in_whole_sequences(order: SequenceOrder) -> Callable[..., list[tuple[Tensor, Tensor]]]:
    """`transformer.ahead` where the tokens that follow may be on other ranks. Payload: one all_gather of 12 * B * S."""

    def own_ahead(tokens_BS: Tensor, targets_BS: Tensor, segment_BS: Tensor, depth: int) -> list[tuple[Tensor, Tensor]]:
        B = tokens_BS.shape[0]
        whole = order.whole(ops.concat((tokens_BS, targets_BS, segment_BS), 0))
        found = ahead(whole[:B], whole[B : 2 * B], whole[2 * B :], depth)
        return [(order.own(next_BS), order.own(target_BS)) for next_BS, target_BS in found]

    return own_ahead
