"""What `amt plan --json` printed, as a result that `amt bench compare` can set beside another. Pure."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ascend_moe_train.bench.result import Column, Result, Row, Shows, shown
from ascend_moe_train.units import format_share

KIND = "plan"
MARK = "predicted, not measured"
COLUMNS = (Column(key="figure", head="figure"), Column(key="shown", head="predicted"))

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class _Choices:
    num_devices: Annotated[int, Field(ge=1)]
    dp: int
    pp: int
    tp: int
    cp: int
    ep: int
    schedule: str
    zero_stage: int
    micro_sequences: int
    recompute: str


@dataclass(frozen=True, kw_only=True)
class _Plan:
    plan: _Choices
    step_s: Amount
    tokens_per_s: Amount
    mfu: Amount | None
    bubble_share: Amount
    items_s: dict[str, Amount]
    exposed_s: dict[str, Amount]
    peak_bytes: Amount


@dataclass(frozen=True, kw_only=True)
class _Error:
    time: Amount | None
    memory: Amount | None


@dataclass(frozen=True, kw_only=True)
class _Planned:
    model: str
    cluster: str
    seq_len: int
    global_sequences: int
    precision: str
    engine: str
    predicted: Literal[True]
    error: _Error
    plans: Annotated[list[_Plan], Field(min_length=1)]


_PLANNED = TypeAdapter(_Planned)


def plan_of(text: bytes) -> Result | None:
    """The first plan that `amt plan --json` printed, a row for each figure; None for anything else."""
    try:
        found = _PLANNED.validate_json(text)
    except ValidationError:
        return None
    best = found.plans[0]
    rows = [
        _row("step", best.step_s, "seconds"),
        _row("tokens/s", best.tokens_per_s, "count"),
        _row("tokens/s of a device", best.tokens_per_s / best.plan.num_devices, "count"),
        _row("MFU", best.mfu, "share"),
        _row("bubble", best.bubble_share, "share"),
        _row("exposed communication", sum(best.exposed_s.values()), "seconds"),
        _row("memory of the fullest device", best.peak_bytes, "bytes"),
        *(_row(f"of the step: {name}", value, "seconds") for name, value in best.items_s.items()),
    ]
    return Result(
        kind=KIND,
        title=f"{found.model} on {found.cluster}",
        command=f"amt plan --json, {MARK}",
        columns=COLUMNS,
        rows=tuple(rows),
        settings=_settings(found),
    )


def _settings(found: _Planned) -> dict[str, Any]:
    facts = {name: value for name, value in vars(found).items() if name not in ("predicted", "error", "plans")}
    layout = ", ".join(f"{name} {value}" for name, value in vars(found.plans[0].plan).items())
    errors = (f"{name} ± {format_share(value)}" for name, value in vars(found.error).items())
    return facts | {"layout": layout, "mean error of published runs": ", ".join(errors)}


def _row(figure: str, value: float | None, shows: Shows) -> Row:
    return {"figure": figure, "value": value, "shown": shown(value, shows)}
