"""Where in the backward pass gradients are handed over to be summed early.

A weight's gradient is in its bucket before the gradient of what it was multiplied with goes on to the layers before.
Full buckets are sent on their way at places that all gradients of the stream come by, two in each block and one before
the head: what is before them in the graph is the same on all ranks, and so is the order among other collectives.

Shape letters: see model/kernels/protocol.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mindspore import nn, ops

from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.parallel.buckets import Share
from ascend_moe_train.parallel.comm import Operator, Tensor
from ascend_moe_train.parallel.early import EarlySums
from ascend_moe_train.parallel.gather import gathered


class _Meeting(nn.Cell):
    """A weight meets what it is multiplied with: (x, w) -> the same. Backward, the gradient of w is in its bucket
    before that of x goes on."""

    def __init__(self, put: Operator) -> None:
        super().__init__()
        self.put = put

    def construct(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x, w

    def bprop(self, x: Tensor, w: Tensor, out: Any, dout: Any) -> tuple[Tensor, Tensor]:
        token = self.put(dout[1])
        return ops.depend(dout[0], token), ops.depend(dout[1], token)


class _Place(nn.Cell):
    """x -> what `port` makes of it. Backward, full buckets are on their way before the gradient of that goes on."""

    def __init__(self, port: Operator, begin: Operator) -> None:
        super().__init__()
        self.port, self.at = port, _Beginning(begin)

    def construct(self, x: Tensor) -> Tensor:
        return self.at(self.port(x))


class _Beginning(nn.Cell):
    def __init__(self, begin: Operator) -> None:
        super().__init__()
        self.begin = begin

    def construct(self, x: Tensor) -> Tensor:
        return x

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (ops.depend(dout, self.begin(dout)),)


class MeetingKernels:
    """Those of one cell, all of whose weights are in early buckets; all else is left to `base`."""

    def __init__(self, base: Kernels, meetings: Sequence[nn.Cell], shapes: Sequence[tuple[int, ...]]) -> None:
        self.base = base
        self.first, self.last, self.first_shape = meetings[0], meetings[-1], tuple(shapes[0])

    def __getattr__(self, name: str) -> Any:
        if name == "base":  # not set yet, while a copy is being made
            raise AttributeError(name)
        return getattr(self.base, name)

    def matmul(self, x_TD: Tensor, w_FD: Tensor) -> Tensor:
        """See Kernels."""
        x_TD, w_FD = self.first(x_TD, w_FD)
        return self.base.matmul(x_TD, w_FD)

    def swiglu_matmul(self, h_TF: Tensor, w_DF: Tensor) -> Tensor:
        """See Kernels."""
        h_TF, w_DF = self.first(h_TF, w_DF)
        return self.base.swiglu_matmul(h_TF, w_DF)

    def grouped_matmul(self, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
        """See Kernels. Two weights of a cell are told apart by their shapes."""
        if w_EDF.shape == self.first_shape:
            x_RD, w_EDF = self.first(x_RD, w_EDF)
        else:
            x_RD, w_EDF = self.last(x_RD, w_EDF)
        return self.base.grouped_matmul(x_RD, w_EDF, counts_E)

    def swiglu_grouped_matmul(
        self, h_RF: Tensor, w_EFD: Tensor, counts_E: Tensor, clamp: tuple[float, float] | None
    ) -> Tensor:
        """See Kernels. It is always the last of a cell's weights."""
        h_RF, w_EFD = self.last(h_RF, w_EFD)
        return self.base.swiglu_grouped_matmul(h_RF, w_EFD, counts_E, clamp)


def early_names(model: Transformer, shares: Mapping[str, Share]) -> set[str]:
    """The weights whose gradients can be summed early: those of products in blocks and head that are used once, not
    summed over neighbours, and in no parts that are put together on use."""
    found = set()
    for names in _by_cell(model).values():
        own = [shares[name] for name in names]
        if all(s.is_trained and s.group.size > 1 and s.form != "on_use" and s.neighbours is None for s in own):
            found |= set(names)
    return found


def start_early(model: Transformer, early: EarlySums) -> None:
    """Tells the cells of a model to hand over their gradients as they come."""
    cells = dict(model.cells_and_names())
    weights = dict(model.weights())
    for place, names in _by_cell(model).items():
        if early.names.issuperset(names):
            meetings = [_Meeting(early.putting(name)) for name in names]
            cells[place].kernels = MeetingKernels(
                cells[place].kernels, meetings, [weights[name].shape for name in names]
            )
    if not model.has_mtp:  # with it, the head is used more than once
        model.before_head = _Place(model.before_head, early.beginning())
    for block in model.layers:
        block.before_attn = _Place(block.before_attn, early.beginning())
        block.before_ffn = _Place(block.before_ffn, early.beginning())


def _by_cell(model: Transformer) -> dict[str, list[str]]:
    """The names of weights of products that are used once in a pass, by the place of their cell."""
    found: dict[str, list[str]] = {}
    for place, _, attribute in gathered(model):
        is_head = place == "head" and not (model.tie_embeddings or model.has_mtp)
        if place.startswith("layers.") or is_head:
            found.setdefault(place, []).append(f"{place}.{attribute}")
    return found
