"""What each device sends in a step, by verb, group and content, and what it remembers of what is lost: the closed forms
of `parallel.traffic` and `parallel.zero_costs`, for a plan. Pure.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod

from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.config import CorpusConfig, DataConfig
from ascend_moe_train.model.counts import moe_layers
from ascend_moe_train.parallel.expert_sizes import expected_nodes
from ascend_moe_train.parallel.mesh import mesh_of, num_micro
from ascend_moe_train.parallel.sharing import zero_plan_of
from ascend_moe_train.parallel.traffic import model_sent
from ascend_moe_train.parallel.zero_costs import Sent, lost_bytes, zero_sent
from ascend_moe_train.planner.layers import ROUTED_AXES
from ascend_moe_train.planner.plan import Job, Plan
from ascend_moe_train.planner.techniques import Techniques
from ascend_moe_train.train.config import BatchConfig, RecomputeConfig, RunConfigPart

SentBytes = Mapping[tuple[str, str, str], float]
DENSE_GROUP = "dp_cp"  # over which compressed sums are made


def run_of(job: Job, plan: Plan) -> RunConfig:
    """A run with such a plan, of data that is not there."""
    precision = "bf16" if job.precision == "fp8" else job.precision
    return RunConfig(
        run=RunConfigPart(dir="unused", steps=1000, precision=precision),
        model=job.model,
        data=DataConfig(train=(CorpusConfig(path="unused"),), tokenizer="unused", seq_len=job.seq_len),
        batch=BatchConfig(global_sequences=job.global_sequences, micro_sequences=plan.micro_sequences),
        parallel=plan.parallel(),
        recompute=RecomputeConfig(policy=plan.recompute, layers=plan.recompute_layers, kept=plan.recompute_kept),
    )


def sent_bytes(job: Job, plan: Plan, *, in_warm_up: bool = False) -> SentBytes:
    """Payload of a device in a step, on average over all, by verb, group and content, where every assignment of a token
    to an expert is accepted, and with `dedup_tokens` all sets of experts are equally likely; `in_warm_up`: before 1-bit
    Adam sends momenta."""
    run = run_of(job, plan)
    mesh = mesh_of(run, plan.num_devices)
    moe, layers = job.model.moe, len(moe_layers(job.model))
    accepted = [job.tokens_per_step * moe.top_k if moe is not None else 0]
    crossing = [0]
    if moe is not None and plan.nodes is not None:
        crossing = [round(job.tokens_per_step * expected_nodes(moe.num_experts, moe.top_k, plan.nodes[1]))]
    of_all = model_sent(run, mesh, accepted * layers, crossing * layers)
    found: dict[tuple[str, str, str], float] = {key: size / mesh.world_size for key, size in of_all.items()}
    of_stage = mesh.world_size // mesh.pp
    for stage in range(mesh.pp):
        zero = zero_plan_of(run, mesh, stage * of_stage)
        sent = zero_sent(zero, num_micro(run.batch, mesh), sends_momenta=not in_warm_up)
        for key, (_, size) in sent.items():
            found[key] = found.get(key, 0.0) + size / mesh.pp
    return found


def moved_bytes(job: Job, plan: Plan, sent: SentBytes) -> SentBytes:
    """Of such payloads what leaves the device, by ring algorithms, or to each other one (see `collectives`), with rows
    for experts spread evenly."""
    inside, across = plan.nodes or (plan.ep, 1)
    sizes = {
        "dp_cp": plan.dp * plan.cp,
        "ends": 2 * plan.dp * plan.cp,
        "kv_heads": max(1, plan.tp // job.model.num_kv_heads),
        " x ".join(ROUTED_AXES): prod(getattr(plan, axis) for axis in ROUTED_AXES),
        "ep inside nodes": inside,
        "ep across nodes": across,
        "world": plan.num_devices,
        **dict.fromkeys(("stage", "dp_cp_tp"), plan.num_devices // plan.pp),
    }
    found = {}
    for (verb, group, content), size_bytes in sent.items():
        n = sizes[group] if group in sizes else getattr(plan, group, 2)
        # a ring of cp ranks passes on all that is put in
        is_whole = verb == "send" or (verb == "all_to_all_v" and group == "cp")
        share = {"all_gather": n - 1, "all_reduce": 2 * (n - 1) / n}.get(verb, (n - 1) / n)
        found[verb, group, content] = size_bytes * (1 if is_whole else share)
    return found


def compressed(job: Job, plan: Plan) -> tuple[Sent, int]:
    """Of a plan that compresses sums of dense gradients: calls and bytes of these on a device in a step, in the phase
    that sends less; and the bytes that it remembers of what was lost. Nothing but the number of devices matters."""
    compress, bucket_bytes = plan.techniques.compress, plan.techniques.bucket_bytes
    return _compressed(job, plan.num_devices, Techniques(compress=compress, bucket_bytes=bucket_bytes))


@lru_cache(maxsize=64)
def _compressed(job: Job, num_devices: int, techniques: Techniques) -> tuple[Sent, int]:
    plan = Plan.even(job, num_devices, techniques=techniques)
    run = run_of(replace(job, global_sequences=num_devices), plan)
    zero = zero_plan_of(run, mesh_of(run, num_devices), 0)
    sent = zero_sent(zero, 1, sends_momenta=True)
    return {key: each for key, each in sent.items() if key[1] == DENSE_GROUP}, lost_bytes(zero)
