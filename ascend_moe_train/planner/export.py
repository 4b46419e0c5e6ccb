"""A plan in the words of other training systems: the parallel part of their settings. Pure.

What a system has no words for is said in a comment, never left out silently. Sources of the words: Megatron-LM,
`megatron/training/arguments.py`; MindSpeed-LLM, its feature pages; MindFormers, the YAML of its DeepSeek-V3 training;
MindSpore 2.10, `mindspore.parallel.auto_parallel.AutoParallel` and `mindspore.parallel.nn.Pipeline`.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from ascend_moe_train import strict_yaml
from ascend_moe_train.parallel.config import AXES_ELSEWHERE
from ascend_moe_train.planner.plan import Job, Plan

BUCKET_MIB = 25
# Megatron-FSDP's names for what is sharded
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
_LEVELS = {1: "level1", 2: "level2", 3: "level3"}
_CONTEXT = {"ring": "p2p", "ulysses": "a2a"}
_CONTEXT_OF_MINDSPEED = {"ring": "megatron_cp_algo", "ulysses": "ulysses_cp_algo"}


def export(job: Job, plan: Plan, system: str) -> str:
    """Text for `system`, one of `SYSTEMS`: shell arguments, YAML, or Python."""
    return "\n".join(_WRITERS[system](job, plan)) + "\n"


def _megatron(job: Job, plan: Plan) -> Iterator[str]:
    yield f"# Megatron-LM (Megatron-Core): {plan.num_devices} ranks, torchrun's business"
    yield from _common_arguments(job, plan)
    if plan.pp > 1:
        yield from _megatron_stages(job, plan)
    if plan.cp > 1:
        yield f"--cp-comm-type {_CONTEXT[plan.context]}"
    if plan.zero_stage == 1:
        yield "--use-distributed-optimizer"
    elif plan.zero_stage > 1:
        yield f"--use-megatron-fsdp --data-parallel-sharding-strategy {_SHARDING[plan.zero_stage]}"
    yield from _recompute_arguments(plan, "--recompute-modules core_attn moe_act")
    if plan.offload_optimizer:
        yield "--optimizer-cpu-offload --use-precision-aware-optimizer"


def _mindspeed(job: Job, plan: Plan) -> Iterator[str]:
    yield f"# MindSpeed-LLM (Megatron-Core): {plan.num_devices} ranks"
    yield from _common_arguments(job, plan)
    if plan.pp > 1 and plan.chunks > 1:
        if len(set(plan.stage_layers)) == 1:
            yield f"--num-layers-per-virtual-pipeline-stage {plan.stage_layers[0]}"
        else:
            yield f"# no words for the layers of each virtual stage, {_commas(plan)}: pad with --noop-layers"
    elif plan.pp > 1 and len(set(plan.stage_layers)) > 1:
        yield f"--num-layer-list {_commas(plan)}"
    yield from _schedule_note(plan, ("1f1b", "interleaved"))
    if plan.cp > 1:
        yield f"--context-parallel-algo {_CONTEXT_OF_MINDSPEED[plan.context]}"
    if plan.zero_stage:
        yield "--use-distributed-optimizer"
    if plan.zero_stage > 1:
        yield f"# no words for ZeRO-{plan.zero_stage}: its distributed optimizer is ZeRO-1"
    yield from _recompute_arguments(plan, "--recompute-activation-function")
    if plan.offload_optimizer:
        yield "--swap-optimizer"


def _common_arguments(job: Job, plan: Plan) -> Iterator[str]:
    for name, key in AXES_ELSEWHERE.items():
        axis = key.removeprefix("parallel.")
        if job.model.moe is not None or not name.startswith("expert"):
            yield f"--{name.replace('_', '-')} {getattr(plan, axis)}"
    if plan.sequence_parallel:
        yield "--sequence-parallel"
    yield f"--micro-batch-size {plan.micro_sequences}"
    yield f"--global-batch-size {job.global_sequences}"
    yield f"--seq-length {job.seq_len}"
    if job.precision in ("bf16", "fp16"):
        yield f"--{job.precision}"
    if job.model.moe is not None:
        yield "--moe-token-dispatcher-type alltoall --moe-grouped-gemm"
    if job.model.mtp is not None:
        yield f"--mtp-num-layers {job.model.mtp.depth}"


def _megatron_stages(job: Job, plan: Plan) -> Iterator[str]:
    """Even virtual stages by their number, others by a layout: E embedding, t layer, m MTP, L loss, | between."""
    if len(set(plan.stage_layers)) == 1 and job.model.mtp is None:
        if plan.chunks > 1:
            yield f"--num-virtual-stages-per-pipeline-rank {plan.chunks}"
    else:
        parts = [f"t*{layers}" for layers in plan.stage_layers]
        parts[0] = "E" + parts[0]
        parts[-1] += "m" * (job.model.mtp.depth if job.model.mtp is not None else 0) + "L"
        yield f'--pipeline-model-parallel-layout "{"|".join(parts)}"'
    yield from _schedule_note(plan, ("1f1b", "interleaved"))


def _recompute_arguments(plan: Plan, selective: str) -> Iterator[str]:
    if plan.recompute == "full":
        if plan.recompute_layers is None:
            yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        else:
            layers = plan.recompute_layers
            yield f"--recompute-granularity full --recompute-method block --recompute-num-layers {layers}"
    elif plan.recompute == "selective":
        yield f"--recompute-granularity selective {selective}" if "modules" in selective else selective
        if plan.recompute_layers is not None:
            yield f"# no words for the first {plan.recompute_layers} layers of each virtual stage only: all recompute"


def _mindformers(job: Job, plan: Plan) -> Iterator[str]:
    yield f"# MindFormers: {plan.num_devices} ranks"
    yield from _schedule_note(plan, ("1f1b", "interleaved", "gpipe"))
    experts = {key: size for key, size in _expert_sizes(plan).items() if key != "ep"}
    yield from (
        f"# no words for parallel.{key} {size}: experts are cut in width by model_parallel"
        for key, size in experts.items()
        if size not in (1, plan.tp)
    )
    if plan.zero_stage == 2:
        yield "# parallel_optimizer shards weights and states (level1): gradients are whole until the step's end"
    config: dict[str, strict_yaml.Value] = {
        "use_parallel": True,
        "parallel": {
            "parallel_mode": 1,
            "enable_alltoall": job.model.moe is not None,
            "full_batch": False,
            "gradients_mean": False,
            "enable_parallel_optimizer": plan.zero_stage > 0,
            "parallel_optimizer_config": {
                "optimizer_weight_shard_size": plan.dp if plan.zero_stage else -1,
                "optimizer_level": _LEVELS[max(plan.zero_stage, 1)],
            },
            "pipeline_config": {
                "pipeline_interleave": plan.chunks > 1,
                "pipeline_scheduler": "gpipe" if plan.schedule == "gpipe" else "1f1b",
            },
        },
        "parallel_config": {
            "data_parallel": plan.dp,
            "model_parallel": plan.tp,
            "context_parallel": plan.cp,
            "pipeline_stage": plan.pp,
            "expert_parallel": plan.ep,
            "use_seq_parallel": plan.sequence_parallel,
            "micro_batch_num": plan.num_micro(job),
            "vocab_emb_dp": plan.tp == 1,
            "gradient_aggregation_group": 4,
        },
        "recompute_config": _recompute_of_mindformers(plan),
        "runner_config": {"batch_size": plan.micro_sequences},
        "model": {"model_config": {"pp_interleave_num": plan.chunks, "offset": _offsets(job, plan)}},
    }
    if plan.offload_optimizer:
        config["optimizer"] = {"type": "AdamW", "swap": True}
    yield strict_yaml.dump(config).rstrip()


def _expert_sizes(plan: Plan) -> dict[str, int]:
    keys = (key.removeprefix("parallel.") for name, key in AXES_ELSEWHERE.items() if name.startswith("expert"))
    return {key: getattr(plan, key) for key in keys}


def _recompute_of_mindformers(plan: Plan) -> dict[str, strict_yaml.Value]:
    layers: strict_yaml.Value = plan.recompute != "none"
    if layers and plan.recompute_layers is not None:
        chunks = [
            [min(plan.recompute_layers, count) for count in plan.stage_layers[chunk * plan.pp : (chunk + 1) * plan.pp]]
            for chunk in range(plan.chunks)
        ]
        layers = list(chunks[0]) if plan.chunks == 1 else [list(chunk) for chunk in chunks]
    return {
        "recompute": layers if plan.recompute == "full" else False,
        "select_recompute": layers if plan.recompute == "selective" else False,
        "parallel_optimizer_comm_recompute": plan.zero_stage == 3,
        "mp_comm_recompute": False,
        "recompute_slice_activation": plan.tp > 1,
    }


def _offsets(job: Job, plan: Plan) -> strict_yaml.Value:
    """Layers of each virtual stage less those of an even share, a list for each chunk."""
    even = job.model.num_layers // (plan.pp * plan.chunks)
    rows = [
        [layers - even for layers in plan.stage_layers[chunk * plan.pp : (chunk + 1) * plan.pp]]
        for chunk in range(plan.chunks)
    ]
    if not any(map(any, rows)):
        return 0
    return list(rows[0]) if plan.chunks == 1 else [list(row) for row in rows]


def _mindspore(job: Job, plan: Plan) -> Iterator[str]:
    yield f"# MindSpore 2.10, {plan.num_devices} devices: semi-automatic parallelism, graph mode, Ascend"
    yield "from mindspore.parallel.auto_parallel import AutoParallel"
    yield "from mindspore.parallel.nn import GradAccumulation, Pipeline"
    yield ""
    micro = plan.num_micro(job)
    if plan.pp > 1:
        yield f"stage_of_layer = {_stage_of_layer(plan)}"
        yield from _schedule_note(plan, ("1f1b", "interleaved", "gpipe"))
        yield f"net = Pipeline(net, {micro}, stage_config={{f'model.layers.{{i}}': stage for i, stage in "
        yield "    enumerate(stage_of_layer)})  # the names of the cells are your network's"
    elif micro > 1:
        yield f"net = GradAccumulation(net, {micro})"
    yield 'net = AutoParallel(net, parallel_mode="semi_auto")'
    yield f"net.dataset_strategy((({plan.dp}, {plan.cp}),))  # sequences, tokens"
    if plan.zero_stage:
        yield f'net.hsdp(shard_size={plan.dp}, threshold=64, optimizer_level="{_LEVELS[plan.zero_stage]}")'
    if plan.pp > 1:
        scheduler = "gpipe" if plan.schedule == "gpipe" else "1f1b"
        yield f'net.pipeline(stages={plan.pp}, interleave={plan.chunks > 1}, scheduler="{scheduler}")'
    fusion = ", ".join(
        f'"{kind}": {{"mode": "size", "config": {BUCKET_MIB}}}' for kind in ("allreduce", "allgather", "reducescatter")
    )
    yield f'net.comm_fusion({{"openstate": True, {fusion}}})  # MiB'
    yield 'net.save_param_strategy_file("strategy.ckpt")'
    sizes = {key: size for key, size in _expert_sizes(plan).items() if size > 1}
    cuts = {"dp": plan.dp, "cp": plan.cp, "tp": plan.tp, **sizes}
    yield f"# strategies of the operators (shard) are your network's: {cuts}"
    if plan.recompute != "none":
        which = "each layer" if plan.recompute_layers is None else f"the first {plan.recompute_layers} of each stage"
        cell = "layer.recompute()" if plan.recompute == "full" else "core_attention.recompute(), activation.recompute()"
        yield f"# recompute, in {which}: {cell}"
    if plan.offload_optimizer:
        yield "# optimizer states in host memory: nn.Adam(..., use_offload=True)"


def _stage_of_layer(plan: Plan) -> list[int]:
    return [place % plan.pp for place, layers in enumerate(plan.stage_layers) for _ in range(layers)]


def _schedule_note(plan: Plan, known: tuple[str, ...]) -> Iterator[str]:
    if plan.pp > 1 and plan.schedule not in known:
        yield f"# no words for schedule {plan.schedule}: this runs as 1f1b"


def _commas(plan: Plan) -> str:
    return ",".join(map(str, plan.stage_layers))


_WRITERS: Mapping[str, Callable[[Job, Plan], Iterator[str]]] = MappingProxyType(
    {"mindspore": _mindspore, "mindformers": _mindformers, "mindspeed-llm": _mindspeed, "megatron": _megatron}
)
SYSTEMS = tuple(_WRITERS)
