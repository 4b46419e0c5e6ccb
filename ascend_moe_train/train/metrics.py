"""What a run measures: records of steps and evaluations, expert load, and the JSONL file that holds them. Pure.

Shape letters: L MoE layers, E experts.
"""

import math
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ascend_moe_train.closing import Closing
from ascend_moe_train.errors import MetricsError
from ascend_moe_train.parallel.spans import CommTotal, StepComm
from ascend_moe_train.whole_file import write_whole

MAX_LINE_BYTES = 64 * 2**20
MAX_LOAD_VALUES = 2**18
LOAD_VALUES_PER_STEP = 512

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]
Count = Annotated[int, Field(ge=0, le=2**53)]
# JSON has no NaN: a value that is not finite is written as null and comes back as NaN.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Share = Annotated[float, Field(ge=0, le=1)]
Load = tuple[tuple[Share, ...], ...]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. `step` counts finished steps: the first record of a run has step 1.

    `loss` is the cross entropy in nats per token, `mtp_loss` that of multi-token prediction, its mean over depths, None
    for a model without; `aux_loss` (1 per layer when balanced) and `z_loss` are the router's terms. All are before
    their coefficients.
    `mfu` is `model_flops_per_s` over the device's peak, None when the peak is unknown. `load` holds each MoE layer's
    share of assignments per expert (each layer sums to 1); it is empty in steps that do not record it. `drop_rate` is
    dropped over routed assignments. `memory_bytes` is resident memory, `eta_s` the time left. `comm_s` is what the
    first rank's collectives took, `comm_exposed_s` how long its step waited for them, `comm_bytes` their payload, all
    None where that is not known; `comm` has them by verb, group and content, in runs that list them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    kind: Literal["step"] = "step"
    step: Count
    loss: Number
    loss_smooth: Number
    aux_loss: Number
    z_loss: Number
    lr: Number
    grad_norm: Number
    tokens: Count
    step_s: Number
    tokens_per_s: Number
    model_flops_per_s: Number
    mfu: float | None
    loss_scale: float | None
    skipped: bool
    load_cv: tuple[Number, ...]
    load_max_over_mean: tuple[Number, ...]
    dead_experts: tuple[Count, ...]
    load: Load
    drop_rate: Number
    memory_bytes: Count
    eta_s: Number
    mtp_loss: float | None = None
    comm_s: float | None = None
    comm_exposed_s: float | None = None
    comm: tuple[CommTotal, ...] = ()
    comm_bytes: Count | None = None


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """Validation after `step` finished steps: `loss` in nats per token over `tokens` counted tokens."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    kind: Literal["eval"] = "eval"
    step: Count
    loss: Number
    perplexity: Number
    bits_per_byte: float | None
    tokens: Count

    @classmethod
    def from_loss(cls, *, step: int, loss: float, tokens: int, bytes_per_token: float | None) -> Self:
        """The record of a mean loss (nats per token); bits per byte needs the text's bytes per token."""
        bits = None if bytes_per_token is None else loss / math.log(2) / bytes_per_token
        perplexity = math.exp(loss) if loss < 700 else math.inf if loss >= 700 else math.nan
        return cls(step=step, loss=loss, perplexity=perplexity, bits_per_byte=bits, tokens=tokens)


Record = StepRecord | EvalRecord
_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


class ExpertLoad(NamedTuple):
    """How evenly the router spreads assignments, one entry per MoE layer."""

    cv: tuple[float, ...]
    max_over_mean: tuple[float, ...]
    dead: tuple[int, ...]
    share: Load


def load_cv(counts_LE: Counts) -> Floats:
    """Coefficient of variation of each layer's counts [L]: population deviation over mean; NaN without assignments."""
    mean_L = counts_LE.mean(axis=1)
    return np.divide(counts_LE.std(axis=1), mean_L, out=np.full(len(counts_LE), math.nan), where=mean_L > 0)


def load_max_over_mean(counts_LE: Counts) -> Floats:
    """The busiest expert's count over the mean count [L]: 1 when balanced, E when one expert takes all."""
    mean_L = counts_LE.mean(axis=1)
    return np.divide(counts_LE.max(axis=1), mean_L, out=np.full(len(counts_LE), math.nan), where=mean_L > 0)


def dead_experts(counts_LE: Counts) -> Counts:
    """Experts without a single assignment [L]."""
    dead_L: Counts = (counts_LE == 0).sum(axis=1, dtype=np.int64)
    return dead_L


def load_share(counts_LE: Counts) -> Load:
    """Each expert's share of its layer's assignments, to five digits; empty when some layer has none."""
    total_L = counts_LE.sum(axis=1, keepdims=True)
    if not total_L.all():
        return ()
    return tuple(tuple(row) for row in (counts_LE / total_L).round(5).tolist())


def expert_load(counts_LE: Counts) -> ExpertLoad:
    """All load figures of assignment counts, taken before any are dropped; empty for a model without MoE layers."""
    if not counts_LE.size:
        return ExpertLoad((), (), (), ())
    return ExpertLoad(
        tuple(load_cv(counts_LE).tolist()),
        tuple(load_max_over_mean(counts_LE).tolist()),
        tuple(dead_experts(counts_LE).tolist()),
        load_share(counts_LE),
    )


def resident_bytes() -> int:
    """Memory that this process holds now; its peak where /proc is missing."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most memory that this process held (getrusage counts kilobytes on Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(kw_only=True)
class Smoother:
    """Exponential mean with bias correction (Kingma & Ba, 2015, section 3); the fields are its state, to be saved."""

    decay: float = 0.95
    total: float = 0.0
    weight: float = 0.0

    def update(self, value: float) -> float:
        """Takes a value in, unless it is not finite, and returns the mean; NaN before the first value."""
        if math.isfinite(value):
            self.total = self.decay * self.total + (1 - self.decay) * value
            self.weight = self.decay * self.weight + (1 - self.decay)
        return self.total / self.weight if self.weight else math.nan


@dataclass(kw_only=True)
class StepMeter:
    """Turns what a step returned into a StepRecord.

    `flops_per_token` counts forward and backward of the model's own mathematics; `smoother` averages the loss
    and its state belongs into the checkpoint. Steps of a large model record `load` only now and then, so that
    the file grows by about `LOAD_VALUES_PER_STEP` values a step.
    """

    total_steps: int
    flops_per_token: float
    peak_flops_per_s: float | None
    smoother: Smoother
    lists_comm: bool = False

    def __post_init__(self) -> None:
        # Compilation and cold caches make the first step slow: a short memory forgets it within a few steps.
        self._step_s = Smoother(decay=0.9)

    def record(
        self,
        *,
        step: int,
        loss: float,
        aux_loss: float,
        z_loss: float,
        lr: float,
        grad_norm: float,
        tokens: int,
        step_s: float,
        counts_LE: Counts,
        dropped: int,
        loss_scale: float | None,
        skipped: bool,
        mtp_loss: float | None = None,
        comm: StepComm | None = None,
    ) -> StepRecord:
        """The record of one step that took `step_s` seconds and dropped `dropped` of `counts_LE.sum()` assignments."""
        load = expert_load(counts_LE)
        load_every = math.ceil(counts_LE.size / LOAD_VALUES_PER_STEP) or 1
        assignments = int(counts_LE.sum())
        tokens_per_s = tokens / step_s if step_s > 0 else math.nan
        flops_per_s = tokens_per_s * self.flops_per_token
        return StepRecord(
            step=step,
            loss=loss,
            loss_smooth=self.smoother.update(loss),
            aux_loss=aux_loss,
            z_loss=z_loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=tokens,
            step_s=step_s,
            tokens_per_s=tokens_per_s,
            model_flops_per_s=flops_per_s,
            mfu=None if self.peak_flops_per_s is None else flops_per_s / self.peak_flops_per_s,
            loss_scale=loss_scale,
            skipped=skipped,
            load_cv=load.cv,
            load_max_over_mean=load.max_over_mean,
            dead_experts=load.dead,
            load=load.share if step % load_every == 0 or step == 1 else (),
            drop_rate=dropped / assignments if assignments else 0.0,
            memory_bytes=resident_bytes(),
            eta_s=max(self.total_steps - step, 0) * self._step_s.update(step_s),
            mtp_loss=mtp_loss,
            comm_s=None if comm is None else comm.total_s,
            comm_exposed_s=None if comm is None else comm.exposed_s,
            comm=comm.calls if comm is not None and self.lists_comm else (),
            comm_bytes=None if comm is None else comm.payload_bytes,
        )


def to_json_line(record: Record) -> bytes:
    """One record as a line of JSON."""
    return _RECORD.dump_json(record) + b"\n"


def record_of_line(line: str) -> Record | None:
    """The record that a line holds; None if it holds anything else."""
    try:
        return _RECORD.validate_json(line) if line.startswith("{") else None
    except ValidationError:
        return None


def read_records(path: Path) -> Iterator[Record]:
    """The records of a JSONL file, in order. A last line that was cut off (the writer was killed) is left out.

    Raises MetricsError naming file and line: unreadable file, line that is no record, steps out of order, load whose
    shape changes.
    """
    last_step: dict[str, int] = {}
    first: Load = ()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                where = f"{path} line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise MetricsError(f"{where}: longer than {MAX_LINE_BYTES} bytes")
                try:
                    record = _RECORD.validate_json(line)
                except ValidationError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise MetricsError(f"{where}: {first_problem(error, skip=1)}") from None
                if record.step <= last_step.get(record.kind, -1):
                    raise MetricsError(f"{where}: step {record.step} after step {last_step[record.kind]}")
                last_step[record.kind] = record.step
                if isinstance(record, StepRecord) and record.load:
                    first = first or record.load
                    _check_load(record.load, first, where)
                yield record
    except OSError as error:
        raise MetricsError(f"{path}: {error.strerror or error}") from None


def _check_load(load: Load, first: Load, where: str) -> None:
    """Load is a table of layers by experts, the same in all lines."""
    shape, expected = {len(row) for row in load}, {len(row) for row in first}
    if len(expected) != 1 or shape != expected or len(load) != len(first):
        raise MetricsError(f"{where}: load has other layers or experts than the lines before, or differs by layer")
    if len(load) * len(load[0]) > MAX_LOAD_VALUES:
        raise MetricsError(f"{where}: load has {len(load)} x {len(load[0])} values, more than {MAX_LOAD_VALUES}")


def first_problem(error: ValidationError, *, skip: int = 0) -> str:
    """The first of pydantic's complaints, without `skip` parts of its place, with the value, as one printable line."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"][skip:])
    text = f"{place + ': ' if place else ''}{first['msg']}, got {first['input']!s:.60}"
    return text.encode("unicode_escape").decode("ascii")[:250]


class JsonlWriter(Closing):
    """Appends records to a JSONL file, each on disk (flushed to the system) when `write` returns.

    `first_step` is the first step that this process records: lines of that step or later, left by a run that went on
    past its last checkpoint and died, are dropped on opening, and so is a last line that was cut off. The file is
    replaced in one go, so that a kill at any moment leaves the old or the new one. Raises MetricsError.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                if not path.is_file():  # opening a pipe would wait for a reader
                    raise MetricsError(f"{path}: is no regular file")
                _keep_before(path, first_step)
            # unbuffered, so that nothing is left to fail when the file is closed on a full disk
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise MetricsError(f"{path}: {error.strerror or error}") from None

    def write(self, record: Record) -> None:
        """Appends one record."""
        rest = to_json_line(record)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise MetricsError(f"{self._path}: {error.strerror or error}") from None

    def close(self) -> None:
        """Closes the file; what was written stays."""
        self._file.close()


def _keep_before(path: Path, first_step: int) -> None:
    """Rewrites `path` with its records of steps before `first_step`."""
    kept = (record for record in read_records(path) if record.step < first_step)
    replace_file(path, (to_json_line(record) for record in kept))


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """`write_whole`. Raises MetricsError."""
    try:
        write_whole(path, chunks)
    except OSError as error:
        raise MetricsError(f"{path}: {error.strerror or error}") from None
