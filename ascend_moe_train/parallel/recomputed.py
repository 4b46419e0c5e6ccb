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


def runs_again(config: RunConfig, layer: int) -> bool:
    """Whether a block runs again as a whole before its backward pass. Those of multi-token prediction do not: their
    backward pass is the first and follows their forward pass, so that nothing would be gained."""
    return config.recompute.policy == "full" and layer < config.model.num_layers and is_recomputed(config, layer)
