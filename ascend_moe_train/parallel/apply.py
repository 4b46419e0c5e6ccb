"""The one place that makes a plain model the part of it that one rank trains."""

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.parallel.comm import Collectives
from ascend_moe_train.parallel.context import apply_context
from ascend_moe_train.parallel.expert import apply_expert
from ascend_moe_train.parallel.mesh import Mesh
from ascend_moe_train.parallel.recompute import apply_recompute
from ascend_moe_train.parallel.shards import Placement, placements
from ascend_moe_train.parallel.stages import stages_of
from ascend_moe_train.parallel.tensor import apply_tensor, cut_weights
from ascend_moe_train.parallel.zero import Sharded, apply_zero


def placed_by(config: RunConfig, mesh: Mesh, rank: int) -> dict[str, Placement]:
    """What a rank holds of every weight, adapter and buffer of a run's model."""
    by_tokens, stages = config.parallel.sequence_parallel, stages_of(config)
    return placements(config.model, mesh, rank, sequence_parallel=by_tokens, lora=config.lora, stages=stages)


def parallelize(model: Transformer, mesh: Mesh, config: RunConfig, collectives: Collectives) -> Sharded:
    """Cuts the model for this rank of the mesh and returns what the optimizer, the step and checkpoints see of it.

    The order: weights are cut; heads, width and vocabulary are shared out inside a tp group; attention sees the whole
    sequences of which ranks of a cp group have pieces; tokens find their way to the ranks of their experts; blocks are
    told what to keep for the backward pass; last, gradients and what the optimizer keeps are shared out to the ranks
    that would hold the same. Pipeline stages need nothing else: their weights alone are here. The model's weights are
    still to be filled. Nothing is sent: `zero.check_adds_up` finds out whether the parts of all ranks are the model.
    """
    placed = placed_by(config, mesh, collectives.rank)
    if mesh.world_size > 1:
        cut_weights(model, placed)
        tensor_group = collectives.split("tp", mesh.groups(("tp",))).carrying("activations")
        apply_tensor(model, tensor_group, collectives, by_tokens=config.parallel.sequence_parallel)
        apply_context(model, mesh, config, collectives)
        apply_expert(model, mesh, config, collectives)
    apply_recompute(model, config)
    return apply_zero(model, placed, mesh, config, collectives)
