"""`amt bench data` and `checkpoint`: what a run needs of this machine beside its steps, in this process. Pure."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.bench.result import Chart, Column, Result, Row, Shows, machine, now, shown
from ascend_moe_train.checkpoint import store
from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import ConfigError, DataError, MetricsError, TrainingError
from ascend_moe_train.model.counts import num_parameters, parameter_shapes
from ascend_moe_train.parallel.mesh import mesh_of
from ascend_moe_train.train.inputs import open_inputs
from ascend_moe_train.train.memory import free_bytes
from ascend_moe_train.units import format_bytes

MAX_ROUNDS = 10_000
KINDS = ("", ".first", ".second")  # a weight and its moments, 4 bytes each
WORK = "work"
CHUNK_BYTES = 2**24
COLUMNS = (
    Column(key="figure", head="figure"),
    Column(key="shown", head="best"),
    Column(key="median_shown", head="median"),
)

CHARTS = (
    Chart(title="Times", values=("seconds",), shows="seconds"),
    Chart(title="Bytes in a second", values=("byte_rate",), shows="byte_rate"),
)

Array = NDArray[Any]
Times = dict[str, list[float]]


def check_rounds(rounds: int) -> None:
    """Raises ConfigError: not a number of rounds."""
    if not 1 <= rounds <= MAX_ROUNDS:
        raise ConfigError(f"--rounds {rounds}: must be from 1 to {MAX_ROUNDS:,}")


def data_result(config: RunConfig, ranks: int, rounds: int, command: str) -> Result:
    """How fast one of so many ranks gets its batches. Raises UserError subclasses: data that cannot be read, ranks that
    do not fit."""
    check_rounds(rounds)
    mesh = mesh_of(config, ranks)
    start_s = time.perf_counter()
    loader = open_inputs(config, 0, mesh.dp).train
    opened_s = time.perf_counter() - start_s
    times_s, tokens = [], 0
    for step in range(rounds):
        start_s = time.perf_counter()
        tokens = loader.batch(step).tokens_BS.size
        times_s.append(time.perf_counter() - start_s)
    rows = [
        _row("opening the corpora", [opened_s], "seconds"),
        _row("first batch", times_s[:1], "seconds"),
        _row("batch of a rank", times_s, "seconds"),
        _row("slowest batch", [max(times_s)], "seconds"),
        _row("tokens of a batch", [float(tokens)], "count"),
        _row("tokens/s of a rank", [tokens / each for each in times_s], "count", best=max),
    ]
    notes = (
        "Batches as the first rank reads them in training, one after the other; a step needs one. What the system has "
        "in its cache of files is read from there.",
    )
    settings = {"ranks": ranks, "data parallel ranks": mesh.dp, "rounds": rounds}
    return _result("data", "Batches of training data", rows, settings, notes, command)


def checkpoint_result(config: RunConfig, rounds: int, folder: Path, command: str) -> Result:
    """Writing and reading a checkpoint of the run's size in a folder that must not be there, and is gone afterwards;
    beside it a plain file of as many bytes.

    Raises UserError subclasses: no memory or no place for it, a damaged checkpoint.
    """
    check_rounds(rounds)
    size_bytes = 4 * len(KINDS) * num_parameters(config.model)
    free = free_bytes()
    if free is not None and 2 * size_bytes > free:
        raise TrainingError(
            f"a checkpoint of {format_bytes(size_bytes)}, twice in memory, has no room: {format_bytes(free)} are free"
        )
    if folder.exists():
        raise DataError(f"{folder}: is there already: name another folder with --out, or move it away")
    try:
        folder.mkdir(parents=True)
        if shutil.disk_usage(folder).free < 2 * size_bytes:
            raise DataError(f"{folder}: {format_bytes(2 * size_bytes)} are needed, the disk has less")
        times_s = _rounds(_tensors(config), folder, rounds)
    except OSError as error:
        raise MetricsError(f"{folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [_row("size", [float(size_bytes)], "bytes")]
    for name, found in times_s.items():
        rows.append(_row(name, found, "seconds"))
        rows.append(_row(f"{name}, a second", [size_bytes / each for each in found], "byte_rate", best=max))
    for way in ("write", "read"):
        ratios = [a / b for a, b in zip(times_s[f"plain file, {way}"], times_s[f"checkpoint, {way}"], strict=True)]
        rows.append(_row(f"checkpoint against a plain file, {way}", ratios, "ratio", best=max))
    notes = (
        "Weights and both moments in fp32, by one process, whole on the disk (fsync) when a write ends; reading "
        "verifies every byte, and is from the system's cache of files. In training a checkpoint is written beside the "
        "steps.",
    )
    return _result("checkpoint", "Checkpoints of a run's size", rows, {"rounds": rounds}, notes, command)


def _tensors(config: RunConfig) -> dict[str, Array]:
    generator = np.random.default_rng(0)
    return {
        f"{name}{kind}": generator.random(shape, np.float32)
        for name, shape in parameter_shapes(config.model).items()
        for kind in KINDS
    }


def _rounds(tensors: dict[str, Array], folder: Path, rounds: int) -> Times:
    ways: dict[str, Callable[[int], object]] = {
        "checkpoint, write": lambda number: store.save(folder / "c", number, tensors, {}, keep=1),
        "checkpoint, read": lambda number: store.load(store.find(folder / "c")),
        "plain file, write": lambda number: _write(folder / "plain", tensors),
        "plain file, read": lambda number: _read(folder / "plain"),
    }
    times_s: Times = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            start_s = time.perf_counter()
            way(number)
            times_s[name].append(time.perf_counter() - start_s)
    return times_s


def _write(path: Path, tensors: dict[str, Array]) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            for piece in _pieces(tensor):
                file.write(piece)
        os.fsync(file.fileno())


def _pieces(tensor: Array) -> Iterator[memoryview]:
    data = tensor.data.cast("B")
    for first in range(0, len(data), CHUNK_BYTES):
        yield data[first : first + CHUNK_BYTES]


def _read(path: Path) -> None:
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            continue


def _row(figure: str, values: list[float], shows: Shows, best: Callable[[list[float]], float] = min) -> Row:
    return {
        "figure": figure,
        "value": best(values),
        "median": median(values),
        shows: best(values),
        "shown": shown(best(values), shows),
        "median_shown": shown(median(values), shows) if len(values) > 1 else "",
    }


def _result(
    kind: str, title: str, rows: list[Row], settings: dict[str, Any], notes: tuple[str, ...], command: str
) -> Result:
    return Result(
        kind=kind,
        title=title,
        command=command,
        columns=COLUMNS,
        rows=tuple(rows),
        settings=settings,
        notes=notes,
        machine=machine(),
        made_at=now(),
    )
