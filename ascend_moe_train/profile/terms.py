"""What a prediction says beside what was measured. Pure."""

from dataclasses import dataclass

from ascend_moe_train.profile.advice import Advice


@dataclass(frozen=True, kw_only=True)
class Term:
    """A part of the step, in ms; None is not known."""

    name: str
    predicted_ms: float | None
    measured_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """`mfu` are model FLOPs through what all devices could do in the step. `rates` compare links with the catalogue:
    name, measured and catalogued GB/s. `advice` is the planner's own plan, where it is predicted to be faster."""

    cluster: str
    terms: tuple[Term, ...]
    mfu_predicted: float
    mfu_measured: float | None
    memory_predicted_gb: float
    memory_measured_gb: float | None
    rates: tuple[tuple[str, float, float], ...]
    advice: Advice | None
