"""What the backward pass of a model computes again."""

from typing import Any

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.experts import GroupedExperts
from ascend_moe_train.model.kernels.recomputing import RecomputingKernels
from ascend_moe_train.model.layers import FeedForward
from ascend_moe_train.model.transformer import Block, Transformer
from ascend_moe_train.parallel.recomputed import is_recomputed, runs_again
from ascend_moe_train.parallel.tensor import blocks


def apply_recompute(model: Transformer, config: RunConfig) -> None:
    """Does what section `recompute` says, on one process too. Kernels of cells must be final, but for those that put
    weights together when they are used, which come after."""
    for layer, block in enumerate(blocks(model)):
        block.is_recomputed = runs_again(config, layer)
        if config.recompute.policy == "selective" and is_recomputed(config, layer):
            _recompute_activations(block)


def _recompute_activations(block: Block) -> None:
    for _, cell in block.cells_and_names():
        if isinstance(cell, FeedForward | GroupedExperts):
            multiplies: Any = cell.w2 if isinstance(cell, FeedForward) else cell
            multiplies.kernels = RecomputingKernels(multiplies.kernels)
