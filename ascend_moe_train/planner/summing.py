"""How much memory gradients of a micro-batch take, with what sums them between ranks. Pure."""

from ascend_moe_train.planner.layers import FP32_BYTES
from ascend_moe_train.planner.plan import Job, Plan
from ascend_moe_train.planner.wires import sums_early


def early_bytes(job: Job, plan: Plan, dense: int, expert: int) -> float:
    """Of gradients that are summed during the backward pass, what is sent and the sums: of all but the embedding.
    `dense` and `expert` are parameters of a device."""
    if not sums_early(job, plan):
        return 0.0
    dense -= job.model.vocab_size * job.model.hidden // plan.tp
    found = 0.0
    for parameters, size in ((dense, plan.dp * plan.cp), (expert, plan.edp)):
        if size > 1:
            found += FP32_BYTES * parameters * (1 + (1 / size if plan.zero_stage else 1))
    return found


def reduced_bytes(job: Job, plan: Plan, dense: int, expert: int, of_block: float) -> float:
    """Of a graph on a CPU at the end of a backward pass and after it, in stages 0 to 2: gradients of a micro-batch with
    what one block needs (`of_block`), or what sums them, which gives nothing back between the first copy and the last:
    gradients; in buckets; their sums; these apart. With parts of d ranks the latter two are 1/d, and the updated parts
    are put side by side (1/d), gathered, and taken apart. Sums over several micro-batches, which are there anyway,
    stand for the gradients where the update is a graph of its own. In stage 3 weights are gathered in both passes, and
    gradients laid out by ranks and summed, in the micro-batch's graph."""
    is_apart = plan.pp > 1 or plan.num_micro(job) > 1
    at_end, found = of_block, 0.0
    for parameters, size in ((dense, plan.dp * plan.cp), (expert, plan.edp)):
        of_micro, of_update = 1.0, 0.0
        parts = 1 / size
        if size > 1:
            match plan.zero_stage:
                case 0:
                    of_update = 3.0
                case 1:
                    of_update = 3 + 3 * parts
                case 2:
                    of_micro, of_update = 2 + 2 * parts, 2 + parts
                case 3:
                    of_micro = 4 + parts
        at_end += FP32_BYTES * parameters
        found += FP32_BYTES * parameters * (max(of_micro, of_update) if is_apart else of_micro + of_update)
    return max(at_end, found)
