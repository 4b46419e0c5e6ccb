"""Tensor and sequence parallelism: the model's own cells on a slice of heads, width and vocabulary.

Each rank of a tp group holds some heads, some columns of every dense and shared feed-forward and some rows of the
vocabulary (Shoeybi et al., 2019, section 3). Without sequence parallelism the residual stream is whole on every rank,
and so are its gradients; with it, it is split by tokens, and gathered where heads and columns need all of them
(Korthikanti et al., 2022, section 4.2.2). Experts are not cut by tp: each rank of a tp group brings tokens of its own
to them, and the shared experts, which are cut, gather those.

Shape letters: see model/kernels/protocol.py.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import mindspore as ms
from mindspore import ops

from ascend_moe_train.model.attention import Attention, LatentAttention
from ascend_moe_train.model.kernels.protocol import Kernels
from ascend_moe_train.model.layers import empty
from ascend_moe_train.model.transformer import Block, Transformer
from ascend_moe_train.parallel import autodiff
from ascend_moe_train.parallel.comm import Collectives, Group
from ascend_moe_train.parallel.shards import Placement

Tensor = Any
Form = Callable[[Collectives, Group], Any]

# The sizes that a cell reads besides its weights: how many ranks' worth of heads becomes one's.
SIZES: Mapping[type, tuple[str, ...]] = MappingProxyType(
    {Attention: ("num_heads", "num_kv_heads", "q_size", "kv_size"), LatentAttention: ("num_heads",)}
)

# Port: what stands there with the residual stream whole on every rank, and with it split by tokens.
_ENTER, _LEAVE = (autodiff.copy, autodiff.gather_sum), (autodiff.reduce, autodiff.scatter_sum)
IN_BLOCK: Mapping[str, tuple[Form, Form]] = MappingProxyType({"before_attn": _ENTER, "after_attn": _LEAVE})
AROUND_DENSE: Mapping[str, tuple[Form, Form]] = MappingProxyType({"before_ffn": _ENTER, "after_ffn": _LEAVE})
AROUND_EXPERTS: Mapping[str, tuple[Form | None, Form | None]] = MappingProxyType(
    {"before_ffn": (autodiff.split, None), "after_ffn": (autodiff.gather, None)}
)
AROUND_SHARED: Mapping[str, tuple[Form, Form]] = MappingProxyType(
    {
        "before_shared": (autodiff.gather_sum, autodiff.gather_sum),
        "after_shared": (autodiff.scatter_sum, autodiff.scatter_sum),
    }
)
IN_MODEL: Mapping[str, tuple[Form, Form]] = MappingProxyType({"after_embed": _LEAVE, "before_head": _ENTER})


def apply_tensor(model: Transformer, group: Group, collectives: Collectives, *, by_tokens: bool) -> None:
    """Makes a model that of one rank of a tp group. Its weights are cut elsewhere; `by_tokens` is sequence parallelism.

    Two branches of the graph that both hold collectives are put in order here too, also where tp is 1: others than
    those of tp may be in them.
    """
    _put_in_order(model)
    if group.size == 1:
        return
    made: dict[Form, Any] = {}

    def put(cell: Any, ports: Mapping[str, tuple[Form | None, Form | None]]) -> None:
        for port, forms in ports.items():
            form = forms[by_tokens]
            if form is not None:
                if form not in made:
                    made[form] = form(collectives, group)
                setattr(cell, port, made[form])

    put(model, IN_MODEL)
    after_embed: Any = model.after_embed
    model.after_embed_back = after_embed.backward
    for block in blocks(model):
        for attribute in SIZES[type(block.attn)]:
            # heads of keys and values that are fewer than ranks are held by several
            whole = block.attn.head_size if attribute == "kv_size" else 1
            setattr(block.attn, attribute, max(whole, getattr(block.attn, attribute) // group.size))
        put(block, IN_BLOCK)
        if not block.is_moe:
            put(block, AROUND_DENSE)
            continue
        put(block, AROUND_EXPERTS)
        if block.moe.has_shared:
            put(block.moe, AROUND_SHARED)
    head: Any = model
    head.embed.kernels = _VocabularyRows(model.embed.kernels, group)
    head.kernels = _VocabularyLoss(model.kernels, group, collectives)


def cut_weights(model: Transformer, placed: Mapping[str, Placement]) -> None:
    """Gives every cell parameters of the shapes that this rank holds, zero until they are filled."""
    cells = dict(model.cells_and_names())
    for name, parameter in [*model.weights(), *model.buffers()]:
        local_shape = placed[name].local_shape
        if local_shape == tuple(parameter.shape):
            continue
        place, _, attribute = name.rpartition(".")
        if placed[name].local_size:
            own = empty(*local_shape, is_trained=parameter.requires_grad)
            own.name = name  # a parameter set from outside has none of its own otherwise
            setattr(cells[place], attribute, own)
        else:
            delattr(cells[place], attribute)
            setattr(cells[place], f"has_{attribute}", False)


def blocks(model: Transformer) -> Iterator[Block]:
    """All decoder blocks, those of multi-token prediction last."""
    yield from model.layers
    if model.has_mtp:
        yield from (module.block for module in model.mtp)


def _put_in_order(model: Transformer) -> None:
    in_order = autodiff.InOrder()
    model.in_order = in_order
    for block in blocks(model):
        if isinstance(block.attn, LatentAttention):
            block.attn.in_order = in_order
        if block.is_moe:
            block.moe.in_order = in_order


class _VocabularyRows:
    """Kernels of an embedding that holds some rows of the vocabulary: what is elsewhere comes out as zero."""

    def __init__(self, base: Kernels, group: Group) -> None:
        self.base, self.index = base, group.index

    def embed(self, token_T: Tensor, w_VD: Tensor) -> Tensor:
        """See Kernels."""
        size = w_VD.shape[0]
        row_T = token_T - self.index * size
        is_here_T = ops.logical_and(row_T >= 0, row_T < size)
        x_TD = self.base.embed(ops.select(is_here_T, row_T, ops.zeros_like(row_T)), w_VD)
        # products and sums of tensors of two shapes keep 16 bytes for each element on CPUs, as long as the graph lives
        return x_TD * ops.broadcast_to(ops.expand_dims(ops.cast(is_here_T, x_TD.dtype), 1), x_TD.shape)


class _VocabularyLoss:
    """Kernels of a head that holds some rows of the vocabulary. No rank has all logits: their maximum, the sum of their
    exponentials and the target's logit are reduced, one number for each token (Shoeybi et al., 2019, section 3)."""

    def __init__(self, base: Kernels, group: Group, collectives: Collectives) -> None:
        self.base, self.index = base, group.index
        group = group.carrying("figures")
        self.maximum = collectives.all_reduce(group, "max")
        self.sum = autodiff.reduce(collectives, group)

    def matmul(self, x_TD: Tensor, w_FD: Tensor) -> Tensor:
        """See Kernels."""
        return self.base.matmul(x_TD, w_FD)

    def cross_entropy(self, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        """See Kernels; the logits are those of this rank's rows."""
        logits_TV = ops.cast(logits_TV, ms.float32)
        size = logits_TV.shape[1]
        row_T = target_T - self.index * size
        is_here_T = ops.logical_and(row_T >= 0, row_T < size)
        row_T1 = ops.expand_dims(ops.select(is_here_T, row_T, ops.zeros_like(row_T)), 1)
        top_T = self.maximum(ops.stop_gradient(ops.amax(logits_TV, 1)))
        shifted_TV = logits_TV - ops.broadcast_to(ops.expand_dims(ops.stop_gradient(top_T), 1), logits_TV.shape)
        picked_T = ops.squeeze(ops.gather_elements(shifted_TV, 1, row_T1), 1) * ops.cast(is_here_T, ms.float32)
        sums_2T = self.sum(ops.stack((ops.sum(ops.exp(shifted_TV), 1), picked_T)))
        return (ops.log(sums_2T[0]) - sums_2T[1]) * ops.cast(target_T >= 0, ms.float32)
