"""How much memory gradients of a micro-batch take, with what sums them between ranks. Pure."""

from ascend_moe_train.planner.layers import FP32_BYTES
from ascend_moe_train.planner.plan import Job, Plan
from ascend_moe_train.planner.wires import sums_early

COPIES = (1.0, 2.2, 2.2, 1.6)  # of what is summed over ranks, by ZeRO stage


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


def reduced_bytes(plan: Plan, dense: int, expert: int, of_block: float) -> float:
    """Of a graph on a CPU at the end of a backward pass: gradients of a micro-batch with what one block needs
    (`of_block`), instead of what was kept for it."""
    parts = 1 / plan.dp / plan.cp if plan.zero_stage == 3 else 1.0
    own = 1 / plan.edp if plan.zero_stage == 3 else 1.0
    return of_block + FP32_BYTES * (dense * parts + expert * own)


def summed_bytes(job: Job, plan: Plan, dense: int, expert: int) -> float:
    """What sums gradients over ranks on a CPU, beside the tensors of a micro-batch: a bucket, and copies of what is
    summed: the sums; with parts of each rank also the parts, their update, and what is gathered of it; in stage 3
    gathered weights instead. Sums over several micro-batches, which are there anyway, stand for the sums over ranks.
    Shares of copies measured as those of cpu_graph.py."""
    is_apart = plan.pp > 1 or plan.num_micro(job) > 1
    found = summed = 0.0
    for parameters, size in ((dense, plan.dp * plan.cp), (expert, plan.edp)):
        if size > 1:
            summed += FP32_BYTES * parameters
            found += FP32_BYTES * parameters * (COPIES[plan.zero_stage] - (is_apart and plan.zero_stage < 3))
    return found + min(plan.techniques.bucket_bytes, summed)
