"""A small program in the place of the trainer, and a launcher for it: what goes wrong on which rank is an argument.

`python -m tests.stand_in JSON` is a rank: steps that sum over all ranks. `launch` starts a launcher of such ranks.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ascend_moe_train.cluster.as_rank import done
from ascend_moe_train.cluster.rank import Progress, progress, unlink_shared_memory
from tests.mistakes import MISTAKES

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 150.0  # starting and compiling on a busy machine
STEP_S = 1.5  # the deadline of a step
PAUSE_S = 0.02
FAULT_STEP = 3
GO = "go"
RANK = "tests.stand_in"
LAUNCHER = "import sys; from tests.stand_in import run_launcher; run_launcher(sys.argv[1:])"

Fault = dict[str, Any]


def run_launcher(arguments: list[str]) -> None:
    """The launcher process: number of ranks, folder of the run, deadline of a step, module and arguments of a rank."""
    from ascend_moe_train.cluster.launch import launch, make_job
    from ascend_moe_train.cluster.mpiexec import rank_command
    from ascend_moe_train.cluster.output import PlainScreen
    from ascend_moe_train.cluster.verdict import Deadlines

    ranks, folder, step_s, module, *rest = arguments
    deadlines = Deadlines(compile_s=TIMEOUT_S, step_s=float(step_s), save_s=TIMEOUT_S)
    job = make_job(int(ranks), rank_command(module, rest), deadlines, run_dir=Path(folder))
    outcome = launch(job, PlainScreen())
    if outcome.message is not None:
        print(outcome.message, file=sys.stderr)
    sys.exit(outcome.exit_code)


@dataclass
class Launched:
    """A launcher that runs, what it printed, and the processes below it."""

    process: subprocess.Popen[str]
    ranks: int
    folder: Path
    output: str = ""
    errors: str = ""
    seen: dict[int, str] = field(default_factory=dict)

    def wait(self) -> int:
        """The exit code."""
        self.output, self.errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode

    def wait_for_step(self, step: int) -> None:
        """Returns once all ranks have done a step, and looks at the processes. Only now may something go wrong."""
        marks = [self.folder / f"rank-{rank}" for rank in range(self.ranks)]
        deadline_s = time.monotonic() + TIMEOUT_S
        while not all(mark.exists() and int(mark.read_text() or 0) >= step for mark in marks):
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.process.communicate()
            time.sleep(0.01)
        self.seen = descendants(self.process.pid)
        (self.folder / GO).touch()

    def pids(self, program: str) -> list[int]:
        """The processes seen below it that run this program: a rank has it last, and its guard among the others."""
        return [pid for pid, words in self.seen.items() if program_of(words) == program]

    def left(self) -> dict[int, str]:
        """The processes seen below it that are still there, after some time to go."""
        deadline_s = time.monotonic() + 5.0
        while (left := {pid: seen for pid, seen in self.seen.items() if command_of(pid) == seen}) and (
            time.monotonic() < deadline_s
        ):
            time.sleep(0.02)
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=TIMEOUT_S)
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def launch(ranks: int, folder: Path, *faults: Fault, steps: int = 1000) -> Launched:
    """Starts a launcher of stand-ins."""
    return launch_module(ranks, folder, RANK, json.dumps([str(folder), steps, faults]))


def launch_module(ranks: int, folder: Path, module: str, *arguments: str, step_s: float = STEP_S) -> Launched:
    """Starts a launcher of any module."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(ranks), str(folder), str(step_s), module, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    return Launched(process, ranks, folder)


def program_of(command: str) -> str:
    """The first module or else the program of a command line."""
    words = command.split(" ")
    is_module = Path(words[0]).name.startswith("python") and "-m" in words
    return words[words.index("-m") + 1] if is_module else Path(words[0]).name


def descendants(pid: int) -> dict[int, str]:
    """The command lines of all processes below one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, open_pids = {}, [pid]
    while open_pids:
        for child in children.get(open_pids.pop(), []):
            if command := command_of(child):
                found[child] = command
            open_pids.append(child)
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def main(folder: str, steps: int, faults: list[Fault]) -> None:
    """A rank."""
    import numpy as np
    from mpi4py import MPI

    world, watched = MPI.COMM_WORLD, progress()
    sequence, asked = 0, False

    def on_term(number: int, frame: object) -> None:
        nonlocal asked
        asked = True

    def any_asked() -> bool:
        """The step's collective: whether any rank was asked to stop."""
        nonlocal sequence
        watched.enter("all_reduce", "world", sequence)
        total = np.empty(1)
        world.Allreduce(np.array([float(asked)]), total)
        watched.leave()
        sequence += 1
        return bool(total[0])

    if not any(fault["what"] == "deaf" for fault in faults):
        signal.signal(signal.SIGTERM, on_term)
    world.Barrier()
    unlink_shared_memory()
    watched.phase("compile", 0)
    any_asked()
    for step in range(1, steps + 1):
        watched.phase("step", step)
        print(f"step {step}", flush=True)
        while faults and step == FAULT_STEP and not (Path(folder) / GO).exists():
            time.sleep(0.005)
        for fault in faults:
            if world.rank == fault["rank"] and step == fault.get("step", FAULT_STEP):
                cause(fault["what"], watched, fault)
        if any_asked():
            done(watched)
            sys.exit(143)
        (Path(folder) / f"rank-{world.rank}").write_text(str(step))
        time.sleep(PAUSE_S)
    done(watched)


def cause(what: str, watched: Progress, fault: Fault) -> None:
    """Something goes wrong here."""
    time.sleep(fault.get("after_s", 0.0))
    match what:
        case "signal":
            os.kill(os.getpid(), fault["number"])
        case "crash":
            ctypes.string_at(0)
        case "exit":
            os._exit(fault["code"])
        case "raise":
            watched.fail("ValueError: bad value", is_user_error=False)
            print("Traceback of it", file=sys.stderr, flush=True)
            os._exit(1)
        case "refuse":
            watched.fail("disk: No space left on device", is_user_error=True)
            print("error: disk: No space left on device", file=sys.stderr, flush=True)
            os._exit(2)
        case "finish":
            watched.phase("done")
            time.sleep(1000)
        case "stall":
            time.sleep(1000)
        case "other collective":
            watched.enter("all_to_all", "ep", 7)
            time.sleep(1000)
        case "abort":
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(5)
        case "shout":
            os.write(1, b"x" * fault["size_bytes"])
            os.write(2, b"\x1b[31mred\x1b[0m \xff\x07 bell\nlast")
        case "child":
            subprocess.Popen(["sleep", "1000"])
        case "scribble":
            scribble(fault["seed"])
        case _:
            MISTAKES[what](fault)


def scribble(seed: int) -> None:
    """Random bytes over the slots of all ranks."""
    import mmap
    import random

    with Path(os.environ["AMT_BOARD"]).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    memory[64:] = random.Random(seed).randbytes(len(memory) - 64)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
