"""How much memory a compiled graph takes on a CPU. Pure.

MindSpore 2.10 keeps about a third of it in use; the rest is free again after compiling, in pieces smaller than a page,
which the system does not get back. Measured on the demo's model with 1, 2 and 4 layers and 64 tokens in a sequence, as
what a process has beyond its tensors and what it had before it built a model (docs/log.md, 2026-11-30).
"""

from ascend_moe_train.planner.layers import ROUTED_AXES
from ascend_moe_train.planner.plan import Plan

LAYER_BYTES = 20e6  # forward and backward
AGAIN_BYTES = 36e6  # what going forward again adds to a layer
COLLECTIVES_BYTES = 50e6  # what the first collectives of a graph bring
# what collectives and what stands around them add to a layer
DATA_BYTES, SEQUENCE_BYTES, CONTEXT_BYTES, EXPERT_BYTES = 4e6, 3e6, 15e6, 24e6


def graph_bytes(plan: Plan, layers: int, recomputed: int) -> float:
    """Of the graphs of a stage with some layers, of which some may be recomputed. Stages of a pipeline have graphs of
    their own for each direction."""
    of_layer = LAYER_BYTES * (2 if plan.pp > 1 else 1)
    added = (
        DATA_BYTES * (plan.dp * plan.cp > 1)
        + SEQUENCE_BYTES * (plan.tp > 1 and plan.sequence_parallel)
        + CONTEXT_BYTES * (plan.cp > 1)
        + EXPERT_BYTES * any(getattr(plan, axis) > 1 for axis in ROUTED_AXES)
    )
    again = recomputed * AGAIN_BYTES if plan.recompute == "full" and plan.pp == 1 else 0.0
    return layers * (of_layer + added) + again + COLLECTIVES_BYTES * (added > 0 or plan.tp > 1)
