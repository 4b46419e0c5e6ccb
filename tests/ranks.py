"""Runs a function on n MPI ranks: `run_ranks(4, "tests.parity.worker:losses", {"layout": "dp2"})`. One start takes
seconds, so a function does many cases.

The function takes the argument and returns that rank's result: what JSON has, with NumPy arrays anywhere in it. It
finds its place by `MpiComm()`, or by `NativeOps()` if MindSpore's own launcher is wanted. An exception on one rank ends
all.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_moe_train.cluster import msrun
from ascend_moe_train.cluster.mpiexec import find_mpiexec

ROOT = Path(__file__).parents[1]
# before the deadline each rank that still runs prints where it is
TRACEBACK_EARLIER_S = 5.0
KILL_S = 10.0
MAX_OUTPUT_CHARS = 8000
MARK = "TEST_RANKS_FOLDER"
# MindSpore's own cluster on CPUs crashed in 2 of 27 starts of a program that does no more (docs/log.md, 2026-11-30)
CLUSTER_STARTS = 5
NOT_BUILT = "Failed to initialize distributed job cluster"


class RanksFailedError(AssertionError):
    """The ranks did not end well; the message is what they printed."""


class ClusterError(RanksFailedError):
    """MindSpore's own cluster was not there before the ranks did anything."""


def run_ranks(
    num_ranks: int,
    function: str,
    argument: Any = None,
    *,
    deadline_s: float = 120,
    environment: dict[str, str] | None = None,
    is_native: bool = False,
) -> list[Any]:
    """The results of `module:function` on every rank, in their order. Raises RanksFailedError; nothing is left running
    after the deadline."""
    for _ in range(CLUSTER_STARTS - 1 if is_native else 0):
        with contextlib.suppress(ClusterError):
            return _once(num_ranks, function, argument, deadline_s, environment or {}, is_native)
    return _once(num_ranks, function, argument, deadline_s, environment or {}, is_native)


def _once(
    num_ranks: int, function: str, argument: Any, deadline_s: float, environment: dict[str, str], is_native: bool
) -> list[Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "argument.json").write_text(json.dumps(argument))
        program = [function, name, str(deadline_s)]
        command = _native_command(num_ranks, program, folder) if is_native else _mpi_command(num_ranks, program)
        code, output = _run(command, environment, deadline_s, folder)
        results = [folder / f"result.{rank}.json" for rank in range(num_ranks)]
        # a cluster that crashes while it is taken down has done what it was there for
        if (code == 0 or is_native) and all(path.exists() for path in results):
            return [_load(path) for path in results]
    how = f"not done after {deadline_s} s" if code is None else f"exit code {code}"
    kind = ClusterError if is_native and NOT_BUILT in output else RanksFailedError
    raise kind(f"{function} on {num_ranks} ranks: {how}\n{output[-MAX_OUTPUT_CHARS:]}")


def _native_command(num_ranks: int, program: list[str], folder: Path) -> list[str]:
    script, port = [__file__, *program], msrun.free_port()
    return msrun.command_line(num_ranks, script, log_folder=folder / "logs", port=port, meet_s=60)


def _mpi_command(num_ranks: int, program: list[str]) -> list[str]:
    here = ["-launcher", "fork", "-rmk", "user", "-localhost", "127.0.0.1"]
    rank = [sys.executable, "-m", "mpi4py", "-m", "tests.ranks", *program]
    # tests that are killed leave no ranks behind
    tied = [sys.executable, "-m", "ascend_moe_train.cluster.tether", str(os.getpid())]
    return [*tied, str(find_mpiexec()), *here, "-n", str(num_ranks), *rank]


def _run(command: list[str], extra: dict[str, str], deadline_s: float, folder: Path) -> tuple[int | None, str]:
    """Exit code, None after the deadline, and output. No process of it is left."""
    # an MPI or launcher that started the tests must not be taken for that of the ranks
    given = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "HYD", "OMPI_", "AMT_"))}
    # ranks share the cores
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    chosen = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOG_v": "3", "PYTHONUNBUFFERED": "1"}
    mark = f"{MARK}={folder}"
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**given, **path, **chosen, **extra, MARK: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(deadline_s)
        finally:
            _kill_all(mark)
            process.wait()
        output.seek(0)
        logs = [path.read_text(errors="replace") for path in sorted(folder.glob("logs/worker*"))]
        return code, output.read().decode(errors="replace") + "".join(logs)


def _kill_all(mark: str) -> None:
    """Kills all processes of one start; mpiexec puts each into a session of its own, so they are known by a mark."""
    end_s = time.monotonic() + KILL_S
    while (left := list(_marked(mark.encode()))) and time.monotonic() < end_s:
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: bytes) -> Iterator[int]:
    """Processes with the mark in their environment; one that has ended has none any more."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def main(function: str, folder: str, deadline_s: str) -> None:
    """What each rank runs."""
    faulthandler.dump_traceback_later(max(float(deadline_s) - TRACEBACK_EARLIER_S, 1.0))
    module, _, name = function.partition(":")
    argument = json.loads((Path(folder) / "argument.json").read_text())
    result = getattr(importlib.import_module(module), name)(argument)
    arrays: dict[str, NDArray[Any]] = {}
    text = json.dumps(_packed(result, arrays))
    rank = os.environ.get("PMI_RANK") or os.environ["RANK_ID"]
    np.savez(Path(folder) / f"result.{rank}.npz", **arrays)
    (Path(folder) / f"result.{rank}.json").write_text(text)


def _packed(value: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    """The value with its arrays replaced by their keys in `arrays`."""
    if isinstance(value, np.ndarray):
        arrays[f"a{len(arrays)}"] = value
        return {"array": f"a{len(arrays) - 1}"}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {str(key): _packed(each, arrays) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(each, arrays) for each in value]
    return value


def _load(path: Path) -> Any:
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
        return json.loads(path.read_text(), object_hook=lambda found: _unpacked(found, arrays))


def _unpacked(found: dict[str, Any], arrays: Any) -> Any:
    is_array = set(found) == {"array"} and re.fullmatch(r"a\d+", str(found["array"]))
    return arrays[found["array"]] if is_array else found


if __name__ == "__main__":
    main(*sys.argv[1:])
