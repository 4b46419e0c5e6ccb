"""How long, how much at once, on what, and what to watch for. Pure."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ascend_moe_train.part import Part

PositiveInt = Annotated[int, Field(gt=0)]


class BatchConfig(Part):
    """Sequences per optimizer step over all ranks, and per forward and backward on each data parallel rank."""

    global_sequences: PositiveInt = 8
    micro_sequences: PositiveInt = 8

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.global_sequences % self.micro_sequences:
            raise ValueError(
                f"global_sequences {self.global_sequences} does not divide by micro_sequences {self.micro_sequences}"
            )
        return self


class GuardConfig(Part):
    """What to do when numbers go wrong.

    A step whose loss or gradient norm is not finite is skipped. A step whose loss exceeds the mean of the last
    `spike_window` good steps by `spike_sigma` standard deviations is a spike: `spike_action` only reports it (`warn`)
    or also leaves the weights as they were (`skip`). After `max_bad_steps` skipped steps in a row the run stops; those
    of fp16 count only once the loss scale is down at its `min`.

    `rewind`, for a spike or as `nonfinite_action`, goes back to the newest checkpoint and passes over the data that was
    trained on since, that of the bad step included (as Chowdhery et al., 2022, 5.1). More than `max_rewinds` to the
    same checkpoint stop the run.

    A rank that computes `straggler_factor` times as long as the median of its pipeline stage, over `straggler_window`
    steps, is named; null names none.
    """

    max_bad_steps: PositiveInt = 10
    spike_sigma: Annotated[float, Field(gt=0)] = 6.0
    spike_window: Annotated[int, Field(ge=8)] = 64
    spike_action: Literal["off", "warn", "skip", "rewind"] = "warn"
    nonfinite_action: Literal["skip", "rewind"] = "skip"
    max_rewinds: PositiveInt = 3
    straggler_factor: Annotated[float, Field(gt=1)] | None = 1.5
    straggler_window: PositiveInt = 20

    @property
    def rewinds(self) -> bool:
        """Whether anything leads to a rewind."""
        return "rewind" in (self.spike_action, self.nonfinite_action)


class RecomputeConfig(Part):
    """What the backward pass computes again rather than keep it from the forward pass, in how many blocks: the first
    `layers` of the model, or of each part of it on a pipeline stage; null is all.

    `selective`: activations of feed-forwards and experts, from their inputs. `full`: all but a block's input. What a
    pipeline stage keeps of each micro-batch on its way is its own input, from which the backward pass goes through all
    of its blocks once more; with `full` it may be the inputs of the blocks, which saves that.
    """

    policy: Literal["none", "selective", "full"] = "none"
    layers: PositiveInt | None = None
    kept: Literal["stage_input", "block_inputs"] = "stage_input"

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.policy == "none" and self.layers is not None:
            raise ValueError(f"layers {self.layers} has no effect with policy 'none': leave it out")
        if self.policy != "full" and self.kept == "block_inputs":
            raise ValueError(f"kept 'block_inputs' needs policy 'full', not '{self.policy}'")
        return self


class RunConfigPart(Part):
    """One run: its folder, length, seed, device and rhythm of reports.

    `init_from` is a checkpoint (or a folder of checkpoints, of which the newest is meant) whose weights the run starts
    from; without one they are random. A run that has checkpoints of its own goes on from those. With a `sample_prompt`,
    a finished run continues that text and shows it in its report. `log_comm` lists in each record of a step what its
    collectives took and moved, by verb, group and what it was. With a `time_limit_s`, counted from the start of the
    command, the run saves and ends after the last step that leaves `time_reserve_s` of it.
    """

    dir: Annotated[str, Field(min_length=1)]
    steps: PositiveInt
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    device: Literal["auto", "cpu", "ascend"] = "auto"
    kernels: Literal["auto", "portable", "native"] = "auto"
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    log_every: PositiveInt = 10
    log_comm: bool = True
    time_limit_s: Annotated[float, Field(gt=0)] | None = None
    time_reserve_s: Annotated[float, Field(ge=0)] = 120.0
    eval_every: PositiveInt = 200
    eval_sequences: PositiveInt = 64
    peak_flops_per_s: Annotated[float, Field(gt=0)] | None = None
    tensorboard: bool = True
    init_from: str | None = None
    sample_prompt: str | None = None

    @model_validator(mode="after")
    def _leaves_time(self) -> Self:
        if self.time_limit_s is not None and self.time_reserve_s >= self.time_limit_s:
            raise ValueError(
                f"time_limit_s {self.time_limit_s:g} leaves nothing to train in: time_reserve_s "
                f"{self.time_reserve_s:g} of it is for saving and ending"
            )
        return self


class ProfileConfig(Part):
    """Which steps of a run are profiled, into a folder that `amt profile` reads.

    `steps` is one step or `first:last`, both of them profiled; null is none. `dir` is where, null is `profile` in
    run.dir. `level` and `aic_metrics` are those of MindSpore's profiler, on Ascend; on a CPU they have no effect.
    """

    steps: int | str | None = None
    dir: Annotated[str, Field(min_length=1)] | None = None
    level: Literal["Level0", "Level1", "Level2"] = "Level1"
    aic_metrics: Literal[
        "AiCoreNone",
        "PipeUtilization",
        "ArithmeticUtilization",
        "Memory",
        "MemoryL0",
        "MemoryUB",
        "MemoryAccess",
        "ResourceConflictRatio",
        "L2Cache",
    ] = "PipeUtilization"

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.steps is not None and not self.span:
            raise ValueError(
                f"steps '{self.steps}': must be one step, such as 10, or first:last, such as 10:12, from 1"
            )
        return self

    @property
    def span(self) -> range:
        """The steps, counted from 1; empty without any."""
        match = re.fullmatch(r"([1-9][0-9]{0,14})(?::([1-9][0-9]{0,14}))?", str(self.steps))
        return range(0) if match is None else range(int(match[1]), int(match[2] or match[1]) + 1)


MIB = 2**20
MOST_S = 2**31 - 1


class HcclConfig(Part):
    """What Ascend's collectives wait for and hold, each an environment variable (`cluster/ascend_environment.py`).

    `connect_timeout_s`: ranks come to a group at different times. `exec_timeout_s`: a collective waits so long for
    the others, 0 for ever. `buffer_bytes`: of each of two buffers that a group has, whole MiB.
    """

    connect_timeout_s: Annotated[int, Field(ge=120, le=7200)] = 600
    exec_timeout_s: Annotated[int, Field(ge=0, le=MOST_S)] = 1836
    buffer_bytes: Annotated[int, Field(ge=MIB)] = 200 * MIB

    @model_validator(mode="after")
    def _whole_mib(self) -> Self:
        if self.buffer_bytes % MIB:
            raise ValueError(f"buffer_bytes {self.buffer_bytes}: must be whole MiB, a multiple of {MIB}")
        return self


class AscendConfig(Part):
    """How MindSpore uses an Ascend device; on a CPU nothing of it has an effect. docs/ascend-settings.md has sources.

    `jit_level` O1 fuses operators (graph kernels), with `graph_kernel_flags` as MindSpore spells them; O2 is the engine
    that MindSpore gives up. An operator may take `op_timeout_s`, 0 is for ever, and the pool of device memory
    `memory_limit_bytes`, null is all of it. `bind_cores` keeps MindSpore's threads on cores near the device.
    """

    jit_level: Literal["O0", "O1", "O2"] = "O0"
    graph_kernel_flags: Annotated[str, Field(pattern=r"^[ -~]+$")] | None = None
    deterministic: bool = False
    memory_limit_bytes: Annotated[int, Field(ge=2**31)] | None = None
    op_timeout_s: Annotated[int, Field(ge=0, le=MOST_S)] = 900
    bind_cores: bool = False
    hccl: HcclConfig = HcclConfig()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.graph_kernel_flags is not None and self.jit_level != "O1":
            raise ValueError(
                f"graph_kernel_flags has no effect with jit_level '{self.jit_level}': leave it out, or set 'O1'"
            )
        hccl = self.hccl
        problem = timeouts_problem(
            ("hccl.connect_timeout_s", hccl.connect_timeout_s),
            ("hccl.exec_timeout_s", hccl.exec_timeout_s),
            ("op_timeout_s", self.op_timeout_s),
        )
        if problem is not None:
            raise ValueError(problem)
        return self


def timeouts_problem(connect: tuple[str, int], execute: tuple[str, int], operator: tuple[str, int]) -> str | None:
    """What is wrong with the order of three named times in seconds, if anything: joining a group, and an operator that
    hangs by itself, have to end before others give up waiting in a collective. 0 is for ever, but for `connect`."""
    if execute[1] == 0:
        return None
    for name, value_s in (connect, operator):
        if not 0 < value_s < execute[1]:
            shown = value_s or "0 (for ever)"
            return f"{name} {shown} is not less than {execute[0]} {execute[1]}: lower it, or raise {execute[0]}"
    return None
