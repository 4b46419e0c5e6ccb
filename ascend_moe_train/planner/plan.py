"""What is to be trained, by what software, and how it is spread over devices. Pure.

A `Job` is what the user wants, an `Engine` how the training software keeps numbers, a `Plan` a choice for a cluster.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import ValidationError

from ascend_moe_train.errors import ConfigError
from ascend_moe_train.model.config import ModelConfig
from ascend_moe_train.parallel.config import ParallelConfig, ScheduleName, check_parallel
from ascend_moe_train.parallel.mesh import Mesh, check_batch
from ascend_moe_train.planner.techniques import PLAIN, Techniques
from ascend_moe_train.train.config import BatchConfig

Precision = Literal["fp32", "fp16", "bf16", "fp8"]
Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
Kept = Literal["stage_input", "block_inputs"]
KEPT: tuple[Kept, ...] = ("stage_input", "block_inputs")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How a training software keeps and moves numbers.

    Bytes of each parameter: `weight_bytes` that layers compute with, `gradient_bytes` of the sum over micro-batches,
    `state_bytes` of the optimizer where states are whole on each device, `sharded_state_bytes` where ZeRO shards them
    (more where the weights themselves serve as the optimizer's copy while they are whole). `keeps`: of a micro-batch in
    flight either the `residuals` that the backward pass needs, or only the `inputs` of the stage, whose backward pass
    begins with its forward pass over again. `flash`: attention scores are never stored. `fp32_logits`: how many fp32
    copies of the logits the loss has at once, of whole ones and of those that tp cuts; none where it is fused.
    `dropout`: masks are kept. `overlaps` what communication runs beside computation. `expert_scores_early`: weights of
    experts multiply inside them, so that their outputs need not be kept. `selective` is what that policy recomputes:
    `scores` of attention where they are stored, attention's `core` whether or not, what an `activations` function
    makes, outputs of `norms`, or of every second of `products`, heads that come from `latents`, everything of
    `experts`. `shares_inputs`: with sequence parallelism, inputs of recomputed blocks are kept as parts.
    `gathers_stages`: with pipeline stages, stage 3 gathers a stage's weights once a step, and keeps their gradients
    whole until its end. `keeps_outputs`: what a stage has sent on is kept until its backward pass. `has_buffers`:
    weights and gradients are parts of one buffer each, into which products add; not tensors of their own, which are
    added for every micro-batch. `copies_gradients`: those of a micro-batch are tensors of their own, which are added to
    sums where there are several, and are copied into buckets and out of them to be summed between devices.
    `fuses_biases`: biases of GPT's layers, dropout and sums are one operator with the next. `buffer_bytes` are flat
    buffers of its own. Its passes take `pace` times as long, attention products `core_pace` times, as those of the
    device class's other software. `sends_once`: a token goes once to each node that has experts for it, and is shared
    out there. `pairs_passes`: a forward pass runs beside a backward pass, whose computation hides its exchange
    (DualPipe).
    """

    name: str
    weight_bytes: float
    gradient_bytes: float
    state_bytes: float
    sharded_state_bytes: float
    keeps: Literal["residuals", "inputs"] = "residuals"
    flash: bool = True
    fp32_logits: tuple[int, int] = (0, 0)
    dropout: bool = False
    expert_scores_early: bool = True
    selective: frozenset[str] = frozenset({"scores", "activations", "norms"})
    shares_inputs: bool = True
    gathers_stages: bool = False
    keeps_outputs: bool = False
    has_buffers: bool = True
    copies_gradients: bool = False
    fuses_biases: bool = True
    buffer_bytes: float = 0.0
    pace: float = 1.0
    core_pace: float = 1.0
    sends_once: bool = False
    pairs_passes: bool = False
    overlaps: frozenset[str] = frozenset()


OURS = Engine(
    name="ours",
    weight_bytes=4,
    gradient_bytes=4,
    state_bytes=8,
    sharded_state_bytes=12,
    keeps="inputs",
    fp32_logits=(3, 3),
    expert_scores_early=False,
    copies_gradients=True,
)
ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "ours": OURS,
        # Rajbhandari et al. (2020), section 3.1: 16-bit weights and gradients, 12 bytes of states
        "zero": Engine(name="zero", weight_bytes=2, gradient_bytes=2, state_bytes=12, sharded_state_bytes=12),
        # Megatron-Core: fp32 gradients, 6 + 12 / d bytes with its distributed optimizer
        "megatron": Engine(
            name="megatron",
            weight_bytes=2,
            gradient_bytes=4,
            state_bytes=12,
            sharded_state_bytes=12,
            selective=frozenset({"core"}),
            overlaps=frozenset({"gradients", "weights"}),
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, the tokens of a step, and the numbers they are computed with. `plain_ffn`: dense layers have two
    matrices with an activation between (GPT), not our gated three."""

    model: ModelConfig
    seq_len: int
    global_sequences: int
    precision: Precision = "bf16"
    engine: Engine = OURS
    plain_ffn: bool = False

    def __post_init__(self) -> None:
        for name in ("seq_len", "global_sequences"):
            if not 0 < getattr(self, name) <= 2**40:
                raise ConfigError(f"{name} {getattr(self, name)} is not possible: must be from 1 to 2^40")

    @cached_property
    def _hash(self) -> int:
        return hash((self.model.model_dump_json(), self.seq_len, self.global_sequences, self.precision, self.engine))

    def __hash__(self) -> int:
        return self._hash

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step."""
        return self.seq_len * self.global_sequences

    @property
    def activation_bytes(self) -> int:
        """Of a number in the residual stream."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True, kw_only=True)
class Imbalance:
    """How unevenly tokens go to experts: tokens of the device with most of them through the mean of its group.
    `expected` is what a step takes as a whole, `worst` what memory must hold for a while."""

    expected: float = 1.15
    worst: float = 1.5

    def __post_init__(self) -> None:
        if not 1 <= self.expected <= self.worst < 1e6:
            raise ConfigError(f"imbalance {self.expected} and at worst {self.worst}: must be 1 or more, in this order")


TYPICAL = Imbalance()
BALANCED = Imbalance(expected=1.0, worst=1.0)


def among_ranks(plan: "Plan", factor: float) -> float:
    """Tokens of the busiest device through the mean: where every device has all experts, each has the same."""
    return factor if plan.ep > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout. dp and edp follow from `num_devices`. `stage_layers` are those of each virtual stage in the order of
    depth (chunk 0 of every stage, then chunk 1, ...). `recompute` is done in the first `recompute_layers` of each
    virtual stage, None for all. Of an engine that keeps inputs, `recompute_kept` says whose. `techniques` are of ours
    only."""

    num_devices: int
    stage_layers: tuple[int, ...]
    pp: int = 1
    chunks: int = 1
    schedule: ScheduleName = "1f1b"
    cp: int = 1
    context: Literal["ring", "ulysses"] = "ring"
    tp: int = 1
    sequence_parallel: bool = False
    ep: int = 1
    etp: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    micro_sequences: int = 1
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    recompute_kept: Kept = "stage_input"
    offload_optimizer: bool = False
    techniques: Techniques = PLAIN

    @classmethod
    def even(cls, job: Job, num_devices: int, *, pp: int = 1, chunks: int = 1, **choices: Any) -> Self:
        """The plan whose layers are shared out evenly (`even_layers`); `choices` are other fields."""
        layers = even_layers(job.model.num_layers, pp * chunks)
        return cls(num_devices=num_devices, stage_layers=layers, pp=pp, chunks=chunks, **choices)

    @property
    def dp(self) -> int:
        """Data parallel size of the dense part."""
        return self.num_devices // (self.pp * self.cp * self.tp)

    @property
    def edp(self) -> int:
        """Data parallel size of the experts."""
        return self.num_devices // (self.pp * self.ep * self.etp)

    @property
    def sizes(self) -> tuple[int, ...]:
        """On which everything depends that a device holds of the model: devices, and sizes of the axes."""
        return self.num_devices, self.pp, self.cp, self.tp, self.ep, self.etp

    @property
    def nodes(self) -> tuple[int, int] | None:
        """Where rows for experts travel in two steps: ranks of an ep group in a node of the run, and its nodes."""
        node = self.techniques.hierarchical_ranks
        return None if node is None else (node // self.etp, self.ep * self.etp // node)

    def num_micro(self, job: Job) -> int:
        """Micro-batches of a step."""
        return job.global_sequences // (self.dp * self.micro_sequences)

    def layers(self, stage: int, chunk: int) -> tuple[int, int]:
        """[first, stop) of the layers of a chunk of a stage."""
        place = chunk * self.pp + stage
        first = sum(self.stage_layers[:place])
        return first, first + self.stage_layers[place]

    def parallel(self) -> ParallelConfig:
        """The section `parallel` of a run file. Raises ConfigError for sizes that exclude each other."""
        is_cut = self.pp > 1
        try:
            return ParallelConfig(
                pp=self.pp,
                cp=self.cp,
                tp=self.tp,
                ep=self.ep,
                etp=self.etp,
                sequence_parallel=self.sequence_parallel,
                context=self.context,
                schedule=self.schedule,
                chunks=self.chunks,
                stage_layers=self.stage_layers if is_cut else "even",
                zero_stage=self.zero_stage,
                offload_optimizer=self.offload_optimizer,
                **self.techniques.keys,
            )
        except ValidationError as error:
            raise ConfigError("; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())) from None


def even_layers(num_layers: int, parts: int) -> tuple[int, ...]:
    """Layers of each part in order of depth; the first have one more."""
    return tuple(num_layers // parts + (part < num_layers % parts) for part in range(parts))


def check(job: Job, plan: Plan) -> str | None:
    """Why a plan is impossible whatever the memory, in one line; None if nothing is against it."""
    try:
        batch = BatchConfig(global_sequences=job.global_sequences, micro_sequences=plan.micro_sequences)
        mesh = Mesh.make(plan.num_devices, pp=plan.pp, cp=plan.cp, tp=plan.tp, ep=plan.ep, etp=plan.etp)
        check_batch(batch, mesh)
        check_parallel(plan.parallel(), job.model, None, batch, job.seq_len)
    except ValidationError as error:
        return "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
    except (ConfigError, ValueError) as error:
        return str(error)
    if len(plan.stage_layers) != plan.pp * plan.chunks or sum(plan.stage_layers) != job.model.num_layers:
        return f"stage_layers {plan.stage_layers} do not share out {job.model.num_layers} layers to {plan.pp} stages"
    return None
