"""Which blocks section `recompute` means. Pure."""

from ascend_moe_train.config import RunConfig
from ascend_moe_train.parallel.stages import stages_of


def is_recomputed(config: RunConfig, layer: int) -> bool:
    """Whether the policy holds for a block: one of the first of the layers that go through a graph together. Those of
    multi-token prediction, numbered on, are among them if all are."""
    policy, wanted = config.recompute.policy, config.recompute.layers
    if policy == "none" or wanted is None:
        return policy != "none"
    return any(first <= layer < min(stop, first + wanted) for first, stop in stages_of(config).bounds)


def keeps_inputs(config: RunConfig, layer: int) -> bool:
    """Whether a pipeline stage keeps a block's input from the forward pass, so that the backward pass does not go
    through the block for it. The last stage's forward pass is part of its backward pass."""
    if config.recompute.kept != "block_inputs" or not runs_again(config, layer):
        return False
    return layer < stages_of(config).bounds[-1][0]


def passes(config: RunConfig, name: str) -> tuple[int, int]:
    """How often a micro-batch goes through the layer of a tensor, or of a prefix of tensors, forward and backward
    (`Stages.passes`); not counted that a block runs again."""
    stages = stages_of(config)
    forward, backward = stages.passes(stages.virtual_stage(name), config.parallel.schedule)
    head, _, rest = name.partition(".")
    layer = int(rest.split(".")[0]) if head == "layers" else 0
    is_kept = head in ("layers", "embed") and keeps_inputs(config, layer)
    return forward - backward * is_kept, backward


def runs_again(config: RunConfig, layer: int) -> bool:
    """Whether a block runs again as a whole before its backward pass. Those of multi-token prediction do not: their
    backward pass is the first and follows their forward pass, so that nothing would be gained."""
    return config.recompute.policy == "full" and layer < config.model.num_layers and is_recomputed(config, layer)
