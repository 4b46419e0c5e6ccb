"""What training software does where a published run does not say. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from ascend_moe_train.planner.plan import ENGINES, Engine

MemoryTool = Literal["allocated", "reserved", "device", "first step"]

_MEGATRON = ENGINES["megatron"]
# Megatron of 2021 and 2022: attention scores are stored, masks of dropout too
_OLD = replace(_MEGATRON, name="megatron 2021", flash=False, dropout=True, fp32_logits=(2, 2), overlaps=frozenset())
# fp32 logits are changed in place: beside the 16-bit ones there are these and their exponentials
# (megatron/core/tensor_parallel/cross_entropy.py), unless --cross-entropy-loss-fusion is asked for
_OLD = replace(_OLD, shares_inputs=False, expert_scores_early=False)
# torch's loss on whole logits: logits, log-softmax and gradient; on those that tp cuts exponentials besides,
# as in torch/distributed/tensor/parallel/loss.py
_FSDP = Engine(
    name="fsdp",
    weight_bytes=4,
    gradient_bytes=4,
    state_bytes=8,
    sharded_state_bytes=8,
    fp32_logits=(3, 4),
    selective=frozenset({"products"}),
    gathers_stages=True,
    keeps_outputs=True,
    overlaps=frozenset({"gradients", "weights"}),
)
# as the B200 sweep was run: nothing beside computation, the loss fused
_ALONE = replace(_MEGATRON, overlaps=frozenset())
_UNFUSED = replace(_MEGATRON, fp32_logits=(2, 2))
# DeepSpeed's pipeline keeps the outputs of a micro-batch until its backward pass (deepspeed/runtime/pipe/engine.py)
_PIPE = replace(_OLD, gradient_bytes=2, keeps_outputs=True, has_buffers=False)
_PADDLE = replace(_UNFUSED, gradient_bytes=2)
_HAI = replace(
    _MEGATRON,
    name="HAI-LLM",
    selective=frozenset({"norms", "activations", "latents"}),
    sends_once=True,
    pairs_passes=True,
)
# its scripts have --no-bias-gelu-fusion and --no-bias-dropout-fusion
_MINDSPEED = replace(_UNFUSED, overlaps=frozenset(), fuses_biases=False)
_MINDFORMERS = replace(_MEGATRON, name="mindformers", gradient_bytes=2)


@dataclass(frozen=True, kw_only=True)
class Habit:
    """What a training software does where a row is silent. `spreads`: experts are cut by tp unless a row says not.
    `was_sequence_parallel` is what was taken for `is_sequence_parallel` when the runs were split, if another."""

    engine: Engine
    zero: Literal[0, 1, 2, 3] = 1
    is_sequence_parallel: bool = True
    was_sequence_parallel: bool | None = None
    spreads: bool = False
    tool: MemoryTool = "allocated"


# Dropout of Megatron is 0.1 unless a script says otherwise; PaddleNLP's sequence parallelism is off likewise.
# By the beginning of the software's name; the first match counts.
HABITS: tuple[tuple[str, Habit], ...] = (
    ("Megatron-LM 0.14", Habit(engine=_ALONE)),
    ("Megatron-Core 0.6", Habit(engine=replace(_UNFUSED, dropout=True), tool="device")),
    ("Megatron-DeepSpeed", Habit(engine=_PIPE, is_sequence_parallel=False, tool="device")),
    ("Megatron-LM", Habit(engine=_OLD, zero=0, is_sequence_parallel=False)),
    ("DeepSpeed", Habit(engine=replace(_OLD, gradient_bytes=2), zero=3, tool="device")),
    (
        "FlagScale/DeepSpeed/Paddle",
        Habit(engine=_PADDLE, is_sequence_parallel=False, was_sequence_parallel=True, tool="device"),
    ),
    ("torchtitan", Habit(engine=_FSDP, zero=3, tool="reserved")),
    ("llm-foundry", Habit(engine=_FSDP, zero=3)),
    ("MindSpeed", Habit(engine=_MINDSPEED, spreads=True)),
    ("MindFormers", Habit(engine=_MINDFORMERS, is_sequence_parallel=True)),
    ("HAI-LLM", Habit(engine=_HAI)),
    ("", Habit(engine=_MEGATRON)),
)
OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "overlap-grad-reduce": "gradients",
        "overlap-param-gather": "weights",
        "use-mc2": "tp",
        "use-ascend-coc": "tp",
        "AsyncTP": "tp",
        "moe-permutation-async-comm": "ep",
    }
)


def selected(text: str) -> frozenset[str] | None:
    """What a row says is recomputed, or held in host memory; None to take what its software does."""
    if text.startswith("moe"):
        return frozenset({"experts"})
    parts = {"activations"} if "activation function" in text else set()
    return frozenset(parts | ({"attention"} if "swap-attention" in text else set())) or None
