"""Weights that are put together from their parts when they are used, and again in the backward pass (ZeRO stage 3).

Cells of the model keep their code: a cell's weight becomes this rank's flat part of it, and its kernels become ones
that put the whole together first. Shape letters: see model/kernels/protocol.py; P elements of a flat part.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mindspore import nn, ops

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.experts import GroupedExperts
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.layers import Embedding, Linear, empty
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.parallel.buckets import Share, is_repeated
from ascend_moe_train.parallel.comm import Collectives, Tensor, Wire
from ascend_moe_train.parallel.contents import gradients_in
from ascend_moe_train.parallel.reduction import Late
from ascend_moe_train.parallel.scaled import summing
from ascend_moe_train.parallel.sharing import uses_of
from ascend_moe_train.parallel.zero_costs import Uses

# primitives: ops.zeros_like and ops.concat are graphs of their own, which MindSpore loses where a gradient is taken
# inside another
zeros_like, join = ops.ZerosLike(), ops.Concat(0)

# The weights that can be in parts only, by the cell that uses them.
GATHERED: Mapping[type, tuple[str, ...]] = MappingProxyType(
    {Linear: ("weight",), Embedding: ("weight",), GroupedExperts: ("w13", "w2")}
)


class _Weight:
    """A weight between its shape and this rank's flat part (P,)."""

    def __init__(self, share: Share, collectives: Collectives, wire: Wire | None) -> None:
        self.shape, self.size, self.part = share.shape, share.size, share.part
        self.num_zeros = share.part * share.group.size - share.size
        self.is_trained, self.is_repeated = share.is_trained, is_repeated(share)
        self.gather, self.late = collectives.all_gather(share.group.carrying("weights")), Late()
        group = share.group.carrying(gradients_in(wire))
        self.scatter = summing(collectives, group, collectives.reduce_scatter(group, wire), wire)
        if share.neighbours is not None:
            self.alone = share.size - share.num_repeated
            neighbours = share.neighbours.carrying(gradients_in(wire))
            call = collectives.all_reduce(neighbours, wire=wire)
            self.sum_over_neighbours = summing(collectives, neighbours, call, wire)

    def whole(self, part_P: Tensor, after: Tensor) -> Tensor:
        """Put together, once `after` is there."""
        flat = self.gather(self.late.value(after, part_P))
        return ops.reshape(flat[: self.size] if self.num_zeros > 0 else flat, self.shape)

    def own(self, gradient: Tensor, after: Tensor) -> Tensor:
        """This rank's part of the summed gradient: (P,)."""
        flat = ops.depend(ops.reshape(gradient, (-1,)), after)
        if self.is_repeated:
            flat = join((flat[: self.alone], self.sum_over_neighbours(flat[self.alone :])))
        if self.num_zeros > 0:
            flat = join((flat, zeros_like(flat[: self.num_zeros])))
        return self.scatter(flat)


class _MatMul(nn.Cell):
    """Of x, or with `of_swiglu` of what the activation makes of it."""

    def __init__(self, weight: _Weight, kernels: Kernels, *, of_swiglu: bool = False) -> None:
        super().__init__()
        self.weight, self.kernels, self.of_swiglu = weight, kernels, of_swiglu
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def product(self, x_TD: Tensor, w_FD: Tensor) -> Tensor:
        return self.kernels.swiglu_matmul(x_TD, w_FD) if self.of_swiglu else self.kernels.matmul(x_TD, w_FD)

    def construct(self, x_TD: Tensor, part_P: Tensor) -> Tensor:
        return self.product(x_TD, self.weight.whole(part_P, x_TD))

    def bprop(self, x_TD: Tensor, part_P: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        # two collectives of one backward pass have no order but that of what they depend on
        dout = ops.depend(dout, out)
        w_FD = self.weight.whole(part_P, dout)
        dx_TD, dw_FD = self.gradient(self.product)(x_TD, w_FD, dout)
        if not self.weight.is_trained:
            return dx_TD, zeros_like(part_P)
        dpart_P = self.weight.own(dw_FD, w_FD)
        return ops.depend(dx_TD, dpart_P), dpart_P


class _GroupedMatMul(nn.Cell):
    """The same of rows in the order of experts."""

    def __init__(self, weight: _Weight, kernels: Kernels, *, of_swiglu: bool = False) -> None:
        super().__init__()
        self.weight, self.kernels, self.of_swiglu = weight, kernels, of_swiglu
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def product(self, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor, clamp: Any) -> Tensor:
        if self.of_swiglu:
            return self.kernels.swiglu_grouped_matmul(x_RD, w_EDF, counts_E, clamp)
        return self.kernels.grouped_matmul(x_RD, w_EDF, counts_E)

    def construct(self, x_RD: Tensor, part_P: Tensor, counts_E: Tensor, clamp: Any) -> Tensor:
        return self.product(x_RD, self.weight.whole(part_P, x_RD), counts_E, clamp)

    def bprop(
        self, x_RD: Tensor, part_P: Tensor, counts_E: Tensor, clamp: Any, out: Tensor, dout: Tensor
    ) -> tuple[Any, ...]:
        dout = ops.depend(dout, out)
        w_EDF = self.weight.whole(part_P, dout)
        dx_RD, dw_EDF = self.gradient(self.product)(x_RD, w_EDF, counts_E, clamp, dout)[:2]
        dcounts_E = zeros_like(counts_E)
        if not self.weight.is_trained:
            return dx_RD, zeros_like(part_P), dcounts_E, clamp
        dpart_P = self.weight.own(dw_EDF, w_EDF)
        return ops.depend(dx_RD, dpart_P), dpart_P, dcounts_E, clamp


class _Embed(nn.Cell):
    """The gradient of an embedding does not depend on its weight: nothing is put together for it. Nor does it wait for
    the output, since a pass backward alone would make that again: what comes to it has been through the blocks behind,
    and so comes last by itself."""

    def __init__(self, weight: _Weight, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self.kernels = weight, kernels
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def rows(self, token_T: Tensor, w_VD: Tensor) -> Tensor:
        return self.kernels.embed(token_T, w_VD)

    def construct(self, token_T: Tensor, part_P: Tensor) -> Tensor:
        return self.rows(token_T, self.weight.whole(part_P, token_T))

    def bprop(self, token_T: Tensor, part_P: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        # a constant of this shape would stay in memory
        like_VD = ops.broadcast_to(ops.reshape(part_P[:1], (1, 1)), self.weight.shape)
        dtoken_T, dw_VD = self.gradient(self.rows)(token_T, like_VD, dout)
        if not self.weight.is_trained:
            return dtoken_T, zeros_like(part_P)
        return dtoken_T, self.weight.own(dw_VD, dout)


class GatheringKernels:
    """Those of one cell, whose weights may be flat parts; what is no flat part, and all else, is left to `base`.

    The backward pass has a product's input alone, so that of an activation in front of it nothing is kept."""

    def __init__(self, base: Kernels, weights: Sequence[_Weight]) -> None:
        self.base = base
        first, last = weights[0], weights[-1]
        self.first_part = first.part
        self.of_matmul, self.of_embed = _MatMul(first, base), _Embed(first, base)
        self.of_swiglu = _MatMul(first, base, of_swiglu=True)
        self.of_first, self.of_last = _GroupedMatMul(first, base), _GroupedMatMul(last, base)
        self.of_last_swiglu = _GroupedMatMul(last, base, of_swiglu=True)

    def __getattr__(self, name: str) -> Any:
        if name == "base":  # not set yet, while a copy is being made
            raise AttributeError(name)
        return getattr(self.base, name)

    def matmul(self, x_TD: Tensor, w_FD: Tensor) -> Tensor:
        """See Kernels."""
        return self.of_matmul(x_TD, w_FD) if w_FD.ndim == 1 else self.base.matmul(x_TD, w_FD)

    def embed(self, token_T: Tensor, w_VD: Tensor) -> Tensor:
        """See Kernels."""
        return self.of_embed(token_T, w_VD)

    def grouped_matmul(self, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
        """See Kernels. Two weights of a cell are told apart by the size of their parts."""
        if w_EDF.ndim > 1:
            return self.base.grouped_matmul(x_RD, w_EDF, counts_E)
        if w_EDF.shape[0] == self.first_part:
            return self.of_first(x_RD, w_EDF, counts_E, None)
        return self.of_last(x_RD, w_EDF, counts_E, None)

    def swiglu_matmul(self, h_TF: Tensor, w_DF: Tensor) -> Tensor:
        """See Kernels."""
        return self.of_swiglu(h_TF, w_DF) if w_DF.ndim == 1 else self.base.swiglu_matmul(h_TF, w_DF)

    def swiglu_grouped_matmul(
        self, h_RF: Tensor, w_EFD: Tensor, counts_E: Tensor, clamp: tuple[float, float] | None
    ) -> Tensor:
        """See Kernels. It is always the last of a cell's weights."""
        if w_EFD.ndim > 1:
            return self.base.swiglu_grouped_matmul(h_RF, w_EFD, counts_E, clamp)
        return self.of_last_swiglu(h_RF, w_EFD, counts_E, clamp)


def gather_on_use(
    model: Transformer,
    shares: Mapping[str, Share],
    collectives: Collectives,
    wire: Wire | None,
    config: RunConfig,
) -> dict[str, Uses]:
    """Gives the cells of a model parts, zero until they are filled, instead of the weights whose share is `on_use`.

    Branches of the model must be in order before (see `autodiff.InOrder`). Returns how each is used by a micro-batch.
    """
    made: dict[str, _Weight] = {}
    by_cell: dict[str, list[_Weight]] = {}
    cells = dict(model.cells_and_names())
    for place, cell, attribute in list(gathered(model)):
        name = f"{place}.{attribute}"
        share = shares[name]
        if share.form != "on_use":
            continue
        part = empty(share.part, is_trained=share.is_trained)
        part.name = name
        setattr(cell, attribute, part)
        made[name] = _Weight(share, collectives, wire)
        by_cell.setdefault(place, []).append(made[name])
    for place, weights in by_cell.items():
        cells[place].kernels = GatheringKernels(cells[place].kernels, weights)
    if model.tie_embeddings and "embed.weight" in made:
        model.kernels = GatheringKernels(model.kernels, [made["embed.weight"]])
    return {name: uses_of(config, name, is_trained=shares[name].is_trained) for name in made}


def gathered(model: Transformer) -> list[tuple[str, Any, str]]:
    """(place, cell, attribute) of each weight that is here and can be in parts only."""
    return [
        (place, cell, attribute)
        for place, cell in model.cells_and_names()
        for kind, attributes in GATHERED.items()
        if isinstance(cell, kind)
        for attribute in attributes
        if hasattr(cell, attribute)
    ]
