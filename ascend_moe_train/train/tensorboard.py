"""TensorBoard event files of a run, written with the `tensorboard` package alone. Pure."""

import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from ascend_moe_train.closing import Closing
from ascend_moe_train.errors import MetricsError
from ascend_moe_train.train.metrics import EvalRecord, Record, StepRecord


class TensorBoardWriter(Closing):
    """Writes one event file into `folder`; a resumed run adds another.

    `first_step` is the first step that this process records: TensorBoard then forgets what an earlier process wrote
    for that step and later ones. Events are written at once, not in a thread as by tensorboard's own EventFileWriter,
    whose thread dies of a full disk. Raises MetricsError when they cannot be written.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        # TensorBoard reads the files of a folder in the order of their names
        self._path = folder / f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise MetricsError(f"{folder}: {error.strerror or error}") from None
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: Record) -> None:
        """Adds the figures of one record, unknown ones left out."""
        figures = _step_scalars(record) if isinstance(record, StepRecord) else _eval_scalars(record)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items() if value is not None]
        self._add(Event(step=record.step, summary=Summary(value=values)))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        try:
            RecordWriter(self._file).write(event.SerializeToString())
        except OSError as error:
            raise MetricsError(f"{self._path}: {error.strerror or error}") from None

    def close(self) -> None:
        """Closes the file; what was written stays."""
        self._file.close()


def _step_scalars(record: StepRecord) -> dict[str, float | None]:
    scalars: dict[str, float | None] = {
        "loss/train": record.loss,
        "loss/smoothed": record.loss_smooth,
        "loss/aux": record.aux_loss,
        "loss/z": record.z_loss,
        "optim/lr": record.lr,
        "optim/grad_norm": record.grad_norm,
        "optim/loss_scale": record.loss_scale,
        "optim/skipped": float(record.skipped),
        "speed/tokens_per_s": record.tokens_per_s,
        "speed/model_flops_per_s": record.model_flops_per_s,
        "speed/mfu": record.mfu,
        "speed/memory_bytes": record.memory_bytes,
        "speed/comm_s": record.comm_s,
        "speed/comm_exposed_s": record.comm_exposed_s,
        "speed/comm_bytes": record.comm_bytes,
    }
    if record.mtp_loss is not None:
        scalars["loss/mtp"] = record.mtp_loss
    if record.load_cv:
        scalars["experts/drop_rate"] = record.drop_rate
    for layer, figures in enumerate(zip(record.load_cv, record.load_max_over_mean, record.dead_experts, strict=True)):
        for name, value in zip(("load_cv", "max_over_mean", "dead"), figures, strict=True):
            scalars[f"experts_{name}/moe_layer_{layer:02}"] = value
    return scalars


def _eval_scalars(record: EvalRecord) -> dict[str, float | None]:
    return {
        "loss/validation": record.loss,
        "validation/perplexity": record.perplexity,
        "validation/bits_per_byte": record.bits_per_byte,
    }
