"""How long, how much at once, on what, and what to watch for. Pure."""

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
    """

    max_bad_steps: PositiveInt = 10
    spike_sigma: Annotated[float, Field(gt=0)] = 6.0
    spike_window: Annotated[int, Field(ge=8)] = 64
    spike_action: Literal["off", "warn", "skip"] = "warn"


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
    a finished run continues that text and shows it in its report.
    """

    dir: Annotated[str, Field(min_length=1)]
    steps: PositiveInt
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    device: Literal["auto", "cpu", "ascend"] = "auto"
    kernels: Literal["auto", "portable", "native"] = "auto"
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    log_every: PositiveInt = 10
    eval_every: PositiveInt = 200
    eval_sequences: PositiveInt = 64
    peak_flops_per_s: Annotated[float, Field(gt=0)] | None = None
    tensorboard: bool = True
    init_from: str | None = None
    sample_prompt: str | None = None
