"""Which checks there are on this machine, and their run from first to last. Pure."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ascend_moe_train.cluster import msrun, variables
from ascend_moe_train.cluster.mpiexec import find_mpiexec, rank_environment
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.selftest.curve import SEQUENCES, write_corpus
from ascend_moe_train.selftest.kernel_cases import INPUTS, OTHERS
from ascend_moe_train.selftest.mpi_ranks import mpi_command
from ascend_moe_train.selftest.names import COLLECTIVES, DEVICE, GO_ON, GRAPH, LOSSES, ONE_GOES_ON, RANKS_GO_ON
from ascend_moe_train.selftest.processes import Part, Show, left_out, run_part, worker_command
from ascend_moe_train.selftest.results import Figures, Result

Kind = Literal["kernels", "collectives", "training"]
KINDS: tuple[Kind, ...] = ("kernels", "collectives", "training")
MACHINE = "machine"
REFERENCE = "kernels: reference"
# By device: kernel sets, and the precisions that it trains in.
KERNELS = {
    "cpu": (("native", "fp32"), ("native", "fp16"), ("portable", "fp32")),
    "ascend": (("auto", "fp32"), ("auto", "fp16"), ("auto", "bf16")),
}
TRAINED = {"cpu": ("fp32", "fp16"), "ascend": ("fp32", "bf16")}
START_S = 180.0
MEET_S = 60
WORKER_FILE = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user wants: `limit_s` is how long a check may take."""

    device: str = "auto"
    ranks: int = 2
    only: tuple[Kind, ...] = KINDS
    limit_s: float = 180.0


@dataclass(kw_only=True)
class Report:
    """What has been found so far; `stopped_by` names the signal that ended it early. A report that is not finished is
    of a selftest that still runs, or was killed."""

    asked: Asked
    results: list[Result] = field(default_factory=list)
    stopped_by: str | None = None
    is_finished: bool = False
    took_s: float = 0.0

    @property
    def machine(self) -> Figures:
        """Facts about the device; empty if it cannot be used."""
        return next((each.figures for each in self.results if each.part == MACHINE), {})

    @property
    def has_failed(self) -> bool:
        """Whether any check did."""
        return any(each.status == "failed" for each in self.results)

    @property
    def has_passed(self) -> bool:
        """Whether all checks were done that this machine can do, and none failed."""
        return self.is_finished and not self.has_failed


Planned = Part | list[Result]
"""Checks to run, or such as cannot be."""


def run_suite(asked: Asked, folder: Path, show: Show, save: Callable[[Report], None]) -> Report:
    """All checks that this machine can do, with their files in `folder`.

    `show` is called with each result, `save` after each part with all so far. A SIGINT or SIGTERM ends what is running,
    and the checks that are left are not run.
    """
    report, start_s = Report(asked=asked), time.monotonic()

    def take(result: Result) -> None:
        report.results.append(result)
        report.took_s = time.monotonic() - start_s
        show(result)

    left: list[Planned] = [_machine(asked)]
    number = 0
    with _raising_interrupts():
        try:
            while number < len(left):
                planned = left[number]
                if isinstance(planned, Part):
                    run_part(planned, folder, take)
                else:
                    for each in planned:
                        take(each)
                if number == 0:
                    left += _after(report, asked, folder)
                number += 1
                save(report)
            report.is_finished = True
        except KeyboardInterrupt as stop:
            report.stopped_by = str(stop) or "SIGINT"
            for each in _unseen(left[number:], report):
                take(each)
    save(report)
    return report


def _after(report: Report, asked: Asked, folder: Path) -> list[Planned]:
    """What follows the first look at the machine."""
    if report.has_failed:
        return [left_out("everything", ["all other checks"], "MindSpore or the device cannot be used")]
    write_corpus(folder)
    return plan(asked, report.machine, folder)


def plan(asked: Asked, machine: Figures, folder: Path) -> list[Planned]:
    """Everything behind the first look at the machine, in order."""
    found: dict[Kind, Callable[[Asked, Figures, Path], list[Planned]]] = {
        "kernels": _kernels,
        "collectives": _collectives,
        "training": _training,
    }
    parts: list[Planned] = []
    for kind, parts_of in found.items():
        if kind in asked.only:
            parts += parts_of(asked, machine, folder)
        else:
            parts.append(left_out(kind, ["all"], f"--only {' '.join(asked.only)}"))
    parts.append(left_out("several machines", ["collectives", "training"], "it starts no ranks elsewhere"))
    return parts


def _machine(asked: Asked) -> Part:
    options = {"kind": "machine", "device": asked.device}
    return Part(name=MACHINE, checks=(DEVICE,), command=worker_command, options=options, check_s=asked.limit_s)


def _kernels(asked: Asked, machine: Figures, folder: Path) -> list[Planned]:
    device = str(machine["device"])
    sets = KERNELS[device]
    names, precise = (*OTHERS, *INPUTS), {"folder": str(folder), "device": device}
    reference = {"kind": "reference", "precisions": sorted({precision for _, precision in sets}), **precise}
    parts: list[Planned] = [_alone(REFERENCE, names, asked, reference)]
    for kernels, precision in sets:
        title = f"kernels: {kernels if device == 'cpu' else device} {precision}"
        # what keeps to fp32 in every precision is compared once
        checked = names if precision == "fp32" else tuple(INPUTS)
        if kernels == "native" and machine["native kernels"] != "yes":
            parts.append(left_out(title, checked, str(machine["native kernels"])))
            continue
        options = {"kind": "kernels", "kernels": kernels, "precision": precision, **precise}
        parts.append(_alone(title, checked, asked, options))
    return parts


def _collectives(asked: Asked, machine: Figures, folder: Path) -> list[Planned]:
    device = str(machine["device"])
    in_graph = tuple(name for name, (_, way) in COLLECTIVES.items() if way == GRAPH)
    options = {"kind": "collectives", "device": device}
    own = f"collectives: {'HCCL' if device == 'ascend' else 'MCCL'}, {asked.ranks} ranks"
    parts: list[Planned] = []
    if device == "cpu":
        title, names = f"collectives: MPI, {asked.ranks} ranks", tuple(COLLECTIVES)
        why = _why_no_ranks(asked, machine) or _why_no_mpi()
        parts.append(left_out(title, names, why) if why else _by_mpi(title, names, asked, options | {"backend": "mpi"}))
    why = _why_no_ranks(asked, machine)
    parts.append(
        left_out(own, in_graph, why) if why else _by_msrun(own, in_graph, asked, options | {"backend": "native"})
    )
    return parts


def _training(asked: Asked, machine: Figures, folder: Path) -> list[Planned]:
    device = str(machine["device"])
    options = {"kind": "training", "device": device, "folder": str(folder)}
    parts: list[Planned] = [
        _alone(f"training: one process, {precision}", (LOSSES, GO_ON), asked, options | {"precision": precision})
        for precision in TRAINED[device]
    ]
    title, names = f"training: {asked.ranks} ranks, fp32", (LOSSES, RANKS_GO_ON, ONE_GOES_ON)
    by, why_not = (_by_msrun, None) if device == "ascend" else (_by_mpi, _why_no_mpi())
    why = _why_no_ranks(asked, machine) or why_not
    if why is None and SEQUENCES % asked.ranks:
        why = f"its {SEQUENCES} sequences do not divide by {asked.ranks} ranks"
    parts.append(left_out(title, names, why) if why else by(title, names, asked, options | {"precision": "fp32"}))
    return parts


def _why_no_ranks(asked: Asked, machine: Figures) -> str | None:
    if asked.ranks == 1:
        return "--ranks 1: one rank has nobody to talk to"
    devices = machine["devices"]
    if machine["device"] == "ascend" and isinstance(devices, float) and devices < asked.ranks:
        return f"{asked.ranks} ranks need as many NPUs, and here are {devices:.0f}"
    return None


def _why_no_mpi() -> str | None:
    try:
        find_mpiexec()
    except ConfigError as error:
        return str(error)
    return None


def _part(title: str, names: Sequence[str], asked: Asked, options: dict[str, Any], **how: Any) -> Part:
    return Part(name=title, checks=tuple(names), options=options, start_s=START_S, check_s=asked.limit_s, **how)


def _alone(title: str, names: Sequence[str], asked: Asked, options: dict[str, Any]) -> Part:
    return _part(title, names, asked, options, command=worker_command)


def _by_mpi(title: str, names: Sequence[str], asked: Asked, options: dict[str, Any]) -> Part:
    return _part(title, names, asked, options, command=mpi_command, ranks=asked.ranks)


def _by_msrun(title: str, names: Sequence[str], asked: Asked, options: dict[str, Any]) -> Part:
    def command(folder: Path) -> list[str]:
        program = [str(WORKER_FILE), str(folder)]
        logs, port = folder / "logs", msrun.free_port()
        return msrun.command_line(asked.ranks, program, log_folder=logs, port=port, meet_s=MEET_S)

    own = {"PATH": msrun.path_variable(os.environ), variables.STARTER: "msrun", variables.RUN_ID: "selftest"}
    environment = rank_environment(asked.ranks, os.environ, own)
    return _part(title, names, asked, options, command=command, ranks=asked.ranks, environment=environment)


def _unseen(left: Sequence[Planned], report: Report) -> list[Result]:
    """What would have come."""
    seen = {(each.part, each.name) for each in report.results}
    found = []
    for planned in left:
        names = planned.checks if isinstance(planned, Part) else tuple(each.name for each in planned)
        part = planned.name if isinstance(planned, Part) else planned[0].part
        found += left_out(part, [name for name in names if (part, name) not in seen], f"stopped by {report.stopped_by}")
    return found


@contextmanager
def _raising_interrupts() -> Iterator[None]:
    """SIGTERM comes as KeyboardInterrupt too, with its name."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
